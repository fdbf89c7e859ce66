// Sums a matrix that every rank has: AllReduce, and what follows the GEMM where GEMM+AllReduce takes two
// launches.
#pragma once

#include <algorithm>

#include "gemm/finish.cuh"
#include "gemm_ar/gemm_ar.h"
#include "runtime/check.h"

namespace flux::gemm_ar {

constexpr int kSumThreads = 256;
// Vectors that a thread has under way at a time, where it has that many. Code that runs once or twice should be short.
constexpr int kManyVectors = 4;

struct SumParams {
  gemm::ExchangeParams exchange;
  const void* x;
};

template <class Element, int kBatch>
__global__ void __launch_bounds__(kSumThreads, 2) sum_over_ranks(const __grid_constant__ SumParams params) {
  constexpr int kVector = runtime::Exchange::kVector;
  const gemm::ExchangeParams& p = params.exchange;
  const sync::Call call = sync::begin_call(p.symm);
  const int row_vectors = p.exchange.n / kVector;
  const int first = blockIdx.x * kSumThreads + threadIdx.x, step = gridDim.x * kSumThreads;
  const int count = p.exchange.m * row_vectors;
#pragma unroll 1
  for (int begin = first; begin < count; begin += kBatch * step) {
    uint4 vectors[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = begin + b * step;
      if (i < count) vectors[b] = *gemm::vector_at(params.x, static_cast<int64_t>(i) * kVector);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = begin + b * step;
      if (i >= count) break;
      uint4& v = vectors[b];
      // A user's NaN may look like a vector that has not arrived; there are others.
      for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w}) {
        if (*word == runtime::kAbsent) *word = 0x7FFF7FFF;
      }
      exchange::contribute(p.symm, p.exchange, call, i / row_vectors, i % row_vectors * kVector, v);
    }
  }
  gemm::finish<Element, kSumThreads, kBatch>(p, call, threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) sync::end_call(p.symm, call.epoch);
}

template <int kBatch>
auto sum_kernel(runtime::DType dtype) {
  return dtype == runtime::DType::kBFloat16 ? sum_over_ranks<__nv_bfloat16, kBatch>
                                            : sum_over_ranks<__half, kBatch>;
}

inline void launch_sum(const SumParams& params, runtime::DType dtype, int num_sms, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(params.exchange.exchange.m) * params.exchange.exchange.n / 8;
  const int ctas = static_cast<int>(std::min<int64_t>(num_sms, (vectors + kSumThreads - 1) / kSumThreads));
  const bool many = vectors >= static_cast<int64_t>(kManyVectors) * kSumThreads * num_sms;
  const auto kernel = many ? sum_kernel<kManyVectors>(dtype) : sum_kernel<1>(dtype);
  kernel<<<ctas, kSumThreads, 0, stream>>>(params);
  FLUX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flux::gemm_ar
