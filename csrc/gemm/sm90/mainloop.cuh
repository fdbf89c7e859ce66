// The loop over K of a math warpgroup: waits for stages, multiplies them with wgmma, and releases them to be loaded
// again. All GEMM kernels share it.
#pragma once

#include <type_traits>

#include "gemm/sm90/smem.cuh"
#include "gemm/sm90/wgmma.cuh"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

// wgmma descriptors of a k-block.
struct Operands {
  uint64_t a, b;
};

// How k-blocks are added: all in the tensor core's accumulators. A policy that promotes (scales.cuh) takes the product of
// each k-block from the accumulators instead, or of two, and has:
//
//   kTakesPairs                its tiles have stages enough to hold two while others are loaded
//   pairs                      the product of two k-blocks is promoted at once. Their scales are the same then
//   struct Row, Column         scales of x and of the weight that a thread needs for a k-block
//   read(stage, block) -> Row  from shared memory, when the stage has arrived; or where they are
//   kReadsLate                 add() still reads the stage
//   load(k_block) -> Column    while the k-block is multiplied
//   kColumnParts               parts of the columns that are multiplied and promoted one after the other
//   add(product, row, column, part)
struct NoPromotion {
  static constexpr bool kPromotes = false;
};

template <int kAccumulators>
FLUX_DEVICE void fence_operands(float (&d)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
}

// Multiplies all stages. Leaves their sum in `d`, or that of the last k-block if `promotion` takes each of them.
//
//   kStepA, kStepB           bytes from one wgmma step of K (32 bytes of a row) to the next
//   kBlocks                  k-blocks of a stage
//   kReleasesEarly           if the next stage has not arrived, the previous one is released before the wait
//   full(stage)              its barrier
//   operands(stage, block)
//   release(stage)           called by all threads once their wgmmas have read it
template <class Mma, int kStepA, int kStepB, int kBlocks = 1, bool kReleasesEarly = false, class Ring,
          class Full, class GetOperands, class Release, class Promotion = NoPromotion>
FLUX_DEVICE void multiply(Ring& ring, int num_stages, float (&d)[Mma::kAccumulators], const Full& full,
                          const GetOperands& operands, const Release& release, Promotion promotion = {}) {
  const auto step_through = [&](int index, int block, bool adds, int part_bytes = 0) {
    Operands at = operands(index, block);
    at.b += part_bytes >> 4;
#pragma unroll
    for (int k = 0; k < kBlockBytes / 32; ++k) {
      Mma::step(at.a + k * (kStepA >> 4), at.b + k * (kStepB >> 4), d, adds || k > 0);
    }
  };
  if constexpr (Promotion::kPromotes) {
    constexpr int kParts = Promotion::kColumnParts;
    constexpr int kPartBytes = 2 * Mma::kAccumulators * kBlockBytes;
    // Nothing is multiplied while a warpgroup promotes, but another one may be.
    const auto promote = [&](auto stages, int stage) {
      constexpr bool kPair = decltype(stages)::value == 2;
      const int first = ring.index;
      ptx::mbarrier_wait(full(first), ring.phase);
      if constexpr (kPair) ring.advance();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const typename Promotion::Row row = promotion.read(first, block);
        typename Promotion::Column column;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const bool ends = block == kBlocks - 1 && part == kParts - 1;
          cute::warpgroup_arrive();
          step_through(first, block, /*adds=*/false, part * kPartBytes);
          cute::warpgroup_commit_batch();
          if constexpr (kPair) {
            if (part == 0) {
              ptx::mbarrier_wait(full(ring.index), ring.phase);
              cute::warpgroup_arrive();  // else ptxas adds one, as there is a loop between
            }
            step_through(ring.index, block, /*adds=*/true, part * kPartBytes);
            cute::warpgroup_commit_batch();
          }
          if (part == 0) column = promotion.load(stage * kBlocks + block);
          if constexpr (kPair) {
            if (ends) {
              cute::warpgroup_wait<1>();
              __syncwarp();
              release(first);
            }
          }
          cute::warpgroup_wait<0>();
          fence_operands(d);
          if constexpr (Promotion::kReadsLate) promotion.add(d, row, column, part);
          if (ends) {
            __syncwarp();  // one lane releases the stage that all lanes have read scales from
            release(ring.index);
          }
          if constexpr (!Promotion::kReadsLate) promotion.add(d, row, column, part);
        }
      }
      ring.advance();
    };
    int singles = num_stages;
    if constexpr (Promotion::kTakesPairs) singles = promotion.pairs ? num_stages % 2 : num_stages;
#pragma unroll 1
    for (int stage = 0; stage < singles; ++stage) promote(std::integral_constant<int, 1>(), stage);
    if constexpr (Promotion::kTakesPairs) {
#pragma unroll 1
      for (int stage = singles; stage < num_stages; stage += 2) {
        promote(std::integral_constant<int, 2>(), stage);
      }
    }
  } else {
    // The stage whose wgmmas may still be running.
    int held = kReleasesEarly ? -1 : 0;
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
      for (int block = 0; block < kBlocks; ++block) step_through(ring.index, block, stage + block > 0);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // only this stage's wgmmas may still run: the previous stage is free
      if (kReleasesEarly ? held >= 0 : stage > 0) release(held);
      held = ring.index;
    }
    cute::warpgroup_wait<0>();
    fence_operands(d);
    release(held);
  }
}

// What wgmma multiplies if x is e4m3, or e5m2.
template <class E4M3, class E5M2>
struct Fp8Pairs {
  using OfE4M3 = E4M3;
  using OfE5M2 = E5M2;
};

// As `multiply`, for tiles with kN columns that promote. The type of x is no template parameter of kernels: a second
// mainloop is shorter than a second kernel. Without promotion, ptxas would serialise the wgmmas of both.
template <class Pairs, int kN, int kBlocks = 1, class Ring, class Full, class GetOperands, class Release,
          class Promotion>
FLUX_DEVICE void multiply_fp8(bool e5m2, Ring& ring, int num_stages, float (&d)[kN / 2], const Full& full,
                              const GetOperands& operands, const Release& release, Promotion promotion) {
  if (e5m2) {
    multiply<Wgmma<typename Pairs::OfE5M2, kN, Major::K, Major::K>, 32, 32, kBlocks>(
        ring, num_stages, d, full, operands, release, promotion);
  } else {
    multiply<Wgmma<typename Pairs::OfE4M3, kN, Major::K, Major::K>, 32, 32, kBlocks>(
        ring, num_stages, d, full, operands, release, promotion);
  }
}

}  // namespace flux::gemm
