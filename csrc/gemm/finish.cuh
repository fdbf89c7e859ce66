// The last phase of a launch whose ranks exchange vectors (runtime/exchange.h): sums the ranks' contributions, adds
// bias and residual, applies RMSNorm, writes the result, and quantises it. A CTA sums any vectors or rows, not only those
// that it computed: the shares that it has drawn (shares.cuh).
#pragma once

#include <algorithm>

#include "gemm/epilogue.cuh"
#include "gemm/named_barriers.h"
#include "gemm/quantize.cuh"
#include "gemm/shares.cuh"
#include "runtime/device/exchange.cuh"

namespace flux::gemm {

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
  int row_parts = 1;     // behind tiles: CTAs that share a row for its norm
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
// The next kernel may begin to load a weight while ranks wait. What a sum then still needs from memory, waits behind it. So
// CTAs fetch what is added to the sum, the norm's weight, and where peers send to: a poll of a line that is not in the L2
// returns only when memory has answered.
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

// How values of threads, or of CTAs, that are not negative become one.
struct Sum {
  FLUX_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Largest {
  FLUX_DEVICE float operator()(float a, float b) const { return larger(a, b); }
};

// Called by kThreads threads; `thread` is the caller's index. `scratch` holds one float for each warp.
template <int kThreads, class Combine>
FLUX_DEVICE float combine_over_cta(float value, int thread, float* scratch, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  }
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

// The part of a row that one CTA normalises.
struct RowPart {
  int index, parts;
  int first, vectors;
};
constexpr int kMaxRowParts = 8;

// Splits a row over several CTAs when there are more CTAs than rows: one CTA per row is limited by the SM's 64
// B/clk and by serial load latency (docs/design/decode.md#split-rows). The squares of each part are added first. So
// `ctas` must be equal on all ranks, also if fewer CTAs fit on some GPU; otherwise the last bit of a norm may differ.
inline int row_parts(int rows, int row_vectors, int threads, int ctas) {
  const int parts = std::min(std::min(ctas, Exchange::kMeetings / kMaxRowParts) / rows, kMaxRowParts);
  return std::max(1, std::min(parts, ceil_div(row_vectors, threads)));
}
// Vectors of a part, except for the last one: whole groups of a quantisation. Rounding up leaves the last part vectors,
// because row_parts makes no more parts than a row has blocks of `threads` vectors.
FLUX_HD int part_vectors(int parts, int row_vectors) {
  return ceil_div(row_vectors, parts * kGroupVectors) * kGroupVectors;
}
FLUX_DEVICE RowPart row_part(int index, int parts, int row_vectors) {
  const int vectors = part_vectors(parts, row_vectors), first = index * vectors;
  return {index, parts, first, min(vectors, row_vectors - first)};
}
// Whether each of so many parts of a row has vectors, and all meetings of parts have room.
inline bool can_share_rows(int rows, int row_vectors, int parts) {
  return parts <= kMaxRowParts && (parts - 1) * part_vectors(parts, row_vectors) < row_vectors &&
         (parts == 1 || rows * parts * parts <= Exchange::kMeetings);
}

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

  // Sums vectors begin, begin + stride, ... below `count`. where(i) returns the place of vector i; use(place, sum)
  // consumes its sum. A thread issues the loads of kBatch vectors x kSources ranks before it polls the first, to
  // overlap their latency. Larger batches unroll more code, which costs instruction fetches in code that runs once.
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
        parts[b].template take_sum<Pair<Element>>(symm, call, base(at), slot_bytes, p.op, at.row, total);
        if (f.bias != nullptr) add<Element>(bias[b], total);
        if (f.residual != nullptr) add<Element>(residual[b], total);
        use(at, round<Element>(total));
      }
    }
  }

  // Two-shot: as for_each_sum, for finished sums that their owners have sent.
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
            exchange::take(symm, call, address(at), found[b], {p.op, owner, static_cast<uint32_t>(at.row)}));
      }
    }
  }

  // CTAs that share a row exchange values as ranks exchange vectors. `thread` of a CTA sends its part's value to part
  // number `thread`. A row's parts meet at most twice.
  FLUX_DEVICE void post(float value, int meeting, int row, const RowPart& part, int thread) const {
    if (thread >= part.parts) return;
    ptx::store_relaxed_sys(here + x.meeting(meeting, row, part.parts, part.index, thread),
                           {__float_as_uint(value), 0, 0, 0});
  }

  // Fetches to the L2 where a part will receive values: the first store to a line that is not there waits for memory.
  FLUX_DEVICE void fetch_meeting(int row, const RowPart& part, int thread) const {
    if (thread >= part.parts) return;
    ptx::prefetch_line(here + x.meeting(0, row, part.parts, thread, part.index));
  }

  // Combines the values of all parts of a row, in their order. `scratch` holds one float for each part.
  template <int kThreads, class Combine>
  FLUX_DEVICE float collect(int meeting, int row, const RowPart& part, int thread, float* scratch,
                            Combine combine) const {
    if (thread < part.parts) {
      char* const address = here + x.meeting(meeting, row, part.parts, thread, part.index);
      // The other CTA waits for a peer for at most `timeout_ns`, and reports which peer has not delivered.
      const uint4 v = exchange::poll(&symm.header()->aborted, 2 * symm.timeout_ns, address);
      exchange::put_back_absent(address);
      scratch[thread] = __uint_as_float(v.x);
    }
    ptx::named_barrier_sync(kMathBarrier, kThreads);
    float total = 0.0f;
#pragma unroll 1
    for (int i = 0; i < part.parts; ++i) total = combine(total, scratch[i]);
    return total;
  }

  FLUX_DEVICE int64_t element(const Place& at) const {
    return static_cast<int64_t>(at.row) * x.n + at.column;
  }
};

