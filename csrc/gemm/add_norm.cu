
#include "gemm/finish.cuh"
#include "operators.h"

namespace flux::gemm {

constexpr int kThreads = 512;
constexpr int kAhead = 2;  // vectors that a thread loads at once: those of 8192 columns
constexpr int kCtasPerSm = 2;
constexpr int kMemory = 48 << 10;  // for a row and the norm's weight

// A CTA processes one row at a time. It asks for the next vectors before it reduces and writes a row: while no loads are in
// flight, memory is idle. With 8192 columns each SM then has up to 64 KB in flight.
template <class Element>
__global__ void __launch_bounds__(kThreads, kCtasPerSm) add_and_norm(const __grid_constant__ AddNorm args) {
  extern __shared__ uint4 row_memory[];
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int thread = threadIdx.x, row_vectors = args.columns / Exchange::kVector;
  const Finish finish = {.norm_weight = args.weight, .eps = args.eps, .out = args.out, .sum_out = args.total};
  const SpareMemory memory = {ptx::smem_addr(row_memory), kMemory};
  RowNorm<Element, kThreads> norm = {finish, row_vectors, thread, memory};
  int row = blockIdx.x, first = 0;
  uint4 total[kAhead], residual[kAhead];
  const auto for_each = [&](auto use) {
#pragma unroll
    for (int b = 0; b < kAhead; ++b) {
      const int i = first + b * kThreads + thread;
      if (row < args.rows && i < row_vectors) use(b, i);
    }
  };
  const auto load = [&](int b, int i) {
    const int64_t at = static_cast<int64_t>(row) * row_vectors + i;
    total[b] = static_cast<const uint4*>(args.total)[at];
    residual[b] = static_cast<const uint4*>(args.residual)[at];
  };
  const auto take = [&](int b, int i) {
    float sum[Exchange::kVector];
    widen<Element>(total[b], sum);
    add<Element>(residual[b], sum);
    norm.take(row, i, round<Element>(sum));
  };
  for_each(load);
  norm.begin();
  while (row < args.rows) {
    for_each(take);
    const int taken = row;
    first += kAhead * kThreads;
    const bool whole = first >= row_vectors;
    if (whole) {
      first = 0;
      row += gridDim.x;
    }
    for_each(load);
    if (whole) norm.write(taken);
  }
}

static runtime::Kernels kernels([] { runtime::load(add_and_norm<__nv_bfloat16>, add_and_norm<__half>); });

void add_norm(const AddNorm& args, runtime::DType dtype, cudaStream_t stream) {
  FLUX_CHECK(args.rows > 0 && args.columns > 0, args.rows, args.columns);
  FLUX_CHECK(args.columns % Exchange::kVector == 0, args.columns);
  kernels.load();
  const int num_sms = runtime::num_sms();
  const auto kernel = runtime::is_bfloat16(dtype) ? add_and_norm<__nv_bfloat16> : add_and_norm<__half>;
  runtime::Launch(std::min(args.rows, kCtasPerSm * num_sms), kThreads, kMemory, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, args);
}

}  // namespace flux::gemm
