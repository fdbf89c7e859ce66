// The loop over K of a math warpgroup: waits for stages, multiplies them with wgmma, and releases them to be loaded
// again. All GEMM kernels share it.
#pragma once

#include "gemm/smem.cuh"
#include "gemm/wgmma.cuh"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

// wgmma descriptors of a k-block.
struct Operands {
  uint64_t a, b;
};

// Leaves the sum of all stages in `d`.
//
//   kStepA, kStepB           bytes from one wgmma step of K (16 elements) to the next
//   kBlocks                  k-blocks of a stage
//   kReleasesEarly           if the next stage has not arrived, the previous one is released before the wait
//   full(stage)              its barrier
//   operands(stage, block)
//   release(stage)           called by all threads once their wgmmas have read it
template <class Mma, int kStepA, int kStepB, int kBlocks = 1, bool kReleasesEarly = false, class Ring,
          class Full, class GetOperands, class Release>
FLUX_DEVICE void multiply(Ring& ring, int num_stages, float (&d)[Mma::kAccumulators], const Full& full,
                          const GetOperands& operands, const Release& release) {
  int held = kReleasesEarly ? -1 : 0;  // the stage whose wgmmas may still be running
  // Unrolling would only make the code longer.
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage, ring.advance()) {
    if constexpr (kReleasesEarly) {
      if (held >= 0 && !ptx::mbarrier_test(full(ring.index), ring.phase)) {
        cute::warpgroup_wait<0>();
        release(held);
        held = -1;
      }
    }
    ptx::mbarrier_wait(full(ring.index), ring.phase);
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Operands at = operands(ring.index, block);
#pragma unroll
      for (int k = 0; k < kBlockK / 16; ++k) {
        Mma::step(at.a + k * (kStepA >> 4), at.b + k * (kStepB >> 4), d, stage + block + k > 0);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();  // only this stage's wgmmas may still run: the previous stage is free
    if (kReleasesEarly ? held >= 0 : stage > 0) release(held);
    held = ring.index;
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int i = 0; i < Mma::kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
  release(held);
}

}  // namespace flux::gemm
