// The operands of GEMM kernels, and the loop over K of a math warpgroup: it waits for stages, multiplies them with wgmma,
// and releases them to be loaded again. All GEMM kernels share it.
#pragma once

#include <type_traits>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"
#include "gemm/sm90/smem.cuh"

namespace flux::gemm {

// --- wgmma of 64 x kN over 32 bytes of K: CUTLASS's atoms, with both operands in shared memory ---

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// Pairs of fp8 operands: A and B. Both lie along K.
struct E4M3xE4M3 {};
struct E5M2xE4M3 {};
struct E4M3xE5M2 {};

// The instruction for a shape is the type that atom_of returns.
template <class Operands, int kN, Major kMajorA, Major kMajorB>
struct Shape {};

#define FLUX_WGMMA_ATOM(n)                                                                                \
  template <Major A, Major B>                                                                             \
  cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<A, B> atom_of(Shape<__nv_bfloat16, n, A, B>);          \
  template <Major A, Major B>                                                                             \
  cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<A, B> atom_of(Shape<__half, n, A, B>);                   \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<> atom_of(Shape<E4M3xE4M3, n, Major::K, Major::K>); \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E5M2E4M3_SS_TN<> atom_of(Shape<E5M2xE4M3, n, Major::K, Major::K>); \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E5M2_SS_TN<> atom_of(Shape<E4M3xE5M2, n, Major::K, Major::K>);
FLUX_WGMMA_ATOM(8)
FLUX_WGMMA_ATOM(16)
FLUX_WGMMA_ATOM(32)
FLUX_WGMMA_ATOM(64)
FLUX_WGMMA_ATOM(80)
FLUX_WGMMA_ATOM(96)
FLUX_WGMMA_ATOM(112)
FLUX_WGMMA_ATOM(128)
FLUX_WGMMA_ATOM(160)
FLUX_WGMMA_ATOM(192)
FLUX_WGMMA_ATOM(224)
FLUX_WGMMA_ATOM(256)
#undef FLUX_WGMMA_ATOM

// Operands: the type of both, or a pair of fp8 types.
template <class Operands, int kN, Major kMajorA, Major kMajorB>
struct Wgmma {
  static constexpr int kAccumulators = kN / 2;  // fp32 registers of each of the 128 threads

  FLUX_DEVICE static void step(uint64_t a, uint64_t b, float (&d)[kAccumulators], bool accumulate) {
    call(a, b, d, accumulate ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<kAccumulators>());
  }

 private:
  template <size_t... kI>
  FLUX_DEVICE static void call(uint64_t a, uint64_t b, float (&d)[kAccumulators], ScaleOut scale,
                               std::index_sequence<kI...>) {
    decltype(atom_of(Shape<Operands, kN, kMajorA, kMajorB>()))::fma(a, b, d[kI]..., scale);
  }
};

// wgmma descriptor of an operand with the 128-byte swizzle. Offsets in bytes; `leading`: of MN-major operands only.
FLUX_DEVICE uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (kSwizzle128 << 62);
}

// --- operands: x, and the weight as [N, K] (K-major) or [K, N] (MN-major) ---

constexpr int kPanelK = kBlockBytes / 2;    // elements of a k-block; those of MN-major operands have 16 bits
constexpr int kPanelBytes = kPanelK * 128;  // MN-major: 64 columns (128 bytes) of all its rows

// Bytes in a stage from one wgmma step of K (32 bytes of a row) to the next.
template <Major kMajorB>
constexpr int kBStepBytes = kMajorB == Major::K ? 32 : 16 * 128;

template <Major kMajorB>
FLUX_DEVICE uint64_t make_b_descriptor(uint32_t address) {
  return make_descriptor(address, kMajorB == Major::K ? 0 : kPanelBytes, 1024);
}

// Of an operand of one tile. At the edge boxes are smaller, because TMA is slower on rows beyond the edge; the rest of
// the stage keeps stale data, which affects only results beyond the edge.
struct Boxes {
  const CUtensorMap* map;
  int rows;  // rows of a box (x, K-major weight), or columns of all boxes together (MN-major weight)
};

// A pair of CTAs whose tiles have the same columns shares B: each fetches half and multicasts it to both.
template <Major kMajorB, int kBlockN>
FLUX_DEVICE void load_b(const Boxes& b, uint32_t dst, uint32_t full, int k, int column, int cta,
                        bool shared) {
  if constexpr (kMajorB == Major::K) {
    if (!shared) {
      ptx::tma_load_2d(b.map, dst, full, k, column);
    } else {
      ptx::tma_load_2d_multicast(b.map, dst + cta * b.rows * 128, full, k, column + cta * b.rows, 0b11);
    }
  } else {
#pragma unroll
    for (int panel = 0; panel < kBlockN / 64; ++panel) {
      if (panel * 64 >= b.rows) break;
      if (!shared) {
        ptx::tma_load_2d(b.map, dst + panel * kPanelBytes, full, column + panel * 64, k);
      } else {
        constexpr int kHalf = kPanelK / 2;
        ptx::tma_load_2d_multicast(b.map, dst + panel * kPanelBytes + cta * kHalf * 128, full,
                                   column + panel * 64, k + cta * kHalf, 0b11);
      }
    }
  }
}

FLUX_DEVICE void load_a(const Boxes& a, uint32_t dst, uint32_t full, int k, int row, int cta, bool shared) {
  if (!shared) {
    ptx::tma_load_2d(a.map, dst, full, k, row);
  } else {
    ptx::tma_load_2d_multicast(a.map, dst + cta * a.rows * 128, full, k, row + cta * a.rows, 0b11);
  }
}

// --- the loop ---

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
    for (int k = 0; k < kBlockBytes / 32; ++k)
      Mma::step(at.a + k * (kStepA >> 4), at.b + k * (kStepB >> 4), d, adds || k > 0);
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
      for (int stage = singles; stage < num_stages; stage += 2)
        promote(std::integral_constant<int, 2>(), stage);
    }
  } else {
    // The stage whose wgmmas may still be running.
    int held = kReleasesEarly ? -1 : 0;
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

// As `multiply`, for tiles with kN columns that promote: of OfE4M3 or OfE5M2, as the type of x is. A second mainloop is
// shorter than a second kernel. Without promotion, ptxas would serialise the wgmmas of both.
template <class OfE4M3, class OfE5M2, int kN, int kBlocks = 1, class Ring, class Full, class GetOperands,
          class Release, class Promotion>
FLUX_DEVICE void multiply_fp8(bool e5m2, Ring& ring, int num_stages, float (&d)[kN / 2], const Full& full,
                              const GetOperands& operands, const Release& release, Promotion promotion) {
  if (e5m2) {
    multiply<Wgmma<OfE5M2, kN, Major::K, Major::K>, 32, 32, kBlocks>(ring, num_stages, d, full, operands,
                                                                     release, promotion);
  } else {
    multiply<Wgmma<OfE4M3, kN, Major::K, Major::K>, 32, 32, kBlocks>(ring, num_stages, d, full, operands,
                                                                     release, promotion);
  }
}

}  // namespace flux::gemm
