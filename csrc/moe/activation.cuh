// Activations of experts, and their derivatives.
#pragma once

#include "gemm/elements.cuh"

namespace flux::moe {

enum class Activation { kNone, kSilu, kGelu, kSwiglu };

constexpr float kSqrtHalf = 0.70710678f;

FLUX_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); }

FLUX_DEVICE float gelu_slope(float x) {
  constexpr float kDensity = 0.39894228f;  // of the normal distribution, at 0
  return 0.5f * (1.0f + erff(x * kSqrtHalf)) + x * kDensity * __expf(-0.5f * x * x);
}

FLUX_DEVICE float silu_slope(float x) {
  const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-x));
  return sigmoid * (1.0f + x * (1.0f - sigmoid));
}

// Of swiglu: of its gate.
template <Activation kActivation>
FLUX_DEVICE float activated(float x) {
  return kActivation == Activation::kGelu ? gelu(x) : gemm::silu(x);
}
template <Activation kActivation>
FLUX_DEVICE float slope(float x) {
  return kActivation == Activation::kGelu ? gelu_slope(x) : silu_slope(x);
}

}  // namespace flux::moe
