#include <algorithm>

#include "gemm_ar/gemm_ar.h"
#include "gemm_ar/int8_sum.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace flux::gemm_ar {

static runtime::Kernels kernels([] {
  runtime::load(sum_int8_over_ranks<__nv_bfloat16>, sum_int8_over_ranks<__half>, sum_int8_over_ranks<float>);
});

void reduce_scatter_int8(const void* x, int64_t owner_stride, const runtime::Matrix& out,
                         runtime::DType dtype, const runtime::SymmBuffer& symm, int num_sms, bool rounds_own,
                         cudaStream_t stream) {
  const bool is_float = dtype == runtime::DType::kFloat32;
  const auto kernel = is_float                      ? sum_int8_over_ranks<float>
                      : runtime::is_bfloat16(dtype) ? sum_int8_over_ranks<__nv_bfloat16>
                                                    : sum_int8_over_ranks<__half>;
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  FLUX_CHECK(out.columns % runtime::Exchange::kVector == 0 && out.row_stride == out.columns, out.columns,
             out.row_stride);
  FLUX_CHECK(owner_stride % runtime::Exchange::kVector == 0, owner_stride);
  FLUX_CHECK(out.rows > 0 && out.rows * (out.columns / runtime::Int8Scatter::kGroup + 1) <= INT32_MAX / 8,
             out.rows, out.columns);
  const runtime::Int8Scatter scatter = {static_cast<int>(out.rows), static_cast<int>(out.columns),
                                        symm.world_size};
  FLUX_CHECK(scatter.bytes() <= symm.exchange_bytes, scatter.bytes(), symm.exchange_bytes);
  kernels.load();
  const Int8SumParams params = {.symm = symm,
                                .scatter = scatter,
                                .x = static_cast<const char*>(x),
                                .owner_bytes = owner_stride * runtime::element_bytes(dtype),
                                .out = static_cast<char*>(const_cast<void*>(out.data)),
                                .rounds_own = rounds_own};
  constexpr int kWarps = kInt8Threads / 32;
  num_sms = runtime::usable_sms(num_sms);
  runtime::Launch(std::min(num_sms, (scatter.units() + kWarps - 1) / kWarps), kInt8Threads + kClosingThreads,
                  0, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, params);
}

}  // namespace flux::gemm_ar
