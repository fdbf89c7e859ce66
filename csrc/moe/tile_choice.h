// The tile shapes of grouped GEMMs, and the choice among them. Ranks that count chunks of columns in tiles must choose
// the same shape, so the choice depends only on sizes that are the same on all ranks, not on the routing.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm/select.h"

namespace flux::moe {

// Ids in tile_config.h of the shapes that are stored in whole 64-column panels; those of fp8 promote.
constexpr int kGroupedConfigs[] = {0, 3, 5, 9, 17, 11, 10};
constexpr bool is_grouped_config(int config) {
  for (const int one : kGroupedConfigs) {
    if (one == config) return true;
  }
  return false;
}

// The fastest shape for `num_rows` rows over all experts, as modelled from the number of waves; ties: the first shape
// of the list. The last tile of an expert is half full on average.
inline int choose_grouped_config(int64_t num_rows, int experts, int columns, int k, int num_sms,
                                 int operand_bytes = 2) {
  const double filled = std::min<double>(experts, static_cast<double>(num_rows));
  const double tile_rows =
      filled * std::max(1.0, static_cast<double>(num_rows) / filled / gemm::kBlockM + 0.5);
  int best = -1;
  double best_us = INFINITY;
  for (const int config : kGroupedConfigs) {
    const gemm::TileConfig& tile = gemm::kTileConfigs[config];
    if (tile.operand_bytes() != operand_bytes) continue;
    const int block_n = tile.block_n;
    const double waves = std::ceil(tile_rows * gemm::ceil_div(columns, block_n) / num_sms);
    const double block_us = gemm::k_block_us(tile, 0.128 * (gemm::kBlockM + block_n), /*in_pairs=*/false);
    const double time_us = waves * (gemm::ceil_div(k, tile.block_k()) * block_us + 0.5);
    if (time_us < best_us) {
      best = config;
      best_us = time_us;
    }
  }
  return best;
}

}  // namespace flux::moe
