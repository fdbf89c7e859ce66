// The layout of gathered rows. A rank has one slot for each peer, with the peer's shard, row by row, signalled in
// blocks of the height of a tile. Scales of fp8 rows lie behind all slots, one column of them after the other; a block
// is signalled when its scales have arrived, too. Shared by kernels, host, CPU path and tests.
#pragma once

#include "gemm/plan.h"

namespace flux::ag_gemm {

struct Layout {
  int rows;  // of one shard
  int row_bytes;
  int world_size;
  int scale_columns = 0;  // fp32 scales of a row: none, one, or one for each k-block

  FLUX_HD int row_blocks() const { return (rows + gemm::kBlockM - 1) / gemm::kBlockM; }
  FLUX_HD int64_t shard_bytes() const { return static_cast<int64_t>(rows) * row_bytes; }
  FLUX_HD int64_t offset(int slot, int row) const {
    return slot * shard_bytes() + static_cast<int64_t>(row) * row_bytes;
  }
  // The last block of a shard may have fewer rows than a tile.
  FLUX_HD int64_t block_bytes(int block) const {
    const int left = rows - block * gemm::kBlockM;
    return static_cast<int64_t>(left < gemm::kBlockM ? left : gemm::kBlockM) * row_bytes;
  }
  FLUX_HD int num_signals() const { return (world_size - 1) * row_blocks(); }
  FLUX_HD int64_t scale_stride() const { return (rows + 3) / 4 * 4; }  // TMA wants multiples of 16 bytes
  FLUX_HD int64_t scale_offset(int slot) const {
    return (world_size - 1) * shard_bytes() + slot * scale_columns * scale_stride() * 4;
  }
  FLUX_HD int64_t slot_bytes() const { return scale_offset(world_size - 1); }
};

// Of 16-bit elements, or with scales of fp8.
FLUX_HD Layout make_layout(int m, int k, int world_size, int scale_columns = 0) {
  return {m / world_size, scale_columns > 0 ? k : 2 * k, world_size, scale_columns};
}

// The place of a row's scale in its column of a slot. If a rank's rows share a scale (step 0), CTAs send it with each
// block, to all rows of it, and copy engines only once, before everything else.
FLUX_HD int place_of_scale(int row, int step, bool copied) {
  return step > 0 ? row : copied ? 0 : row / gemm::kBlockM * gemm::kBlockM;
}

// A part of a block of rows. The bytes of a block may exceed an int, those of a piece do not.
struct Piece {
  int peer, block;  // the peer's number in an order that the caller chooses
  int64_t offset;   // in the block
  int bytes;        // 0: beyond the end of the block; kScales: the scales of the block
  static constexpr int kScales = -1;
};

// All blocks of the first peer, then of the second, and so on, each in pieces of one size, and one with its scales.
struct Pieces {
  Layout layout;
  int size;           // of a piece, in bytes
  int per_block;      // the last block has pieces beyond its end if it is shorter than the others
  int of_scales = 0;  // 1: a further piece

  FLUX_HD int count(int peers) const { return peers * layout.row_blocks() * (per_block + of_scales); }
  FLUX_HD Piece at(int index) const {
    const int all = per_block + of_scales, all_blocks = index / all, block = all_blocks % layout.row_blocks();
    const int64_t offset = static_cast<int64_t>(index % all) * size;
    if (of_scales > 0 && index % all == per_block)
      return {all_blocks / layout.row_blocks(), block, 0, Piece::kScales};
    const int64_t left = layout.block_bytes(block) - offset;
    return {all_blocks / layout.row_blocks(), block, offset,
            left <= 0 ? 0 : static_cast<int>(left < size ? left : size)};
  }
  FLUX_HD int of_block(int block) const {
    return static_cast<int>((layout.block_bytes(block) + size - 1) / size) + of_scales;
  }
};

FLUX_HD Pieces make_pieces(const Layout& layout, int size, bool with_scales = false) {
  return {layout, size, static_cast<int>((layout.block_bytes(0) + size - 1) / size), with_scales};
}

// The bytes that a CTA sends at a time: at least two pieces of a shard for each pushing CTA, else as large as possible.
FLUX_HD int piece_bytes(const Layout& layout, int pushers) {
  constexpr int kMin = 32 << 10, kMax = 256 << 10;
  int bytes = kMax;
  while (bytes > kMin && static_cast<int64_t>(bytes) * 2 * pushers > layout.shard_bytes()) bytes /= 2;
  return bytes;
}

// Own rows come first, then those of peers in the order of arrival, one peer at a time: a raster group with rows of
// several would wait for the last. But then the weight is read once for each peer. So groups do have rows of several if
// a shard has few rows, or the weight many columns (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines).
FLUX_HD gemm::TileOrder make_order(int m, int n, int world_size, int rank, const gemm::TileConfig& config,
                                   gemm::Cluster cluster, int group_m) {
  const int m_tiles = gemm::ceil_div(m / world_size, gemm::kBlockM),
            n_tiles = gemm::ceil_div(n, config.block_n);
  gemm::TileOrder order = {m_tiles, n_tiles, world_size, rank, cluster, group_m, gemm::Peers::kGathered};
  // At 750 TFLOP/s, 187 rows take as long to compute as the weight to read at 4 TB/s. Rows arrive at 250 GB/s.
  constexpr int kMinTiles = 4, kColumnsPerPeer = 3000;
  if (world_size > 2 && order.m_tiles >= kMinTiles && n < kColumnsPerPeer * (world_size - 1)) {
    const int rows = gemm::ceil_div(order.m_tiles, order.cluster_m());
    order.group_m = gemm::ceil_div(rows, gemm::ceil_div(rows, group_m));
  }
  return order;
}

}  // namespace flux::ag_gemm
