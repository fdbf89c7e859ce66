// Conversions to fp8, as cvt.rn.satfinite does them.
#include <cmath>

#include "machine.h"

namespace sim {
namespace {

uint32_t to_fp8(float value, bool e5m2) {
  if (std::isnan(value)) return 0x7F;
  const int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const uint32_t sign = std::signbit(value) ? 0x80 : 0, largest = e5m2 ? 0x7B : 0x7E;
  const float size = std::fabs(value);
  if (size >= (e5m2 ? 57344.0f : 448.0f)) return sign | largest;
  const int exponent = size > 0.0f ? std::max(std::ilogb(size), 1 - bias) : 1 - bias;
  // Exact but for nearbyint, which rounds to even. A carry goes into the exponent.
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));
  return sign | ((static_cast<uint32_t>(exponent + bias - 1) << mantissa_bits) + steps);
}

}  // namespace

uint32_t to_fp8(float a, float b, float c, float d, bool e5m2) {
  return to_fp8(a, e5m2) | to_fp8(b, e5m2) << 8 | to_fp8(c, e5m2) << 16 | to_fp8(d, e5m2) << 24;
}

}  // namespace sim
