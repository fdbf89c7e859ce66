// The loop over K of tiles whose rows of x are in registers (docs/design/fp8.md#rows-in-registers).
#pragma once

#include "gemm/mainloop.cuh"

namespace flux::gemm {

// As `multiply`, with the rows of x of a k-block in registers: shared memory is read once for them, and not once for each
// part of the columns. Of two parts that have registers for their products, one is promoted while the other is multiplied.
//
//   load_rows(stage, x)      this thread's words of all steps
//   weight(stage)            wgmma descriptor
template <class Mma, int kHeld, class Ring, class Full, class LoadRows, class Weight, class Release,
          class Promotion>
FLUX_DEVICE void multiply_held(Ring& ring, int num_stages, float (&d)[kHeld][Mma::kAccumulators],
                               const Full& full, const LoadRows& load_rows, const Weight& weight,
                               const Release& release, Promotion promotion) {
  constexpr int kParts = Promotion::kColumnParts, kSteps = kBlockBytes / 32;
  constexpr int kPartBytes = 2 * Mma::kAccumulators * kBlockBytes;
  static_assert(kParts % kHeld == 0 && kHeld <= 2);
  typename Promotion::Row row = {0.0f, 0.0f};
  typename Promotion::Column column = {0.0f, 0.0f};
  // What is promoted during the first part: nothing.
#pragma unroll
  for (int i = 0; i < Mma::kAccumulators; ++i) d[kHeld - 1][i] = 0.0f;
  ptx::mbarrier_wait(full(ring.index), ring.phase);
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage) {
    uint32_t x[kSteps][kHeldWords];
    load_rows(ring.index, x);
    const uint64_t b = weight(ring.index);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      constexpr int kOther = kHeld - 1;
      float (&other)[Mma::kAccumulators] = d[(part + kOther) % kHeld];
      cute::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Mma::step(x[k], b + ((part * kPartBytes + k * 32) >> 4), d[part % kHeld], k > 0);
      }
      cute::warpgroup_commit_batch();
      // ptxas would not leave the last part of the previous k-block behind the wgmmas, but for the branches of `read`.
      const typename Promotion::Row of_row = row;
      const typename Promotion::Column of_column = column;
      if (part == 0) {
        row = promotion.read(ring.index, 0);
        column = promotion.load(stage);
      }
      if constexpr (kHeld == 2) {
        if (part > 0) cute::warpgroup_wait<1>();
        fence_operands(other);
        promotion.add(other, of_row, of_column, (part + kParts - 1) % kParts);
      }
      const int held = ring.index;
      if (part == kParts - 1) {
        // The next stage is waited for while the last part is multiplied.
        ring.advance();
        if (stage + 1 < num_stages) ptx::mbarrier_wait(full(ring.index), ring.phase);
      }
      if (kHeld == 1 || part == kParts - 1) {
        cute::warpgroup_wait<0>();
        fence_operands(d[kOther]);
      }
      if (part == kParts - 1) {
        __syncwarp();  // one lane releases the stage that all lanes have read
        release(held);
      }
      if constexpr (kHeld == 1) promotion.add(d[0], row, column, part);
    }
  }
  if constexpr (kHeld == 2) promotion.add(d[1], row, column, kParts - 1);
}

// As `multiply_fp8`.
template <int kN, int kHeld, class Ring, class Full, class LoadRows, class Weight, class Release,
          class Promotion>
FLUX_DEVICE void multiply_held_fp8(bool e5m2, Ring& ring, int num_stages, float (&d)[kHeld][kN / 2],
                                   const Full& full, const LoadRows& load_rows, const Weight& weight,
                                   const Release& release, Promotion promotion) {
  if (e5m2) {
    multiply_held<HeldWgmma<E5M2xE4M3, kN>>(ring, num_stages, d, full, load_rows, weight, release, promotion);
  } else {
    multiply_held<HeldWgmma<E4M3xE4M3, kN>>(ring, num_stages, d, full, load_rows, weight, release, promotion);
  }
}

}  // namespace flux::gemm
