// Swap-AB tiles for few rows of x: D^T = W * x^T, with the weight as wgmma's 64-row operand. A tile is kSwapAbN columns
// of the result and 16 to 192 rows of x. All SMs must load the weight: with fewer tiles than SMs, a cluster of CTAs
// splits K and adds its partial tiles. If rows need two tiles, a pair of CTAs may share the loads of the weight.
#pragma once

#include "gemm/plan.h"

namespace flux::gemm {

constexpr int kSwapAbN = 64;
constexpr int kMaxSplit = 8;  // CTAs that share a tile's K; powers of two
// First id of the swap-AB tile shapes in a packed choice (plan.h).
constexpr int kFirstSwapAb = 64;

struct SwapAbConfig {
  int id;
  int rows;      // of x
  int k_blocks;  // of a stage
  int stages;
  bool in_pairs;        // whether two CTAs can share the weight; pairs of others were slower for most weights
  bool is_fp8 = false;  // products of k-blocks are promoted (plan.h)

  constexpr int block_k() const { return kBlockBytes / (is_fp8 ? 1 : 2); }
};

// Two k-blocks in a stage need one wait instead of two. If memory bandwidth is the only limit, one k-block in a stage
// is better for a single row, and so are fewer stages than fit (docs/design/decode.md#what-made-the-gemm-faster).
// clang-format off
constexpr SwapAbConfig kSwapAbConfigs[] = {
    // id, rows, k-blocks, stages, in pairs
    {0, 16, 1, 10, false},
    {1, 16, 2, 7, false},
    {2, 32, 2, 6, true},
    {3, 64, 1, 11, true},
    {4, 64, 2, 5, false},
    {5, 128, 1, 7, true},
    {6, 192, 1, 5, false},
    {7, 16, 2, 7, false, true},
    {8, 32, 2, 6, true, true},
    {9, 64, 1, 10, true, true},
    {10, 128, 1, 7, true, true},
};
// clang-format on
constexpr int kNumSwapAbConfigs = sizeof(kSwapAbConfigs) / sizeof(kSwapAbConfigs[0]);
// Whether there is a kernel that also sums over ranks. With other tiles, a launch of its own that sums shortens a
// decoder layer as much (docs/design/decisions.md#gemm_ar-keeps-the-fused-tiles-that-shorten-a-decoder-layer).
constexpr bool supports_sum(const SwapAbConfig& c) { return !c.is_fp8 && c.rows >= 32; }

constexpr int kSwapAbWeightBytes = kSwapAbN * kBlockBytes;  // of a k-block
constexpr int swap_ab_rows_bytes(const SwapAbConfig& c) { return c.rows * kBlockBytes; }
constexpr int swap_ab_stage_bytes(const SwapAbConfig& c) {
  return c.k_blocks * (kSwapAbWeightBytes + swap_ab_rows_bytes(c));
}
// The number of stages that K needs, which is the largest possible split of K.
FLUX_HD int swap_ab_stage_blocks(const SwapAbConfig& c, int k) {
  return ceil_div(k, c.block_k() * c.k_blocks);
}
// Block scales of the rows of a k-block, where TMA can write them.
constexpr int swap_ab_scale_bytes(const SwapAbConfig& c) {
  return !c.is_fp8 ? 0 : c.rows < kBlockBytes / 4 ? kBlockBytes : 4 * c.rows;
}

// Each CTA of a cluster adds a share of the tile's columns, at most this many rows at a time. A row of a share is padded
// by four floats: the eight rows that a warp writes at once are in different banks. A CTA stages its part of every share.
constexpr int swap_ab_meeting_rows(const SwapAbConfig& c) { return c.rows < 64 ? c.rows : 64; }
constexpr int swap_ab_row_floats(int split) { return kSwapAbN / split + 4; }
constexpr int swap_ab_meeting_bytes(const SwapAbConfig& c) {
  return kMaxSplit * swap_ab_meeting_rows(c) * swap_ab_row_floats(kMaxSplit) * 4;
}
constexpr int swap_ab_barriers(const SwapAbConfig& c) { return 2 * c.stages + 2; }
constexpr int swap_ab_smem_bytes(const SwapAbConfig& c) {
  return 1024 + c.stages * (swap_ab_stage_bytes(c) + c.k_blocks * swap_ab_scale_bytes(c)) +
         2 * swap_ab_meeting_bytes(c) + 8 * swap_ab_barriers(c) + kSharesBytes;
}

}  // namespace flux::gemm
