// The last phase of a launch whose ranks exchange vectors: sums the ranks' contributions, adds bias and residual,
// applies RMSNorm, writes the result, and quantises it. A CTA sums any vectors or rows: the shares that it has drawn.
#pragma once

#include <algorithm>

#include "gemm/quantize.cuh"
#include "runtime/device/exchange.cuh"

namespace flux::gemm {

// --- which CTAs of a launch sum, and what: as many shares as there are CTAs ---
//
// Another kernel may hold SMs, so no CTA may wait before all have sent what others wait for. A CTA that has loaded its
// tiles stays to sum if it sees that all CTAs have begun, as the last to begin does; else it leaves, and one that has
// not begun gets its SM. CTAs that stay draw the shares of all, before they wait.

// Shares first to end - 1.
struct Shares {
  int first, end;
};

// Header::ctas_begun counts CTAs that have begun, and in its upper half those that have left.
constexpr uint32_t kLeft = 1 << 16;

// Called by all threads of a CTA, among them thread 0 once.
FLUX_DEVICE sync::Call begin_exchange(const runtime::SymmBuffer& symm) {
  if (threadIdx.x == 0) atomicAdd(&symm.header()->ctas_begun, 1u);
  return sync::begin_call(symm);
}

// Called by one thread of each CTA while tiles are computed, which hides the latency of the atomics. A CTA leaves by an
// atomic on the word that counts beginnings, so whoever sees that all have begun also sees how many have left.
FLUX_DEVICE Shares draw_shares(const runtime::SymmBuffer& symm) {
  constexpr int kPolls = 32;  // about 20 us: CTAs that only start late are waited for
  runtime::Header* const header = symm.header();
  const uint32_t ctas = gridDim.x;
  uint32_t seen = 0;
  for (int poll = 0; poll < kPolls && seen % kLeft != ctas; ++poll)
    seen = ptx::load_relaxed(&header->ctas_begun);
  if (seen % kLeft != ctas) seen = atomicAdd(&header->ctas_begun, kLeft);
  if (seen % kLeft != ctas) return {0, 0};
  // One share if nobody has left. A CTA that counts itself among those that left, but stays, only makes shares larger.
  const uint32_t stay = max(ctas - seen / kLeft, 1u), count = (ctas + stay - 1) / stay;
  const uint32_t first = atomicAdd(&header->next_share, count);
  return {static_cast<int>(min(first, ctas)), static_cast<int>(min(first + count, ctas))};
}

// As sync::end_call; called after draw_shares.
FLUX_DEVICE void end_exchange(const runtime::SymmBuffer& symm, uint32_t epoch) {
  sync::end_call(symm, epoch, [&] { symm.header()->ctas_begun = symm.header()->next_share = 0; });
}

// Where the thread that draws shares leaves them for those that sum: an mbarrier, then two words of shared memory.
struct SharesBox {
  uint32_t address;

  FLUX_DEVICE void init() const { ptx::mbarrier_init(address, 1); }
  FLUX_DEVICE void put(const Shares& shares) const {
    ptx::store_shared(address + 8, shares.first);
    ptx::store_shared(address + 12, shares.end);
    ptx::mbarrier_arrive(address);
  }
  FLUX_DEVICE Shares get() const {
    ptx::mbarrier_wait(address, 0);
    return {static_cast<int>(ptx::load_shared(address + 8)),
            static_cast<int>(ptx::load_shared(address + 12))};
  }
};

// --- the sum ---

struct Finish {
  const void* bias;         // [n] or null
  const void* residual;     // [m, n] or null: added to the sum
  const void* norm_weight;  // [n] or null: weight of the RMSNorm that is applied to the sum
  float eps;
  void* out;            // the sum, or its norm
  void* sum_out;        // the sum, where `out` is its norm
  Quantized quantized;  // of the norm, to e4m3
};

using runtime::Exchange;

struct ExchangeParams {
  runtime::SymmBuffer symm;
  Exchange exchange;
  Finish finish;
  uint32_t op;
  int rows_at_once = 1;  // ranks send this many evenly spaced rows at a time; sums follow the same order
};

FLUX_DEVICE const uint4* vector_at(const void* matrix, int64_t element) {
  return reinterpret_cast<const uint4*>(static_cast<const char*>(matrix) + element * kResultBytes);
}

// Called by a warp of each CTA: together they fetch contiguous bytes to the L2.
FLUX_DEVICE void fetch_lines(const void* begin, int64_t bytes) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * 32 * ptx::kLineBytes;
  int64_t at = static_cast<int64_t>(blockIdx.x * 32 + ptx::lane()) * ptx::kLineBytes;
#pragma unroll 1
  for (; at < bytes; at += step) ptx::prefetch_line(static_cast<const char*>(begin) + at);
}
// The next kernel may begin to load a weight while ranks wait, and what a sum then needs from memory waits behind it.
// So CTAs fetch what is added to the sum, the norm's weight, and where peers send to, which is polled.
FLUX_DEVICE void fetch_addends(const ExchangeParams& p) {
  const int64_t row_bytes = static_cast<int64_t>(p.exchange.n) * kResultBytes;
  if (p.finish.residual != nullptr) fetch_lines(p.finish.residual, p.exchange.m * row_bytes);
  if (p.finish.norm_weight != nullptr) fetch_lines(p.finish.norm_weight, row_bytes);
}
FLUX_DEVICE void fetch_slots(const ExchangeParams& p, uint32_t epoch) {
  const Exchange& x = p.exchange;
  const int64_t bytes = static_cast<int64_t>(x.slot_rows()) * x.slot_columns() * kResultBytes;
  const char* const here = p.symm.exchange(p.symm.rank, epoch);
  exchange::for_each_peer(p.symm, [&](int peer) { fetch_lines(here + peer * bytes, bytes); });
}

