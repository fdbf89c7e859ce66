// Split K: the CTAs of a cluster share a tile, and each multiplies a part of K, for problems with fewer tiles than SMs
// and a long K. Each CTA then sums a share of the tile's columns, slab by slab, and stores it. A CTA writes its sums to
// the memory of the stages; one bulk copy for each other CTA and warpgroup delivers the part that it adds, and completes
// on its barrier. Cluster barriers that order memory would wait for everything in flight.
#pragma once

#include "gemm/sm90/smem.cuh"

namespace flux::gemm {

// The part of K that a CTA multiplies, and the chunks of the tile's columns that it sums and stores.
template <int kTileChunks, int kSlabChunks>
struct KPart {
  static constexpr int kChunks = kTileChunks;
  static constexpr int kSlabs = (kChunks + kSlabChunks - 1) / kSlabChunks;
  static constexpr int kMaxSlabs = (kSlabs + kMinKSplit - 1) / kMinKSplit;  // of a share
  static constexpr int kMaxChunks = kMaxSlabs * kSlabChunks;

  int first_block, num_blocks;
  int first_chunk, end_chunk;

  FLUX_DEVICE KPart(int part, int split, int k_blocks) {
    first_block = k_blocks * part / split;
    num_blocks = k_blocks * (part + 1) / split - first_block;
    first_chunk = kSlabs * part / split * kSlabChunks;
    end_chunk = min(kSlabs * (part + 1) / split * kSlabChunks, kChunks);
  }
};

// A chunk of a warpgroup's sums: halves of 16 bytes a thread.
constexpr int kPartBytes = 2 * 128 * 16;

// The exchange of partial sums, for the math threads of a CTA. The memory of the stages holds this CTA's sums, then the
// parts of its share that other CTAs have sent.
template <class Smem, class Part>
struct Meeting {
  static constexpr int kMaxOthers = kMaxKSplit - 1;
  static constexpr int kOwnBytes = kNumMathWarpgroups * Part::kChunks * kPartBytes;
  static constexpr int kShareBytes = Part::kMaxChunks * kPartBytes;  // of a warpgroup and a CTA, at most
  static_assert(kOwnBytes + kMaxOthers * kNumMathWarpgroups * kShareBytes <=
                Smem::kTile.stages * Smem::kStageBytes);

  const Smem& smem;
  const int cta, split, warpgroup, thread;  // of the warpgroup

  FLUX_DEVICE uint32_t own(int chunk) const {
    return smem.base + (warpgroup * Part::kChunks + chunk) * kPartBytes;
  }
  FLUX_DEVICE uint32_t received(int at, int source) const {
    const int slot = source < at ? source : source - 1;
    return smem.base + kOwnBytes + (slot * kNumMathWarpgroups + warpgroup) * kShareBytes;
  }

  // Called by all math threads after their last wgmma has read its operands: writes the sums and sends them.
  template <int kAccumulators>
  FLUX_DEVICE void send(const float (&d)[kAccumulators]) const {
    // Announces to all CTAs of the cluster that this warp has read its stages, so they may write there. The named
    // barrier makes both warpgroups of this CTA finish before the stores below.
    const int lane = static_cast<int>(ptx::lane());
    if (lane < split) ptx::mbarrier_arrive_cluster(smem.ring_free(), lane);
    ptx::named_barrier_sync(kMathBarrier, kNumMathWarpgroups * 128);
#pragma unroll
    for (int i = 0; i < 2 * Part::kChunks; ++i) {
      ptx::store_shared_v4(own(i / 2) + i % 2 * (kPartBytes / 2) + thread * 16, d[4 * i], d[4 * i + 1],
                           d[4 * i + 2], d[4 * i + 3]);
    }
    ptx::fence_proxy_async_smem();
    ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (thread < split) {
      // Also waits if nothing is sent, because all arrivals must have been received before a CTA exits.
      ptx::mbarrier_wait(smem.ring_free(), 0);
      const Part share(thread, split, 0);
      const uint32_t bytes = (share.end_chunk - share.first_chunk) * kPartBytes;
      if (thread == cta) {
        ptx::mbarrier_arrive_expect_tx(smem.parts_full(), (split - 1) * bytes);
      } else if (bytes > 0) {
        ptx::bulk_copy_cluster(received(thread, cta), own(share.first_chunk), bytes, smem.parts_full(),
                               thread);
      }
    }
    __syncwarp();  // reconverges the warp; a CTA without a share has no later synchronisation
  }

  // Called by all math threads: sums this CTA's share over all CTAs, in the order of their ranks in the cluster.
  template <int kSums>
  FLUX_DEVICE void sum(const Part& part, float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
    ptx::mbarrier_wait(smem.parts_full(), 0);
#pragma unroll 1
    for (int source = 0; source < split; ++source) {
      const uint32_t from = (source == cta ? own(part.first_chunk) : received(cta, source)) + thread * 16;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (part.first_chunk + i / 2 >= part.end_chunk) break;
        const float4 v = ptx::load_shared_floats(from + i * (kPartBytes / 2));
        sums[4 * i] += v.x;
        sums[4 * i + 1] += v.y;
        sums[4 * i + 2] += v.z;
        sums[4 * i + 3] += v.w;
      }
    }
  }
};

}  // namespace flux::gemm
