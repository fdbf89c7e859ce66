// Stands in for csrc/gemm/sm90/epilogue.cuh: what is rounded, with bfloat16 as the upper half of a float.
#pragma once

#include <bit>
#include <cstdint>

#include "gemm/tile_config.h"

namespace flux::gemm {

constexpr int kVector = 8;

inline float from_bits(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
// Of numbers that need no rounding.
inline uint16_t to_bits(float number) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16); }

template <class Element>
struct Pair {
  static float2 widen(uint32_t bits) { return {from_bits(bits & 0xFFFF), from_bits(bits >> 16)}; }
};

template <class Element>
void widen(const uint4& v, float (&f)[kVector]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = from_bits(words[i] & 0xFFFF);
    f[2 * i + 1] = from_bits(words[i] >> 16);
  }
}

template <class Element>
uint4 round(const float (&f)[kVector]) {
  const auto pair = [&](int i) { return to_bits(f[i]) | static_cast<uint32_t>(to_bits(f[i + 1])) << 16; };
  return {pair(0), pair(2), pair(4), pair(6)};
}

}  // namespace flux::gemm
