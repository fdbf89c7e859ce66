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

// Own rows first: they are here already.
FLUX_HD gemm::TileOrder make_order(int m, int n, int world_size, int rank, const gemm::TileConfig& config,
                                   gemm::Cluster cluster, int group_m) {
  return {(m / world_size + gemm::kBlockM - 1) / gemm::kBlockM,
          (n + config.block_n - 1) / config.block_n,
          world_size,
          rank,
          cluster,
          group_m,
          gemm::Peers::kGathered};
}

}  // namespace flux::ag_gemm