// RMSNorm of rows, or of parts of rows, one after the other, by kThreads threads of a CTA. Each thread takes
// its vectors of the sum; then all threads write the normalised row. Sums and norm weight stay in shared memory
// if there is room.
template <class Element, int kThreads>
struct RowNorm {
  static constexpr int kVector = Exchange::kVector;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kScratchVectors = (kWarps + kMaxRowParts) * sizeof(float) / sizeof(uint4);
  static_assert((kWarps + kMaxRowParts) * sizeof(float) % sizeof(uint4) == 0);

  const Finish& f;
  const int row_vectors, thread;
  const SpareMemory& spare;
  // Sums stay in shared memory if there is room: a row is written before the next one is taken.
  const bool keeps = true;
  // One float for each warp, then one for each part of a row.
  float* const scratch = static_cast<float*>(__cvta_shared_to_generic(spare.begin));
  int index = -1, first, vectors;  // of the part
  uint4* kept = nullptr;
  const uint4* weight;
  float squares = 0.0f;
  float largest = 0.0f;  // absolute value of this thread's elements of the norm, since take_largest

  // Called by all threads before they take or write that part of a row.
  FLUX_DEVICE void select(const RowPart& part) {
    if (part.index == index) return;
    index = part.index, first = part.first, vectors = part.vectors;
    weight = vector_at(f.norm_weight, 0) + first;
    ptx::copy_async_wait<0>();                        // nothing is still copied to this memory
    ptx::named_barrier_sync(kMathBarrier, kThreads);  // no thread still reads it
    constexpr int kBytes = sizeof(uint4);
    const int room = spare.bytes / kBytes - kScratchVectors;
    const uint32_t begin = spare.begin + kScratchVectors * kBytes;
    auto* const memory = static_cast<uint4*>(__cvta_shared_to_generic(begin));
    if (keeps && vectors <= room) kept = memory;
    if (2 * vectors > room) return;
    for (int i = thread; i < vectors; i += kThreads) {
      ptx::copy_async_16(begin + (vectors + i) * kBytes, weight + i, true);
    }
    ptx::copy_async_commit();
    weight = memory + vectors;
  }

