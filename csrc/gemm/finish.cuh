// The end of a launch whose ranks exchange vectors (runtime/exchange.h): sums what they contributed, adds bias
// and residual, applies RMSNorm, and writes the result. All CTAs take part, each with whatever vectors or rows
// fall to it: it does not matter who computed them.
#pragma once

#include "gemm/epilogue.cuh"
#include "runtime/device/exchange.cuh"

namespace flux::gemm {

struct Finish {
  const void* bias;         // [n] or null
  const void* residual;     // [m, n] or null: added to the sum
  const void* norm_weight;  // [n] or null: of the RMSNorm of that
  float eps;
  void* out;      // the sum, or its norm
  void* sum_out;  // the sum, where `out` is its norm
};

using runtime::Exchange;

struct ExchangeParams {
  runtime::SymmBuffer symm;
  Exchange exchange;
  Finish finish;
  uint32_t op;
};

FLUX_DEVICE const uint4* vector_at(const void* matrix, int64_t element) {
  return reinterpret_cast<const uint4*>(static_cast<const char*>(matrix) + element * kElementBytes);
}

template <class Element>
FLUX_DEVICE void add(const void* matrix, int64_t element, float (&sum)[Exchange::kVector]) {
  if (matrix == nullptr) return;
  float term[Exchange::kVector];
  widen<Element>(*vector_at(matrix, element), term);
#pragma unroll
  for (int i = 0; i < Exchange::kVector; ++i) sum[i] += term[i];
}

// kThreads threads, each with its number; `scratch` holds a float for each warp.
template <int kThreads>
FLUX_DEVICE float sum_over_cta(float value, int thread, float* scratch) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
  }
  ptx::named_barrier_sync(1, kThreads);  // nobody still reads the last row's
  if (thread % 32 == 0) scratch[thread / 32] = value;
  ptx::named_barrier_sync(1, kThreads);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += scratch[i];
  return total;
}

// kThreads threads of every CTA of the launch, each with its number.
template <class Element, int kThreads>
FLUX_DEVICE void finish(const ExchangeParams& p, const sync::Call& call, int thread) {
  constexpr int kVector = Exchange::kVector;
  __shared__ float scratch[kThreads / 32];
  const runtime::SymmBuffer& symm = p.symm;
  const Exchange& x = p.exchange;
  const Finish& f = p.finish;
  const int first = blockIdx.x * kThreads + thread, step = gridDim.x * kThreads;
  const bool two_shot = x.mode == Exchange::Mode::kTwoShot;
  const int first_row = x.first_row(symm.rank);

  const auto sum = [&](int row, int column) {
    float total[kVector];
    exchange::take_sum<Pair<Element>>(symm, x, call, p.op, row, column, total);
    add<Element>(f.bias, column, total);
    add<Element>(f.residual, static_cast<int64_t>(row) * x.n + column, total);
    return round<Element>(total);
  };
  if (two_shot) {
    const int own_vectors = x.columns_of(symm.rank) / kVector;
    for (int i = first; i < x.m * own_vectors; i += step) {
      const int row = i / own_vectors, column = x.first_column(symm.rank) + i % own_vectors * kVector;
      const uint4 v = sum(row, column);
      for (int j = 1; j <= x.world_size && !call.aborted; ++j) {
        const int peer = symm.rank + j < x.world_size ? symm.rank + j : symm.rank + j - x.world_size;
        ptx::store_relaxed_sys(symm.exchange(peer, call.epoch) + x.result(row, column), v);
      }
    }
  }
  const auto result = [&](int row, int column) {
    if (!two_shot) return sum(row, column);
    char* const address = symm.exchange(symm.rank, call.epoch) + x.result(row, column);
    return exchange::take(symm, call, address, ptx::load_relaxed_sys(address),
                          {p.op, static_cast<uint32_t>(x.owner(row, column)), static_cast<uint32_t>(row)});
  };

  const int rows = x.slot_rows(), row_vectors = x.n / kVector;
  if (f.norm_weight == nullptr) {
    for (int i = first; i < rows * row_vectors; i += step) {
      const int row = i / row_vectors, column = i % row_vectors * kVector;
      *const_cast<uint4*>(vector_at(f.out, static_cast<int64_t>(i) * kVector)) =
          result(first_row + row, column);
    }
    return;
  }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t begin = static_cast<int64_t>(row) * x.n;
    float squares = 0.0f;
    for (int column = thread * kVector; column < x.n; column += kThreads * kVector) {
      const uint4 v = result(first_row + row, column);
      *const_cast<uint4*>(vector_at(f.sum_out, begin + column)) = v;
      float values[kVector];
      widen<Element>(v, values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) squares += values[i] * values[i];
    }
    const float scale = rsqrtf(sum_over_cta<kThreads>(squares, thread, scratch) / x.n + f.eps);
    for (int column = thread * kVector; column < x.n; column += kThreads * kVector) {
      float values[kVector], weight[kVector];
      widen<Element>(*vector_at(f.sum_out, begin + column), values);
      widen<Element>(*vector_at(f.norm_weight, column), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] *= scale * weight[i];
      *const_cast<uint4*>(vector_at(f.out, begin + column)) = round<Element>(values);
    }
  }
}

}  // namespace flux::gemm
