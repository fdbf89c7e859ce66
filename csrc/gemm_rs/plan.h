// The layout of the slots of GEMM+ReduceScatter. A rank has one slot for each peer (its own contribution never leaves
// the registers), with the peer's tiles of this rank's shard one after the other. Each half tile (the 64 rows of a math
// warpgroup) has its own signal. Shared by kernel, host, CPU path and tests.
#pragma once

#include "gemm/plan.h"

namespace flux::gemm_rs {

struct Layout {
  int m_tiles, n_tiles;  // per shard
  int tile_bytes;
  int world_size;

  FLUX_HD int tile_index(int m, int n) const { return n * m_tiles + m; }
  FLUX_HD int tiles_per_slot() const { return m_tiles * n_tiles; }
  FLUX_HD int64_t tile_offset(int slot, int m, int n) const {
    return (static_cast<int64_t>(slot) * tiles_per_slot() + tile_index(m, n)) * tile_bytes;
  }
  // Index within the signal words of a slot; SymmBuffer::signal defines their address.
  FLUX_HD int signal_index(int m, int n, int half) const { return tile_index(m, n) * 2 + half; }
  FLUX_HD int num_signals() const { return (world_size - 1) * tiles_per_slot() * 2; }
  FLUX_HD int64_t slot_bytes() const { return tile_offset(world_size - 1, 0, 0); }
};

// Copy engines send the tiles of a slot, about as they are computed, in `count` chunks with one signal each.
struct Chunks {
  int count;
  int tiles;  // of a slot

  FLUX_HD int first(int chunk) const { return static_cast<int>(static_cast<int64_t>(tiles) * chunk / count); }
  FLUX_HD int of(int tile_index) const {
    return static_cast<int>((static_cast<int64_t>(tile_index + 1) * count - 1) / tiles);
  }
  FLUX_HD int size(int chunk) const { return first(chunk + 1) - first(chunk); }
};

// The chunks that copy engines send to each peer, or 0 if storers send the tiles: faster as long as the transfer fits
// into the time of the GEMM (docs/design/gemm-rs.md#copy-engines).
inline int copy_chunks(int m, int n, int k, int world_size, int operand_bytes = 2) {
  constexpr double kLinkBytesPerUs = 340e3;
  constexpr double kFlopsPerUs = 750e6;  // of 16-bit operands; of fp8 twice as many
  constexpr double kShare = 0.6;  // storers keep up with transfers of up to this share of the GEMM's time
  constexpr int64_t kMinBytes = 32 << 20;
  constexpr int kChunks = 4;
  const int64_t slot_bytes = static_cast<int64_t>(m / world_size) * n * gemm::kResultBytes;
  const double wire_us = static_cast<double>(slot_bytes) * (world_size - 1) / kLinkBytesPerUs;
  const double gemm_us = 2.0 * m * n * k * operand_bytes / (2 * kFlopsPerUs);
  return slot_bytes < kMinBytes || wire_us < kShare * gemm_us ? 0 : kChunks;
}

// The pace of a storer: cycles from the start of one chunk (2 KB) to the next; 0: as fast as possible.
struct Pace {
  int cycles_per_chunk;
  int last_wave;  // cycles per chunk of the CTA's last tile for another rank
};

// A tile should have left after 60 % of the next mainloop, and all SMs together not exceed the link. The last wave is
// paced only if a whole wave of own tiles follows; else a rank is already waiting (docs/design/gemm-rs.md#pacing).
inline Pace make_pace(const gemm::TileOrder& order, int k_blocks, int num_sms) {
  constexpr int kCyclesPerBlock = 40;   // 60 % of the 66 that a k-block of one chunk's columns takes
  constexpr int kLinkCyclesPerSm = 20;  // 4 KB from an SM in 20 cycles for each SM: 307 GB/s at 1.5 GHz
  const int paced = k_blocks * kCyclesPerBlock;
  const int link = kLinkCyclesPerSm * num_sms;
  const int own_ctas = order.clusters_in(order.m_tiles) * order.cluster_size();
  const int remote_ctas = order.num_remote_clusters() * order.cluster_size();
  const bool own_wave_follows = own_ctas * 10 >= num_sms * 9;
  Pace pace = {paced > link ? paced : link, own_wave_follows ? link : 0};
  if (remote_ctas <= num_sms) pace.cycles_per_chunk = pace.last_wave;
  return pace;
}

FLUX_HD Layout make_layout(int m, int n, int world_size, const gemm::TileConfig& config) {
  const int rows = m / world_size;
  return {gemm::ceil_div(rows, gemm::kBlockM), gemm::ceil_div(n, config.block_n),
          gemm::kBlockM * config.block_n * gemm::kResultBytes, world_size};
}

FLUX_HD gemm::TileOrder make_order(const Layout& layout, int rank, gemm::Cluster cluster, int group_m,
                                   bool copied = false) {
  const gemm::Peers peers = copied ? gemm::Peers::kOneByOne : gemm::Peers::kTakeTurns;
  return {layout.m_tiles, layout.n_tiles, layout.world_size, rank, cluster, group_m, peers};
}

}  // namespace flux::gemm_rs