  // Takes one vector of the sum. A thread takes vectors that are kThreads apart.
  FLUX_DEVICE void take(int row, int vector, const uint4& v) {
    sums(row)[vector] = v;
    if (kept != nullptr) kept[vector] = v;
    float values[kVector];
    widen<Element>(v, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares += values[i] * values[i];
  }

  FLUX_DEVICE float* scratch_of_parts() const { return scratch + kWarps; }

  // Returns the sum of squares over the vectors that all threads have taken, and starts a new sum.
  FLUX_DEVICE float take_squares() {
    const float total = combine_over_cta<kThreads>(squares, thread, scratch, Sum());
    squares = 0.0f;
    return total;
  }
  // Likewise of the largest absolute value that they have written.
  FLUX_DEVICE float take_largest() {
    const float total = combine_over_cta<kThreads>(largest, thread, scratch, Largest());
    largest = 0.0f;
    return total;
  }

  // A scale for each row is known when all of the row is written.
  FLUX_DEVICE bool scales_rows() const {
    return f.quantized.q != nullptr && f.quantized.granularity == Granularity::kToken;
  }

  // Writes a row, and quantises it unless its scale is not yet known.
  FLUX_DEVICE void write(int row, float row_squares) {
    const float scale = rsqrtf(row_squares / (row_vectors * kVector) + f.eps);
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
    for (int i = thread; i < vectors; i += kThreads) row_of(f.out, row)[i] = norm(i);
  }
  // The whole of a row, and all of its quantisation that depends on no other row.
  FLUX_DEVICE void write_row(int row, float row_squares) {
    write(row, row_squares);
    if (scales_rows()) quantise(row, take_largest());
  }

  // Quantises what `write` has written of a row.
  FLUX_DEVICE void quantise(int row, float row_largest) const {
    const float scale = scale_of(row_largest, /*e5m2=*/false, f.quantized.ue8m0);
    if (thread == 0 && index == 0) f.quantized.scales[row] = scale;
    const uint4* const from = kept != nullptr ? kept : row_of(f.out, row);
#pragma unroll 1
    for (int i = thread; i < vectors; i += kThreads)
      quantised_row(row)[i] = quantized<Element>(from[i], 1.0f / scale, false);
  }

  // Called once, after all rows: leaves the parts of a scale of the whole tensor (quantized.h).
  FLUX_DEVICE void leave_largest(const Shares& shares) {
    if (!f.quantized.needs_all()) return;
    const float all = take_largest();
    if (thread != 0) return;
    for (int share = shares.first; share < shares.end; ++share) {
      leave_part(f.quantized, share, share == shares.first ? all : 0.0f);
    }
  }

 private:
  template <class Norm>
  FLUX_DEVICE void write_quantised(int row, Norm norm) {
    const Quantized& q = f.quantized;
    const bool groups = q.granularity == Granularity::kGroup;
    float inverse = q.given != nullptr ? 1.0f / *q.given : 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < vectors; begin += kThreads) {
      const int i = begin + thread;
      uint4 v = {0, 0, 0, 0};
      if (i < vectors) {
        v = norm(i);
        row_of(f.out, row)[i] = v;
        if (kept != nullptr) kept[i] = v;
      }
      float most = largest_of<Element>(v);
      if (groups) {
        most = largest_over_lanes<kGroupVectors>(most);
        const float scale = scale_of(most, /*e5m2=*/false, q.ue8m0);
        inverse = 1.0f / scale;
        if (thread % kGroupVectors == 0 && i < vectors) {
          q.scales[(first + i) / kGroupVectors * q.scale_stride + row] = scale;
        }
      } else if (q.given == nullptr) {
        largest = larger(largest, most);
        continue;
      }
      if (i < vectors) quantised_row(row)[i] = quantized<Element>(v, inverse, false);
    }
  }
  FLUX_DEVICE uint2* quantised_row(int row) const {
    return static_cast<uint2*>(f.quantized.q) + static_cast<int64_t>(row) * row_vectors + first;
  }
  FLUX_DEVICE uint4* row_of(void* matrix, int row) const {
    return static_cast<uint4*>(matrix) + static_cast<int64_t>(row) * row_vectors + first;
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
    const int parts = p.row_parts, count = x.m * parts;
    const bool one = shares.end - shares.first == 1 && shares.first + ctas >= count;
    RowNorm<Element, kThreads> norm = {
        .f = s.f, .row_vectors = row_vectors, .thread = thread, .spare = spare, .keeps = parts == 1 || one};
    const auto for_each_part = [&](auto use) {
      for_each_share([&](int share) {
        for (int i = share; i < count; i += ctas) {
          use(row_in_order(i / parts), row_part(i % parts, parts, row_vectors));
        }
      });
    };
    for_each_part([&](int row, const RowPart& part) {
      norm.select(part);
      if (parts > 1) s.fetch_meeting(row, part, thread);
      const auto where = [&](int vector) -> Place { return {row, (part.first + vector) * kVector}; };
      const auto take = [&](const Place& at, const uint4& v) {
        norm.take(row, at.column / kVector - part.first, v);
      };
      if (two_shot) {
        s.template for_each_result<2>(thread, kThreads, part.vectors, where, take);
      } else {
        s.template for_each_sum<2, 4>(thread, kThreads, part.vectors, where, take);
      }
      const float squares = norm.take_squares();
      if (parts == 1) {
        norm.write_row(row, squares);
      } else {
        s.post(squares, 0, row, part, thread);
      }
    });
    // A CTA has sent the values of all its parts before it waits for those of others.
    const auto for_each_met = [&](int meeting, auto combine, auto use) {
      for_each_part([&](int row, const RowPart& part) {
        norm.select(part);
        if (!one) ptx::named_barrier_sync(kMathBarrier, kThreads);  // no thread still reads the last values
        use(row, part,
            s.template collect<kThreads>(meeting, row, part, thread, norm.scratch_of_parts(), combine));
      });
    };
    if (parts > 1) {
      for_each_met(0, Sum(), [&](int row, const RowPart& part, float squares) {
        norm.write(row, squares);
        if (norm.scales_rows()) s.post(norm.take_largest(), 1, row, part, thread);
      });
      if (norm.scales_rows()) {
        for_each_met(1, Largest(),
                     [&](int row, const RowPart&, float largest) { norm.quantise(row, largest); });
      }
    }
    norm.leave_largest(shares);
    // A part that is selected again to be quantised does not read its weight, which is still copied.
    ptx::copy_async_wait<0>();
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
