// The weighted sum of a token's rows, eight columns at a time: what communication CTAs do, and by itself
// combine.cu.
#pragma once

#include "gemm/epilogue.cuh"

namespace flux::moe {

using gemm::kVector;

// Products of one rank's experts, and where those of a token are.
struct Products {
  const char* rows;
  int64_t row_bytes;
  const int32_t* positions;  // [token][top_k]: row of each choice, -1 if its expert is elsewhere
  const float* weights;      // [token][top_k]
  int top_k;
};

// Columns `column` to `column + 7` of a token, added up in the order of its choices.
template <class Element>
__device__ __forceinline__ void sum_choices(const Products& products, int64_t token, int column,
                                            float (&sum)[kVector]) {
  constexpr int kBatch = 4;  // loads in flight
  const int32_t* positions = products.positions + token * products.top_k;
  const float* weights = products.weights + token * products.top_k;
#pragma unroll
  for (float& s : sum) s = 0;
  for (int first = 0; first < products.top_k; first += kBatch) {
    uint4 values[kBatch];
    float factors[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first + i < products.top_k ? __ldg(positions + first + i) : -1;
      values[i] = {0, 0, 0, 0};
      factors[i] = 0;
      if (position >= 0) {
        const char* row = products.rows + position * products.row_bytes;
        values[i] = *reinterpret_cast<const uint4*>(row + column * sizeof(Element));
        factors[i] = __ldg(weights + first + i);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float terms[kVector];
      gemm::widen<Element>(values[i], terms);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += factors[i] * terms[j];
    }
  }
}

}  // namespace flux::moe
