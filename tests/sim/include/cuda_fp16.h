// fp16 as kernels use it: conversions only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                 : std::ldexp(static_cast<float>(mantissa | 1024), exponent - 25));
  }
};
struct __half2 {
  __half x, y;
};

inline __half __float2half_rn(float value) {
  const uint16_t sign = std::bit_cast<uint32_t>(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (value != value) return {0x7FFF};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7C00)};
  int exponent = size == 0.0f ? -14 : std::ilogb(size);
  if (exponent < -14) exponent = -14;
  // nearbyint rounds to even; a carry into the exponent is what it should be.
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  const int biased = mantissa >= 1024 ? (exponent + 15) * 1024 + mantissa - 1024 : mantissa;
  return {static_cast<uint16_t>(sign | biased)};
}
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(const __half2& v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
