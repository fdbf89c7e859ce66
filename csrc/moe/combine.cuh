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

// Some choices of a token: rows of the products, -1 for none, and their weights.
constexpr int kChoices = 4;
struct Choices {
  int positions[kChoices];
  float weights[kChoices];
};

// kVectors times eight columns, from columns[v] on: the weighted sum of up to `count` choices, of which choose(v, first)
// tells those from number `first` on. Each vector is added up in the order of its choices. Loads of all of them are in
// flight together: one thread must not wait for memory each time.
template <class Element, int kVectors, class Choose>
__device__ __forceinline__ void sum_choices(const Products& products, const int (&columns)[kVectors],
                                            int count, const Choose& choose,
                                            float (&sums)[kVectors][kVector]) {
#pragma unroll
  for (auto& sum : sums) {
#pragma unroll
    for (float& s : sum) s = 0;
  }
#pragma unroll 1
  for (int first = 0; first < count; first += kChoices) {
    uint4 values[kVectors][kChoices];
    float factors[kVectors][kChoices];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Choices choices = choose(v, first);
#pragma unroll
      for (int i = 0; i < kChoices; ++i) {
        values[v][i] = {0, 0, 0, 0};
        factors[v][i] = choices.weights[i];
        if (choices.positions[i] >= 0) {
          const char* row = products.rows + choices.positions[i] * products.row_bytes;
          values[v][i] = *reinterpret_cast<const uint4*>(row + columns[v] * sizeof(Element));
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kChoices; ++i) {
        float terms[kVector];
        gemm::widen<Element>(values[v][i], terms);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[v][j] += factors[v][i] * terms[j];
      }
    }
  }
}

}  // namespace flux::moe
