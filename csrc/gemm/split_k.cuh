// A tile whose K is split over the CTAs of a cluster: for problems of fewer tiles than the GPU has SMs, whose K
// is long. Each CTA multiplies a part of K, then sums a share of the tile's columns, slab by slab, and stores
// that.
//
// Partial sums meet in the memory of the ring, from where the others fetch them: a cluster has one tile, so
// nothing is loaded behind it.
#pragma once

#include "gemm/smem.cuh"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

constexpr int kMinSplit = 2;

// One CTA's part of K and, of the tile, the chunks of columns that it sums and stores.
template <int kChunks, int kSlabChunks>
struct KPart {
  static constexpr int kSlabs = (kChunks + kSlabChunks - 1) / kSlabChunks;
  static constexpr int kMaxSlabs = (kSlabs + kMinSplit - 1) / kMinSplit;  // of a share

  int first_block, num_blocks;
  int first_chunk, end_chunk;

  FLUX_DEVICE KPart(int part, int split, int k_blocks) {
    first_block = k_blocks * part / split;
    num_blocks = k_blocks * (part + 1) / split - first_block;
    first_chunk = kSlabs * part / split * kSlabChunks;
    end_chunk = min(kSlabs * (part + 1) / split * kSlabChunks, kChunks);
  }
};

// Where a thread of a math warpgroup leaves half of its sums of a chunk.
template <int kChunks, class Smem>
FLUX_DEVICE uint32_t part_address(const Smem& smem, int warpgroup, int thread, int chunk, int half) {
  return smem.base + ((warpgroup * kChunks + chunk) * 2 + half) * 2048 + thread * 16;
}

// All math threads: leaves its sums for the cluster.
template <int kChunks, class Smem, int kAccumulators>
FLUX_DEVICE void leave_parts(const Smem& smem, int warpgroup, int thread, const float (&d)[kAccumulators]) {
  static_assert(kNumMathWarpgroups * 128 * kAccumulators * 4 <= Smem::kTile.stages * Smem::kStageBytes);
  // The other warpgroup may still be multiplying what lies there.
  ptx::named_barrier_sync(1, kNumMathWarpgroups * 128);
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    ptx::store_shared_v4(part_address<kChunks>(smem, warpgroup, thread, i / 2, i % 2), d[4 * i], d[4 * i + 1],
                         d[4 * i + 2], d[4 * i + 3]);
  }
}

// Sums what all CTAs of the cluster have left of this CTA's share, in their order. All of a CTA's loads are on
// their way before the first is waited for.
template <int kChunks, class Smem, class Part, int kSums>
FLUX_DEVICE void sum_parts(const Smem& smem, const Part& part, int split, int warpgroup, int thread,
                           float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int source = 0; source < split; ++source) {
    float4 parts[kSums / 4];
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const int chunk = min(part.first_chunk + i / 2, kChunks - 1);  // beyond the share for nothing
      parts[i] = ptx::load_cluster_v4(part_address<kChunks>(smem, warpgroup, thread, chunk, i % 2), source);
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      sums[4 * i] += parts[i].x;
      sums[4 * i + 1] += parts[i].y;
      sums[4 * i + 2] += parts[i].z;
      sums[4 * i + 3] += parts[i].w;
    }
  }
}

}  // namespace flux::gemm