template <class Element>
FLUX_DEVICE void add(const uint4& terms, float (&sum)[Exchange::kVector]) {
  float widened[Exchange::kVector];
  widen<Element>(terms, widened);
#pragma unroll
  for (int i = 0; i < Exchange::kVector; ++i) sum[i] += widened[i];
}

// Combines values of kThreads threads that are not negative. `scratch`: a float for each warp. `thread`: the caller.
template <int kThreads, class Combine>
FLUX_DEVICE float combine_over_cta(float value, int thread, float* scratch, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  ptx::named_barrier_sync(kMathBarrier, kThreads);  // no thread still reads the values of the previous row
  if (thread % 32 == 0) scratch[thread / 32] = value;
  ptx::named_barrier_sync(kMathBarrier, kThreads);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total = combine(total, scratch[i]);
  return total;
}

struct Place {
  int row, column;
};

// The state of a thread in the summing phase.
template <class Element>
struct Summing {
  static constexpr int kVector = Exchange::kVector;

  const ExchangeParams& p;
  const sync::Call call;
  const runtime::SymmBuffer& symm = p.symm;
  const Exchange& x = p.exchange;
  const Finish& f = p.finish;
  char* const here = symm.exchange(symm.rank, call.epoch);

  // For vectors begin, begin + stride, ... below `count`: calls ask(b, i) for kBatch of them, and then take(b, i).
  template <int kBatch, class Ask, class Take>
  FLUX_DEVICE static void in_batches(int begin, int stride, int count, Ask ask, Take take) {
#pragma unroll 1
    for (; begin < count; begin += kBatch * stride) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begin + b * stride >= count) break;
        ask(b, begin + b * stride);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (begin + b * stride >= count) break;
        take(b, begin + b * stride);
      }
    }
  }

  // Sums them. where(i) returns the place of vector i; use(place, sum) consumes its sum. A thread issues the loads of
  // kBatch vectors x kSources ranks before it polls the first. Larger batches cost instruction fetches: code runs once.
  template <int kBatch, int kSources, class Where, class Use>
  FLUX_DEVICE void for_each_sum(int begin, int stride, int count, Where where, Use use) const {
    const int64_t slot_bytes =
        static_cast<int64_t>(x.slot_rows()) * x.slot_columns() * Exchange::kElementBytes;
    const auto base = [&](const Place& at) { return here + x.contribution(0, symm.rank, at.row, at.column); };
    exchange::Parts<kSources> parts[kBatch];
    uint4 bias[kBatch], residual[kBatch];
    const auto ask = [&](int b, int i) {
      const Place at = where(i);
      parts[b].ask(base(at), slot_bytes, symm.world_size);
      if (f.bias != nullptr) bias[b] = *vector_at(f.bias, at.column);
      if (f.residual != nullptr) residual[b] = *vector_at(f.residual, element(at));
    };
    in_batches<kBatch>(begin, stride, count, ask, [&](int b, int i) {
      const Place at = where(i);
      float total[kVector];
      parts[b].template take_sum<Pair<Element>>(symm, call, base(at), slot_bytes, p.op, at.row, total);
      if (f.bias != nullptr) add<Element>(bias[b], total);
      if (f.residual != nullptr) add<Element>(residual[b], total);
      use(at, round<Element>(total));
    });
  }

  // Two-shot: as for_each_sum, for finished sums that their owners have sent.
  template <int kBatch, class Where, class Use>
  FLUX_DEVICE void for_each_result(int begin, int stride, int count, Where where, Use use) const {
    const auto address = [&](const Place& at) { return here + x.result(at.row, at.column); };
    uint4 found[kBatch];
    const auto ask = [&](int b, int i) { found[b] = ptx::load_relaxed_sys(address(where(i))); };
    in_batches<kBatch>(begin, stride, count, ask, [&](int b, int i) {
      const Place at = where(i);
      const sync::WaitInfo info = {p.op, static_cast<uint32_t>(x.owner(at.row, at.column)),
                                   static_cast<uint32_t>(at.row)};
      use(at, exchange::take(symm, call, address(at), found[b], info));
    });
  }

  FLUX_DEVICE int64_t element(const Place& at) const {
    return static_cast<int64_t>(at.row) * x.n + at.column;
  }
};

