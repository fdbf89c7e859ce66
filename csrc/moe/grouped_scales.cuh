// Scales of fp8 operands in grouped GEMMs. Those of rows of x arrive with each stage: rows of an expert begin anywhere.
// One scale for all rows, and scales of the weight that do not depend on K, are applied to the sums.
#pragma once

#include "gemm/sm90/mainloop.cuh"

namespace flux::moe {

struct GroupedScales {
  // Of each expert (step 0), or of each row of its weight (step 1); or of blocks: [experts][n / kScaleBlock][k_block].
  const float* weight;
  int weight_step;
  int weight_rows;  // of all experts
  bool blocks;
  bool e5m2;             // the type of x
  const float* x;        // the scale of all rows, or null: each row has its own
  CUtensorMap x_scales;  // if rows are in order: of rows, or [k / kScaleBlock] of them
};

// A tile's columns in the weight: the first half begins at `row` of an expert's weight, the second half `second` rows later.
struct WeightRows {
  int expert, row, second;
};

template <int kBlockN, class Smem>
using GroupedPromotion = gemm::TilePromotion<kBlockN, 2, Smem>;

// n, k_blocks: of an expert's weight. first_row: of the warpgroup, in the staged scales.
template <int kBlockN, class Smem>
FLUX_DEVICE GroupedPromotion<kBlockN, Smem> grouped_promotion(const GroupedScales& s, const WeightRows& at,
                                                              int n, int k_blocks, int first_row,
                                                              const Smem& smem, float (&sums)[kBlockN / 2]) {
  using gemm::kScaleBlock;
  const int first = at.row / kScaleBlock, second = min(at.row + at.second, n - 1) / kScaleBlock;
  const int blocks = gemm::ceil_div(n, kScaleBlock);
  const float* const weight = s.weight + (static_cast<int64_t>(at.expert) * blocks + first) * k_blocks;
  return {sums,
          smem,
          /*has_rows=*/s.x == nullptr,
          first_row + gemm::first_row_of_thread(),
          {s.blocks ? weight : nullptr, k_blocks - 1},
          {s.blocks ? weight + (second - first) * k_blocks : nullptr, k_blocks - 1},
          /*boundary=*/1,
          /*pairs=*/!s.blocks};
}

template <int kAccumulators>
FLUX_DEVICE void scale_grouped_sums(const GroupedScales& s, const WeightRows& at, int n,
                                    float (&d)[kAccumulators]) {
  const float of_rows = s.x == nullptr ? 1.0f : __ldg(s.x);
  if (s.blocks) return;
  const int first = at.expert * n + at.row + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    const int in_half = i < kAccumulators / 2 ? i * 2 : i * 2 - kAccumulators + at.second;
    const int row = min(first + in_half, s.weight_rows - 2);  // those beyond the edge are not stored
    const float left = of_rows * __ldg(s.weight + (s.weight_step > 0 ? row : at.expert));
    const float right = of_rows * __ldg(s.weight + (s.weight_step > 0 ? row + 1 : at.expert));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      d[i + half * 2] *= left;
      d[i + half * 2 + 1] *= right;
    }
  }
}

}  // namespace flux::moe
