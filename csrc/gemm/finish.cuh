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
  int rows_at_once = 1;  // that ranks send, evenly spaced: who sums follows, and finds that they are there
};

FLUX_DEVICE const uint4* vector_at(const void* matrix, int64_t element) {
  return reinterpret_cast<const uint4*>(static_cast<const char*>(matrix) + element * kElementBytes);
}

template <class Element>
FLUX_DEVICE void add(const uint4& terms, float (&sum)[Exchange::kVector]) {
  float widened[Exchange::kVector];
  widen<Element>(terms, widened);
#pragma unroll
  for (int i = 0; i < Exchange::kVector; ++i) sum[i] += widened[i];
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

struct Place {
  int row, column;
};

// The part of a launch that sums, as its threads see it.
template <class Element>
struct Summing {
  static constexpr int kVector = Exchange::kVector;

  const runtime::SymmBuffer& symm;
  const Exchange& x;
  const Finish& f;
  const sync::Call call;
  const uint32_t op;
  char* const here;

  FLUX_DEVICE Summing(const ExchangeParams& p, const sync::Call& call)
      : symm(p.symm),
        x(p.exchange),
        f(p.finish),
        call(call),
        op(p.op),
        here(symm.exchange(symm.rank, call.epoch)) {}

  // Sums of the vectors begin, begin + stride and so on below `count`: where(i) says where one lies, use(place, its sum)
  // takes it. A thread asks for all that kBatch of them are made of, of each for kSources contributions, before
  // it waits for the first: every answer takes as long. But code takes long too, where it runs once.
  template <int kBatch, int kSources, class Where, class Use>
  FLUX_DEVICE void for_each_sum(int begin, int stride, int count, Where where, Use use) const {
    const int64_t slot_bytes =
        static_cast<int64_t>(x.slot_rows()) * x.slot_columns() * Exchange::kElementBytes;
    const auto base = [&](const Place& at) { return here + x.contribution(0, symm.rank, at.row, at.column); };
#pragma unroll 1
    for (; begin < count; begin += kBatch * stride) {
      exchange::Parts<kSources> parts[kBatch];
      uint4 bias[kBatch], residual[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begin + b * stride >= count) break;
        const Place at = where(begin + b * stride);
        parts[b].ask(base(at), slot_bytes, symm.world_size);
        if (f.bias != nullptr) bias[b] = *vector_at(f.bias, at.column);
        if (f.residual != nullptr) residual[b] = *vector_at(f.residual, element(at));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = begin + b * stride;
        if (i >= count) break;
        const Place at = where(i);
        float total[kVector];
        parts[b].template take_sum<Pair<Element>>(symm, call, base(at), slot_bytes, op, at.row, total);
        if (f.bias != nullptr) add<Element>(bias[b], total);
        if (f.residual != nullptr) add<Element>(residual[b], total);
        use(at, round<Element>(total));
      }
    }
  }

  // The same of sums that their owners have sent.
  template <int kBatch, class Where, class Use>
  FLUX_DEVICE void for_each_result(int begin, int stride, int count, Where where, Use use) const {
    const auto address = [&](const Place& at) { return here + x.result(at.row, at.column); };
#pragma unroll 1
    for (; begin < count; begin += kBatch * stride) {
      uint4 found[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begin + b * stride >= count) break;
        found[b] = ptx::load_relaxed_sys(address(where(begin + b * stride)));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = begin + b * stride;
        if (i >= count) break;
        const Place at = where(i);
        const uint32_t owner = x.owner(at.row, at.column);
        use(at,
            exchange::take(symm, call, address(at), found[b], {op, owner, static_cast<uint32_t>(at.row)}));
      }
    }
  }

  FLUX_DEVICE int64_t element(const Place& at) const {
    return static_cast<int64_t>(at.row) * x.n + at.column;
  }
};

// RMSNorm of rows, one after the other, by kThreads threads of a CTA: each takes its vectors of a row, then all write what
// becomes of it. Sums and weight wait in shared memory, as far as there is room, and are not fetched again.
template <class Element, int kThreads>
struct RowNorm {
  static constexpr int kVector = Exchange::kVector;

  const Finish& f;
  const int n, vectors, thread;
  float* const scratch;
  uint4* kept = nullptr;
  const uint4* weight;
  float squares = 0.0f;

