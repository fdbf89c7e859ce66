// Scales and roundings of fp8 values: the definition of flux.quantize (python/flux/ops/quantize.py), bit by bit.
#pragma once

#include "gemm/elements.cuh"
#include "gemm/plan.h"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

constexpr int kGroupVectors = 128 / kVector;  // of a group of elements with one scale

// The larger of two values that are not negative. NaN is larger than everything.
FLUX_DEVICE float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

// The largest absolute value of a vector.
template <class Element>
FLUX_DEVICE float largest_of(const uint4& v) {
  uint32_t most = 0;
  for (const uint32_t word : {v.x, v.y, v.z, v.w}) most = max(most, max(word & 0x7FFF, word >> 16 & 0x7FFF));
  return Pair<Element>::widen(most).x;
}

// Of the kLanes lanes around this one.
template <int kLanes>
FLUX_DEVICE float largest_over_lanes(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    value = larger(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  return value;
}

// The scale of a group whose largest absolute value is `largest`, for a type whose largest number is `most`.
FLUX_DEVICE float scale_to(float most, float largest) {
  constexpr float kLeast = 1e-10f;  // no scale is zero or denormal
  return (largest < kLeast ? kLeast : largest) / most;
}
FLUX_DEVICE float scale_of(float largest, bool e5m2, bool ue8m0) {
  constexpr uint32_t kMantissa = 0x7FFFFF, kInfinity = 0x7F800000;
  const float scale = scale_to(e5m2 ? 57344.0f : 448.0f, largest);
  const uint32_t bits = __float_as_uint(scale);
  return ue8m0 && bits < kInfinity ? __uint_as_float((bits + kMantissa) & ~kMantissa) : scale;
}

// Called by one thread of each CTA of a launch that finds the scale of a whole tensor (kMaxParts).
FLUX_DEVICE void leave_part(const Quantized& to, int cta, float largest) {
  if (cta == 0) to.parts[0] = __int_as_float(gridDim.x);
  to.parts[1 + cta] = largest;
}

template <class Element>
FLUX_DEVICE uint2 quantized(const uint4& v, float inverse_scale, bool e5m2) {
  float f[kVector];
  widen<Element>(v, f);
#pragma unroll
  for (int i = 0; i < kVector; ++i) f[i] *= inverse_scale;
  if (e5m2) return {ptx::to_e5m2(f[0], f[1], f[2], f[3]), ptx::to_e5m2(f[4], f[5], f[6], f[7])};
  return {ptx::to_e4m3(f[0], f[1], f[2], f[3]), ptx::to_e4m3(f[4], f[5], f[6], f[7])};
}

}  // namespace flux::gemm
