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

// See finish. A thread asks for kBatch vectors before it waits for the first, as every answer takes as long; of each
// for kSources contributions.
template <class Element, int kThreads, int kBatch, int kSources>
FLUX_DEVICE void finish_in_batches(const ExchangeParams& p, const sync::Call& call, int thread,
                                   float* scratch) {
  constexpr int kVector = Exchange::kVector;
  const runtime::SymmBuffer& symm = p.symm;
  const Exchange& x = p.exchange;
  const Finish& f = p.finish;
  const int first = blockIdx.x * kThreads + thread, step = gridDim.x * kThreads;
  const bool two_shot = x.mode == Exchange::Mode::kTwoShot;
  const int first_row = x.first_row(symm.rank);
  char* const here = symm.exchange(symm.rank, call.epoch);
  const int64_t slot_bytes = static_cast<int64_t>(x.slot_rows()) * x.slot_columns() * Exchange::kElementBytes;

  struct Place {
    int row, column;
  };
  // Of the vectors begin, begin + stride and so on below `count`: where(i) says where one lies, use(i, place, its sum)
  // takes it.
  const auto for_each_sum = [&](int begin, int stride, int count, auto where, auto use) {
#pragma unroll 1
    for (; begin < count; begin += kBatch * stride) {
      exchange::Parts<kSources> parts[kBatch];
      const auto base = [&](const Place& at) {
        return here + x.contribution(0, symm.rank, at.row, at.column);
      };
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = begin + b * stride;
        if (i < count) parts[b].ask(base(where(i)), slot_bytes, symm.world_size);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = begin + b * stride;
        if (i >= count) break;
        const Place at = where(i);
        float total[kVector];
        parts[b].template take_sum<Pair<Element>>(symm, call, base(at), slot_bytes, p.op, at.row, total);
        add<Element>(f.bias, at.column, total);
        add<Element>(f.residual, static_cast<int64_t>(at.row) * x.n + at.column, total);
        use(i, at, round<Element>(total));
      }
    }
  };
  if (two_shot) {
    const int own_vectors = x.columns_of(symm.rank) / kVector;
    const auto where = [&](int i) -> Place {
      return {i / own_vectors, x.first_column(symm.rank) + i % own_vectors * kVector};
    };
    for_each_sum(first, step, x.m * own_vectors, where, [&](int, const Place& at, const uint4& v) {
      for (int j = 1; j <= x.world_size && !call.aborted; ++j) {
        const int peer = symm.rank + j < x.world_size ? symm.rank + j : symm.rank + j - x.world_size;
        ptx::store_relaxed_sys(symm.exchange(peer, call.epoch) + x.result(at.row, at.column), v);
      }
    });
  }

  // With a norm a CTA takes whole rows, so that their means need no meeting of CTAs; else it takes what there is.
  const bool norm = f.norm_weight != nullptr;
  const int rows = x.slot_rows(), row_vectors = x.n / kVector;
  void* const sums = norm ? f.sum_out : f.out;
  for (int row = norm ? blockIdx.x : 0; row < (norm ? rows : 1); row += gridDim.x) {
    const int64_t begin = static_cast<int64_t>(row) * x.n;
    float squares = 0.0f;
    const auto where = [&](int i) -> Place {
      return {first_row + row + i / row_vectors, i % row_vectors * kVector};
    };
    const auto use = [&](int i, const Place&, const uint4& v) {
      *const_cast<uint4*>(vector_at(sums, begin + static_cast<int64_t>(i) * kVector)) = v;
      float values[kVector];
      widen<Element>(v, values);
#pragma unroll
      for (int j = 0; j < kVector; ++j) squares += values[j] * values[j];
    };
    int i = norm ? thread : first;
    const int stride = norm ? kThreads : step, count = norm ? row_vectors : rows * row_vectors;
    if (!two_shot) {
      for_each_sum(i, stride, count, where, use);
    } else {
      // Owners have sent the sums.
      const auto address = [&](const Place& at) { return here + x.result(at.row, at.column); };
#pragma unroll 1
      for (; i < count; i += kBatch * stride) {
        uint4 found[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (i + b * stride < count) found[b] = ptx::load_relaxed_sys(address(where(i + b * stride)));
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (i + b * stride >= count) break;
          const Place at = where(i + b * stride);
          const uint32_t owner = x.owner(at.row, at.column);
          use(i + b * stride, at,
              exchange::take(symm, call, address(at), found[b],
                             {p.op, owner, static_cast<uint32_t>(at.row)}));
        }
      }
    }
    if (!norm) break;
    const float scale = rsqrtf(sum_over_cta<kThreads>(squares, thread, scratch) / x.n + f.eps);
    for (int column = thread * kVector; column < x.n; column += kThreads * kVector) {
      float values[kVector], weight[kVector];
      widen<Element>(*vector_at(sums, begin + column), values);
      widen<Element>(*vector_at(f.norm_weight, column), weight);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] *= scale * weight[j];
      *const_cast<uint4*>(vector_at(f.out, begin + column)) = round<Element>(values);
    }
  }
}

// kThreads threads of every CTA of the launch, each with its number.
template <class Element, int kThreads>
FLUX_DEVICE void finish(const ExchangeParams& p, const sync::Call& call, int thread) {
  __shared__ float scratch[kThreads / 32];
  if (p.symm.world_size <= 2) {
    finish_in_batches<Element, kThreads, 4, 2>(p, call, thread, scratch);
  } else {
    finish_in_batches<Element, kThreads, 2, 4>(p, call, thread, scratch);
  }
}

}  // namespace flux::gemm
