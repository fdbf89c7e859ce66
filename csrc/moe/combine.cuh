// The weighted sum of a token's rows, eight columns at a time: what communication CTAs do, and by itself
// combine.cu.
#pragma once

#include "gemm/epilogue.cuh"

namespace flux::moe {

constexpr int kVector = 8;  // columns of 16 bytes

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
      const uint32_t words[] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int w = 0; w < kVector / 2; ++w) {
        const float2 pair = gemm::Pair<Element>::widen(words[w]);
        sum[2 * w] += factors[i] * pair.x;
        sum[2 * w + 1] += factors[i] * pair.y;
      }
    }
  }
}

template <class Element>
__device__ __forceinline__ uint4 rounded(const float (&sum)[kVector]) {
  const gemm::Fragment f = gemm::pack<Element>(sum);
  return {f.pair[0], f.pair[1], f.pair[2], f.pair[3]};
}

}  // namespace flux::moe
