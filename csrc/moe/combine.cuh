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

// Eight columns of a token, from `column` on; none if there is no such token.
struct Vector {
  int64_t token = -1;
  int column = 0;
};

// Each vector is added up in the order of its token's choices. Loads of several of them are in flight together:
// one thread must not wait for memory each time.
template <class Element, int kVectors>
__device__ __forceinline__ void sum_choices(const Products& products, const Vector (&vectors)[kVectors],
                                            float (&sums)[kVectors][kVector]) {
  constexpr int kBatch = 4;  // choices at a time
#pragma unroll
  for (auto& sum : sums) {
#pragma unroll
    for (float& s : sum) s = 0;
  }
  for (int first = 0; first < products.top_k; first += kBatch) {
    uint4 values[kVectors][kBatch];
    float factors[kVectors][kBatch];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t choices = vectors[v].token * products.top_k;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool chosen = vectors[v].token >= 0 && first + i < products.top_k;
        const int position = chosen ? __ldg(products.positions + choices + first + i) : -1;
        values[v][i] = {0, 0, 0, 0};
        factors[v][i] = 0;
        if (position >= 0) {
          const char* row = products.rows + position * products.row_bytes;
          values[v][i] = *reinterpret_cast<const uint4*>(row + vectors[v].column * sizeof(Element));
          factors[v][i] = __ldg(products.weights + choices + first + i);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float terms[kVector];
        gemm::widen<Element>(values[v][i], terms);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[v][j] += factors[v][i] * terms[j];
      }
    }
  }
}

}  // namespace flux::moe
