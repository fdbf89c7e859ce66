// Where gathered rows lie. A rank's slots hold one area for each peer (its own rows are read where the user
// has them); each area holds the peer's shard, row by row. Rows are announced in blocks, as high as a tile, with
// one signal each. Shared by kernels, host, CPU path and tests.
#pragma once

#include <cstdint>

#include "gemm/tile_order.h"

namespace flux::ag_gemm {

struct Layout {
  int rows;  // of one shard
  int row_bytes;
  int world_size;

  FLUX_HD static int slot_index(int src, int owner) { return src < owner ? src : src - 1; }
  FLUX_HD int row_blocks() const { return (rows + gemm::kBlockM - 1) / gemm::kBlockM; }
  FLUX_HD int64_t shard_bytes() const { return static_cast<int64_t>(rows) * row_bytes; }
  FLUX_HD int64_t offset(int slot, int row) const {
    return slot * shard_bytes() + static_cast<int64_t>(row) * row_bytes;
  }
  FLUX_HD int num_signals() const { return (world_size - 1) * row_blocks(); }
  FLUX_HD int64_t slot_bytes() const { return (world_size - 1) * shard_bytes(); }
};

FLUX_HD Layout make_layout(int m, int k, int world_size) {
  return {m / world_size, k * gemm::kElementBytes, world_size};
}

// What one CTA sends at a time: a few pieces of each shard for each of the CTAs that push, so that all of them are busy
// to its end, and large ones if they are few.
FLUX_HD int piece_bytes(const Layout& layout, int pushers) {
  constexpr int kMin = 32 << 10, kMax = 256 << 10;
  int bytes = kMax;
  while (bytes > kMin && static_cast<int64_t>(bytes) * 2 * pushers > layout.shard_bytes()) bytes /= 2;
  return bytes;
}

// Own rows first: they are here already. Then those of one peer after the other as they arrive, and not a group of tiles
// with rows of several peers, which would wait for the last of them: M = 2048 and 4096 of 70B's attention then take 149
// and 242 us instead of 178 and 275 on four GPUs, by copy engine. But each peer's rows read the weight again. So where
// these are few, or the weight has so many columns that all rows have arrived when the own ones are computed, groups stay
// as they are: one peer at a time, M = 1024 of 8B's MLP takes 113 us instead of 109, and that of 70B's 349 instead of 334.
FLUX_HD gemm::TileOrder make_order(int m, int n, int world_size, int rank, const gemm::TileConfig& config,
                                   gemm::Cluster cluster, int group_m) {
  gemm::TileOrder order = {(m / world_size + gemm::kBlockM - 1) / gemm::kBlockM,
                           (n + config.block_n - 1) / config.block_n,
                           world_size,
                           rank,
                           cluster,
                           group_m,
                           gemm::Peers::kGathered};
  // At 750 TFLOP/s and, for the weight, 4 TB/s, 187 rows take as long as that; for rows, with all that comes between
  // copies, 250 GB/s.
  constexpr int kMinTiles = 4, kColumnsPerPeer = 3000;
  if (world_size > 2 && order.m_tiles >= kMinTiles && n < kColumnsPerPeer * (world_size - 1)) {
    const int rows = gemm::ceil_div(order.m_tiles, order.cluster_m());
    order.group_m = gemm::ceil_div(rows, gemm::ceil_div(rows, group_m));
  }
  return order;
}

}  // namespace flux::ag_gemm
