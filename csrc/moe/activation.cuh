// What experts' rows go through beside GEMMs: activations, their derivatives, and the weighted sum of a token's rows.
#pragma once

#include "gemm/elements.cuh"

namespace flux::moe {

using gemm::kVector;

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

// The products of a rank's experts.
struct Products {
  const char* rows;
  int64_t row_bytes;
  const int32_t* positions;  // [token][top_k]: row of each choice, -1 if its expert is elsewhere
  const float* weights;      // [token][top_k]
  int top_k;
};

// Adds eight columns of one choice's row, times its weight.
template <class Element>
FLUX_DEVICE void add_choice(const uint4& values, float weight, float (&sum)[kVector]) {
  float terms[kVector];
  gemm::widen<Element>(values, terms);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum[j] += weight * terms[j];
}

}  // namespace flux::moe
