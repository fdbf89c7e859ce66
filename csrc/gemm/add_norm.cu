#include <algorithm>

#include "gemm/add_norm.h"
#include "gemm/finish.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace flux::gemm {

constexpr int kThreads = 512;  // two vectors of 8192 columns each
constexpr int kCtasPerSm = 2;
constexpr int kMemory = 48 << 10;  // for a row and the norm's weight

// A CTA processes one row at a time.
template <class Element>
__global__ void __launch_bounds__(kThreads, kCtasPerSm) add_and_norm(const __grid_constant__ AddNorm args) {
  extern __shared__ uint4 row_memory[];
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int thread = threadIdx.x, row_vectors = args.columns / Exchange::kVector;
  const Finish finish = {.norm_weight = args.weight, .eps = args.eps, .out = args.out, .sum_out = args.total};
  const SpareMemory memory = {ptx::smem_addr(row_memory), kMemory};
  RowNorm<Element, kThreads> norm = {finish, row_vectors, thread, memory};
  norm.begin();
  for (int row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t first = static_cast<int64_t>(row) * row_vectors;
#pragma unroll 1
    for (int i = thread; i < row_vectors; i += kThreads) {
      float sum[Exchange::kVector];
      widen<Element>(static_cast<const uint4*>(args.total)[first + i], sum);
      add<Element>(static_cast<const uint4*>(args.residual)[first + i], sum);
      norm.take(row, i, round<Element>(sum));
    }
    norm.write(row);
  }
}

void add_norm(const AddNorm& args, runtime::DType dtype, cudaStream_t stream) {
  FLUX_CHECK(args.rows > 0 && args.columns > 0, args.rows, args.columns);
  FLUX_CHECK(args.columns % Exchange::kVector == 0, args.columns);
  prepare_add_norm();
  const int num_sms = runtime::num_sms();
  const auto kernel = runtime::is_bfloat16(dtype) ? add_and_norm<__nv_bfloat16> : add_and_norm<__half>;
  runtime::Launch(std::min(args.rows, kCtasPerSm * num_sms), kThreads, kMemory, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, args);
}

void prepare_add_norm() {
  static runtime::OncePerDevice once;
  once([] { runtime::load(add_and_norm<__nv_bfloat16>, add_and_norm<__half>); });
}

}  // namespace flux::gemm