// RMSNorm of rows, one after the other, by kThreads threads of a CTA. Sums and norm weight stay in shared memory if there
// is room. The bits of a norm follow from its row and kThreads: a thread adds the squares of its vectors in their order,
// then all threads theirs.
template <class Element, int kThreads>
struct RowNorm {
  static constexpr int kVector = Exchange::kVector;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kScratchVectors = kWarps * sizeof(float) / sizeof(uint4);
  static_assert(kWarps * sizeof(float) % sizeof(uint4) == 0);

  const Finish& f;
  const int row_vectors, thread;
  const SpareMemory& spare;
  // One float for each warp.
  float* const scratch = static_cast<float*>(__cvta_shared_to_generic(spare.begin));
  uint4* kept = nullptr;
  const uint4* weight = vector_at(f.norm_weight, 0);
  float squares = 0.0f;
  float largest = 0.0f;  // absolute value of this thread's elements of the norm, since take_largest

  // Called once by all threads of a CTA that has rows: one without rows would leave before its copies of the weight.
  FLUX_DEVICE void begin() {
    ptx::named_barrier_sync(kMathBarrier, kThreads);  // no thread still uses this memory
    constexpr int kBytes = sizeof(uint4);
    const int room = spare.bytes / kBytes - kScratchVectors;
    const uint32_t begin = spare.begin + kScratchVectors * kBytes;
    auto* const memory = static_cast<uint4*>(__cvta_shared_to_generic(begin));
    if (row_vectors <= room) kept = memory;
    if (2 * row_vectors > room) return;
    for (int i = thread; i < row_vectors; i += kThreads)
      ptx::copy_async_16(begin + (row_vectors + i) * kBytes, weight + i, true);
    ptx::copy_async_commit();
    weight = memory + row_vectors;
  }

  // Takes one vector of the sum. A thread takes vectors that are kThreads apart.
  FLUX_DEVICE void take(int row, int vector, const uint4& v) {
    sums(row)[vector] = v;
    if (kept != nullptr) kept[vector] = v;
    float values[kVector];
    widen<Element>(v, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares = fmaf(values[i], values[i], squares);
  }

  // Writes the row whose vectors all threads have taken, and quantises it as far as that depends on no other row. A
  // thread reads only vectors that it has itself taken, and weights that it has itself copied.
  FLUX_DEVICE void write(int row) {
    const float sum =
        combine_over_cta<kThreads>(squares, thread, scratch, [](float a, float b) { return a + b; });
    squares = 0.0f;
    const float scale = rsqrtf(sum / (row_vectors * kVector) + f.eps);
    const uint4* const from = kept != nullptr ? kept : sums(row);
    ptx::copy_async_wait<0>();
    const auto norm = [&](int i) {
      float values[kVector], weights[kVector];
      widen<Element>(from[i], values);
      widen<Element>(weight[i], weights);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] *= scale * weights[j];
      return round<Element>(values);
    };
    if (f.quantized.q != nullptr) {
      write_quantised(row, norm);
      return;
    }
#pragma unroll 1
    for (int i = thread; i < row_vectors; i += kThreads) row_of(f.out, row)[i] = norm(i);
  }

  // Called once, after all rows: leaves the parts of a scale of the whole tensor (kMaxParts).
  FLUX_DEVICE void leave_largest(const Shares& shares) {
    if (!f.quantized.needs_all()) return;
    const float all = take_largest();
    if (thread != 0) return;
    for (int share = shares.first; share < shares.end; ++share)
      leave_part(f.quantized, share, share == shares.first ? all : 0.0f);
  }

 private:
  // The largest absolute value that all threads have written.
  FLUX_DEVICE float take_largest() {
    const float total =
        combine_over_cta<kThreads>(largest, thread, scratch, [](float a, float b) { return larger(a, b); });
    largest = 0.0f;
    return total;
  }

