// The weighted sum over a token's experts, as a kernel of its own that reads the products once. Layer 1 uses it if its
// GEMM and its communication run separately.
#include <algorithm>

#include "moe/moe.h"
#include "moe/products.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace flux::moe {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 8;
constexpr int kChoices = 4;  // choices whose loads a thread has in flight at the same time

template <class Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Products products, int64_t tokens, int columns, uint4* out) {
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int column = threadIdx.x * kVector; column < columns; column += kThreads * kVector) {
      float sum[kVector] = {};
#pragma unroll 1
      for (int first = 0; first < products.top_k; first += kChoices) {
        uint4 values[kChoices];
        float weights[kChoices];
#pragma unroll
        for (int i = 0; i < kChoices; ++i) {
          const int64_t choice = token * products.top_k + first + i;
          const int position = first + i < products.top_k ? __ldg(products.positions + choice) : -1;
          values[i] = {0, 0, 0, 0};
          weights[i] = 0;
          if (position < 0) continue;
          weights[i] = __ldg(products.weights + choice);
          const char* const row = products.rows + position * products.row_bytes;
          values[i] = *reinterpret_cast<const uint4*>(row + column * sizeof(Element));
        }
#pragma unroll
        for (int i = 0; i < kChoices; ++i) add_choice<Element>(values[i], weights[i], sum);
      }
      out[(token * columns + column) / kVector] = gemm::round<Element>(sum);
    }
  }
}

runtime::Kernels kernels([] { runtime::load(combine_kernel<__nv_bfloat16>, combine_kernel<__half>); });

}  // namespace

void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream) {
  FLUX_CHECK(products.columns % kVector == 0 && products.row_stride % kVector == 0, products.columns,
             products.row_stride);
  if (tokens == 0 || products.columns == 0) return;
  const Products params = {.rows = static_cast<const char*>(products.data),
                           .row_bytes = products.row_stride * gemm::kResultBytes,
                           .positions = positions,
                           .weights = weights,
                           .top_k = top_k};
  const auto kernel = runtime::is_bfloat16(dtype) ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  const int ctas = static_cast<int>(std::min<int64_t>(tokens, kCtasPerSm * runtime::num_sms()));
  runtime::Launch(ctas, kThreads, 0, stream)
      .run(kernel, params, tokens, static_cast<int>(products.columns), static_cast<uint4*>(out));
}

}  // namespace flux::moe
