// Sums a matrix that every rank has: AllReduce, and what follows the GEMM where GEMM+AllReduce takes two
// launches.
#pragma once

#include <algorithm>

#include "gemm/finish.cuh"
#include "gemm_ar/gemm_ar.h"
#include "runtime/check.h"

namespace flux::gemm_ar {

constexpr int kSumThreads = 224;
constexpr int kSumCtaThreads = kSumThreads + 32;  // and a warp that closes the call

struct SumParams {
  gemm::ExchangeParams exchange;
  const void* x;
};

template <class Element>
__global__ void __launch_bounds__(kSumCtaThreads, 2)
    sum_over_ranks(const __grid_constant__ SumParams params) {
  constexpr int kVector = runtime::Exchange::kVector;
  const gemm::ExchangeParams& p = params.exchange;
  const sync::Call call = sync::begin_call(p.symm);
  __syncthreads();  // all threads know the call
  if (threadIdx.x >= kSumThreads) {
    if (threadIdx.x == kSumThreads) sync::end_call(p.symm, call.epoch);
    return;
  }
  const int row_vectors = p.exchange.n / kVector;
  const int first = blockIdx.x * kSumThreads + threadIdx.x, step = gridDim.x * kSumThreads;
  for (int i = first; i < p.exchange.m * row_vectors; i += step) {
    uint4 v = *gemm::vector_at(params.x, static_cast<int64_t>(i) * kVector);
    // A user's NaN may look like a vector that has not arrived; there are others.
    for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w}) {
      if (*word == runtime::kAbsent) *word = 0x7FFF7FFF;
    }
    exchange::contribute(p.symm, p.exchange, call, i / row_vectors, i % row_vectors * kVector, v);
  }
  gemm::finish<Element, kSumThreads>(p, call, threadIdx.x);
}

inline void launch_sum(const SumParams& params, runtime::DType dtype, int num_sms, cudaStream_t stream) {
  const auto kernel =
      dtype == runtime::DType::kBFloat16 ? sum_over_ranks<__nv_bfloat16> : sum_over_ranks<__half>;
  const int64_t vectors = static_cast<int64_t>(params.exchange.exchange.m) * params.exchange.exchange.n / 8;
  const int wanted = static_cast<int>((vectors + kSumThreads - 1) / kSumThreads);
  kernel<<<std::min(num_sms, wanted), kSumCtaThreads, 0, stream>>>(params);
  FLUX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flux::gemm_ar
