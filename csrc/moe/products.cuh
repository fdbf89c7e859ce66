// The products of a rank's experts, and the weighted sum of a token's rows of them. Used by layer 1 and by expert_rows.cu.
#pragma once

#include "gemm/elements.cuh"

namespace flux::moe {

using gemm::kVector;

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