  template <class Norm>
  FLUX_DEVICE void write_quantised(int row, Norm norm) {
    const Quantized& q = f.quantized;
    const bool groups = q.granularity == Granularity::kGroup;
    float inverse = q.given != nullptr ? 1.0f / *q.given : 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < row_vectors; begin += kThreads) {
      const int i = begin + thread;
      uint4 v = {0, 0, 0, 0};
      if (i < row_vectors) {
        v = norm(i);
        row_of(f.out, row)[i] = v;
        if (kept != nullptr) kept[i] = v;
      }
      float most = largest_of<Element>(v);
      if (groups) {
        most = largest_over_lanes<kGroupVectors>(most);
        const float scale = scale_of(most, /*e5m2=*/false, q.ue8m0);
        inverse = 1.0f / scale;
        if (thread % kGroupVectors == 0 && i < row_vectors)
          q.scales[i / kGroupVectors * q.scale_stride + row] = scale;
      } else if (q.given == nullptr) {
        largest = larger(largest, most);
        continue;
      }
      if (i < row_vectors) quantised_row(row)[i] = quantized<Element>(v, inverse, false);
    }
    if (q.granularity != Granularity::kToken) return;
    // A scale for each row is known when all of the row is written.
    const float scale = scale_of(take_largest(), /*e5m2=*/false, q.ue8m0);
    if (thread == 0) q.scales[row] = scale;
    const uint4* const from = kept != nullptr ? kept : row_of(f.out, row);
#pragma unroll 1
    for (int i = thread; i < row_vectors; i += kThreads)
      quantised_row(row)[i] = quantized<Element>(from[i], 1.0f / scale, false);
  }
  FLUX_DEVICE uint2* quantised_row(int row) const {
    return static_cast<uint2*>(f.quantized.q) + static_cast<int64_t>(row) * row_vectors;
  }
  FLUX_DEVICE uint4* row_of(void* matrix, int row) const {
    return static_cast<uint4*>(matrix) + static_cast<int64_t>(row) * row_vectors;
  }
  FLUX_DEVICE uint4* sums(int row) const { return row_of(f.sum_out, row); }
};

// Called by kThreads threads of a CTA; `thread` is the caller's index.
template <class Element, int kThreads>
FLUX_DEVICE void finish(const ExchangeParams& p, const sync::Call& call, int thread, const Shares& shares,
                        const SpareMemory& spare) {
  constexpr int kVector = Exchange::kVector;
  const Summing<Element> s = {p, call};
  const Exchange& x = s.x;
  const int ctas = gridDim.x, step = ctas * kThreads;
  const bool two_shot = x.mode == Exchange::Mode::kTwoShot;
  const int row_vectors = x.n / kVector;
  const auto row_in_order = [&](int i) {
    return p.rows_at_once == 1 ? i : i % p.rows_at_once * (x.m / p.rows_at_once) + i / p.rows_at_once;
  };
  const auto for_each_share = [&](auto use) {
#pragma unroll 1
    for (int share = shares.first; share < shares.end; ++share) use(share);
  };

  if (two_shot) {
    const int own_vectors = x.columns_of(s.symm.rank) / kVector, count = x.m * own_vectors;
    const auto where = [&](int i) -> Place {
      return {row_in_order(i / own_vectors), x.first_column(s.symm.rank) + i % own_vectors * kVector};
    };
    const auto use = [&](const Place& at, const uint4& v) {
      if (call.aborted) return;
      exchange::for_each_rank(s.symm, [&](int rank) {
        ptx::store_relaxed_sys(s.symm.exchange(rank, call.epoch) + x.result(at.row, at.column), v);
      });
    };
    for_each_share([&](int share) {
      s.template for_each_sum<1, 4>(share * kThreads + thread, step, count, where, use);
    });
  }
  if (s.f.norm_weight != nullptr) {
    // Two vectors in flight (docs/design/decode.md#in-a-launch-of-its-own).
    RowNorm<Element, kThreads> norm = {
        .f = s.f, .row_vectors = row_vectors, .thread = thread, .spare = spare};
    if (shares.first < min(shares.end, x.m)) norm.begin();
    for_each_share([&](int share) {
#pragma unroll 1
      for (int i = share; i < x.m; i += ctas) {
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
    });
    norm.leave_largest(shares);
    return;
  }
  const int count = x.m * row_vectors;
  const auto where = [&](int i) -> Place {
    return {row_in_order(i / row_vectors), i % row_vectors * kVector};
  };
  const auto use = [&](const Place& at, const uint4& v) {
    *const_cast<uint4*>(vector_at(s.f.out, s.element(at))) = v;
  };
  for_each_share([&](int share) {
    if (two_shot) {
      s.template for_each_result<1>(share * kThreads + thread, step, count, where, use);
    } else {
      s.template for_each_sum<1, 4>(share * kThreads + thread, step, count, where, use);
    }
  });
}

}  // namespace flux::gemm
