// wgmma of 64 x kN over 32 bytes of K, with fp32 accumulators and both operands in shared memory. Wraps CUTLASS's MMA
// atoms: adds the shared-memory descriptors, and the call on an array of accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"
#include "runtime/macros.h"

namespace flux::gemm {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// Pairs of fp8 operands: A and B. Both lie along K.
struct E4M3xE4M3 {};
struct E5M2xE4M3 {};
struct E4M3xE5M2 {};

template <class Operands, int kN, Major kMajorA, Major kMajorB>
struct WgmmaAtom;

#define FLUX_WGMMA_ATOM(n)                                                           \
  template <Major kMajorA, Major kMajorB>                                            \
  struct WgmmaAtom<__nv_bfloat16, n, kMajorA, kMajorB> {                             \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<kMajorA, kMajorB>; \
  };                                                                                 \
  template <Major kMajorA, Major kMajorB>                                            \
  struct WgmmaAtom<__half, n, kMajorA, kMajorB> {                                    \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<kMajorA, kMajorB>;   \
  };                                                                                 \
  template <>                                                                        \
  struct WgmmaAtom<E4M3xE4M3, n, Major::K, Major::K> {                               \
    using Type = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<>;              \
  };                                                                                 \
  template <>                                                                        \
  struct WgmmaAtom<E5M2xE4M3, n, Major::K, Major::K> {                               \
    using Type = cute::SM90::GMMA::MMA_64x##n##x32_F32E5M2E4M3_SS_TN<>;              \
  };                                                                                 \
  template <>                                                                        \
  struct WgmmaAtom<E4M3xE5M2, n, Major::K, Major::K> {                               \
    using Type = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E5M2_SS_TN<>;              \
  };
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
    WgmmaAtom<Operands, kN, kMajorA, kMajorB>::Type::fma(a, b, d[kI]..., scale);
  }
};

// wgmma descriptor of a shared-memory operand with the 128-byte swizzle. Offsets are in bytes; wgmma reads
// `leading` only for MN-major operands.
FLUX_DEVICE uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (kSwizzle128 << 62);
}

}  // namespace flux::gemm