  // All of the threads, before they take the first row.
  FLUX_DEVICE RowNorm(const Finish& f, int n, int thread, float* scratch, const SpareMemory& spare)
      : f(f),
        n(n),
        vectors(n / kVector),
        thread(thread),
        scratch(scratch),
        weight(vector_at(f.norm_weight, 0)) {
    ptx::named_barrier_sync(1, kThreads);  // nobody reads anymore what lies there
    const int room = spare.bytes / static_cast<int>(sizeof(uint4));
    auto* const memory = static_cast<uint4*>(__cvta_shared_to_generic(spare.begin));
    if (vectors <= room) kept = memory;
    if (2 * vectors > room) return;
    for (int i = thread; i < vectors; i += kThreads) {
      ptx::copy_async_16(spare.begin + (vectors + i) * sizeof(uint4), weight + i, true);
    }
    ptx::copy_async_commit();
    weight = memory + vectors;
  }

  // A vector of the sum; of these a thread takes its own, kThreads apart.
  FLUX_DEVICE void take(int row, int vector, const uint4& v) {
    sums(row)[vector] = v;
    if (kept != nullptr) kept[vector] = v;
    float values[kVector];
    widen<Element>(v, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares += values[i] * values[i];
  }

  FLUX_DEVICE void write(int row) {
    const float scale = rsqrtf(sum_over_cta<kThreads>(squares, thread, scratch) / n + f.eps);
    squares = 0.0f;
    const uint4* const from = kept != nullptr ? kept : sums(row);
    ptx::copy_async_wait<0>();
#pragma unroll 1
    for (int i = thread; i < vectors; i += kThreads) {
      float values[kVector], weights[kVector];
      widen<Element>(from[i], values);
      widen<Element>(weight[i], weights);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] *= scale * weights[j];
      row_of(f.out, row)[i] = round<Element>(values);
    }
  }

 private:
  FLUX_DEVICE uint4* row_of(void* matrix, int row) const {
    return static_cast<uint4*>(matrix) + static_cast<int64_t>(row) * vectors;
  }
  FLUX_DEVICE uint4* sums(int row) const { return row_of(f.sum_out, row); }
};

// kThreads threads of every CTA of the launch, each with its number.
template <class Element, int kThreads>
FLUX_DEVICE void finish(const ExchangeParams& p, const sync::Call& call, int thread,
                        const SpareMemory& spare) {
  constexpr int kVector = Exchange::kVector;
  __shared__ float scratch[kThreads / 32];
  const Summing<Element> s(p, call);
  const Exchange& x = s.x;
  const int first = blockIdx.x * kThreads + thread, step = gridDim.x * kThreads;
  const bool two_shot = x.mode == Exchange::Mode::kTwoShot;
  const int row_vectors = x.n / kVector;
  const auto row_in_order = [&](int i) {
    return p.rows_at_once == 1 ? i : i % p.rows_at_once * (x.m / p.rows_at_once) + i / p.rows_at_once;
  };

  if (two_shot) {
    const int own_vectors = x.columns_of(s.symm.rank) / kVector, count = x.m * own_vectors;
    const auto where = [&](int i) -> Place {
      return {row_in_order(i / own_vectors), x.first_column(s.symm.rank) + i % own_vectors * kVector};
    };
    s.template for_each_sum<1, 4>(first, step, count, where, [&](const Place& at, const uint4& v) {
      if (call.aborted) return;
      exchange::for_each_rank(s.symm, [&](int rank) {
        ptx::store_relaxed_sys(s.symm.exchange(rank, call.epoch) + x.result(at.row, at.column), v);
      });
    });
  }
  if (s.f.norm_weight != nullptr) {
    // A CTA takes whole rows, so that their means need no meeting of CTAs. Two vectors at a time: with one calls
    // take 1.6 % longer, with four as long (benchmarks/results/tuning/2026-11-23-gemm_ar-norm-tp2-2xH200.json).
    if (blockIdx.x >= x.m) return;
    RowNorm<Element, kThreads> norm(s.f, x.n, thread, scratch, spare);
    for (int i = blockIdx.x; i < x.m; i += gridDim.x) {
      const int row = row_in_order(i);
      const auto where = [&](int vector) -> Place { return {row, vector * kVector}; };
      const auto take = [&](const Place& at, const uint4& v) { norm.take(row, at.column / kVector, v); };
      if (two_shot) {
        s.template for_each_result<2>(thread, kThreads, row_vectors, where, take);
      } else {
        s.template for_each_sum<2, 4>(thread, kThreads, row_vectors, where, take);
      }
      norm.write(row);
    }
    return;
  }
  const int count = x.m * row_vectors;
  const auto where = [&](int i) -> Place {
    return {row_in_order(i / row_vectors), i % row_vectors * kVector};
  };
  const auto use = [&](const Place& at, const uint4& v) {
    *const_cast<uint4*>(vector_at(s.f.out, s.element(at))) = v;
  };
  if (two_shot) {
    s.template for_each_result<1>(first, step, count, where, use);
  } else {
    s.template for_each_sum<1, 4>(first, step, count, where, use);
  }
}

}  // namespace flux::gemm
