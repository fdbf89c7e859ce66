// Elements of 16 bits, rounded from fp32 and widened to it, one by one or as the vectors and fragments that threads hold.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "runtime/macros.h"

namespace flux::gemm {

template <class Element>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  FLUX_DEVICE static uint32_t round(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  FLUX_DEVICE static float2 widen(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  }
};
template <>
struct Pair<__half> {
  FLUX_DEVICE static uint32_t round(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  FLUX_DEVICE static float2 widen(uint32_t bits) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  }
};

// 16 bytes of a row.
constexpr int kVector = 8;

template <class Element>
FLUX_DEVICE void widen(const uint4& v, float (&f)[kVector]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Pair<Element>::widen(words[i]);
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}

FLUX_DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

template <class Element>
FLUX_DEVICE uint4 round(const float* f) {
  return {Pair<Element>::round(f[0], f[1]), Pair<Element>::round(f[2], f[3]),
          Pair<Element>::round(f[4], f[5]), Pair<Element>::round(f[6], f[7])};
}

// Two adjacent elements of a row that nothing writes during the launch; the first has an even index.
template <class Element>
FLUX_DEVICE float2 load_pair(const void* row, int first) {
  return Pair<Element>::widen(__ldg(static_cast<const uint32_t*>(row) + first / 2));
}
template <>
FLUX_DEVICE float2 load_pair<float>(const void* row, int first) {
  return __ldg(static_cast<const float2*>(row) + first / 2);
}

template <class Element, int kAccumulators>
FLUX_DEVICE void add_bias(const void* bias, int first_column, int n, float (&d)[kAccumulators]) {
#pragma unroll
  for (int block = 0; block < kAccumulators / 4; ++block) {
    const int column = first_column + block * 8 + threadIdx.x % 4 * 2;
    if (column < n) {
      const float2 b = load_pair<Element>(bias, column);
      d[block * 4 + 0] += b.x;
      d[block * 4 + 1] += b.y;
      d[block * 4 + 2] += b.x;
      d[block * 4 + 3] += b.y;
    }
  }
}

}  // namespace flux::gemm
