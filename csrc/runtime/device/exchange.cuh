// Exchange of 16-byte vectors between ranks without signals: an exchange buffer holds kAbsent, a value that no rank
// sends. A reader polls a vector until no word of it is kAbsent, and then restores kAbsent. Data takes one trip over
// the link, without a fence or a flag (docs/design/decode.md#the-sum-the-data-is-the-signal).
//
// That cannot overwrite a vector of a later call. Call e+2 uses the buffer of call e. A peer sends in e+2 only after it
// has finished e+1, in which it has received a vector that this rank sent after it had finished e.
#pragma once

#include "runtime/device/sync.cuh"

namespace flux::exchange {

using runtime::Exchange;
using runtime::kAbsent;
using runtime::kMaxWorldSize;

// Calls use(rank) for all ranks. Each rank starts with rank+1 and ends with itself.
template <class Use>
FLUX_DEVICE void for_each_rank(const runtime::SymmBuffer& symm, Use use, bool itself_too = true) {
  for (int i = 1; i < symm.world_size + itself_too; ++i)
    use(symm.rank + i < symm.world_size ? symm.rank + i : symm.rank + i - symm.world_size);
}
template <class Use>
FLUX_DEVICE void for_each_peer(const runtime::SymmBuffer& symm, Use use) {
  for_each_rank(symm, use, /*itself_too=*/false);
}

FLUX_DEVICE bool is_whole(const uint4& v) {
  return v.x != kAbsent && v.y != kAbsent && v.z != kAbsent && v.w != kAbsent;
}

// Replaces words of the user's data that equal kAbsent by another NaN.
FLUX_DEVICE uint4 presentable(uint4 v) {
  for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w})
    if (*word == kAbsent) *word = 0x7FFF7FFF;
  return v;
}

FLUX_DEVICE void contribute(const runtime::SymmBuffer& symm, const Exchange& x, const sync::Call& call,
                            int row, int column, const uint4& v) {
  if (call.aborted) return;
  if (x.mode != Exchange::Mode::kOneShot) {
    const int owner = x.owner(row, column);
    ptx::store_relaxed_sys(symm.exchange(owner, call.epoch) + x.contribution(symm.rank, owner, row, column),
                           v);
    return;
  }
  const int64_t offset = x.contribution(symm.rank, 0, row, column);
  for_each_rank(symm, [&](int rank) { ptx::store_relaxed_sys(symm.exchange(rank, call.epoch) + offset, v); });
}

// Polls a vector until it is complete, or a deadline has passed in a thread of this rank. Not inlined: it runs rarely.
inline __device__ __noinline__ uint4 poll(const uint32_t* aborted, uint64_t timeout_ns, const char* address) {
  const uint64_t start = ptx::globaltimer_ns();
  uint4 v;
  do {
    for (int i = 0; i < 256; ++i) {
      v = ptx::load_relaxed_sys(address);
      if (is_whole(v)) return v;
    }
  } while (ptx::load_relaxed(aborted) == 0 && ptx::globaltimer_ns() - start <= timeout_ns);
  return v;
}

FLUX_DEVICE void put_back_absent(char* address) {
  ptx::store_relaxed_sys(address, {kAbsent, kAbsent, kAbsent, kAbsent});
}

// Waits for a vector whose first load returned `v`. All ones (NaN) after a timeout, also in later calls: what a late
// peer then sends may belong to a call that this rank has given up.
FLUX_DEVICE uint4 take(const runtime::SymmBuffer& symm, const sync::Call& call, char* address, uint4 v,
                       sync::WaitInfo info) {
  if (call.aborted || !is_whole(v)) {
    if (!call.aborted) v = poll(&symm.header()->aborted, symm.timeout_ns, address);
    if (call.aborted || !is_whole(v)) {
      // Records only the rank's first failure.
      sync::report(symm, runtime::Failure::kTimeout, info, call.epoch, call.epoch - 1);
      v = {~0u, ~0u, ~0u, ~0u};
    }
  }
  put_back_absent(address);
  return v;
}

// The contributions of all ranks to one vector, on the rank that sums it. `own`: its own one, or null: in its slot.
template <int kSources>
struct Parts {
  uint4 of[kSources];  // results of the first loads; may be incomplete

  // Issues the loads for `count` ranks (at most kSources), starting with rank `first`.
  FLUX_DEVICE void ask(const char* base, int64_t slot_bytes, int count, int first = 0, int rank = 0,
                       const uint4* own = nullptr) {
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      if (i < count)
        of[i] = own != nullptr && first + i == rank ? *own : ptx::load_relaxed_sys(base + i * slot_bytes);
    }
  }

  // Waits for all contributions, and sums them in fp32 in rank order.
  template <class Pair>
  FLUX_DEVICE void take_sum(const runtime::SymmBuffer& symm, const sync::Call& call, char* base,
                            int64_t slot_bytes, uint32_t op, int row, float (&sum)[Exchange::kVector],
                            const uint4* own = nullptr) {
#pragma unroll
    for (int i = 0; i < Exchange::kVector; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < symm.world_size; first += kSources, base += kSources * slot_bytes) {
      if (first > 0) ask(base, slot_bytes, symm.world_size - first, first, symm.rank, own);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (first + i >= symm.world_size) break;
        uint4 v = of[i];
        if (own == nullptr || first + i != symm.rank) {
          v = take(symm, call, base + i * slot_bytes, v,
                   {op, static_cast<uint32_t>(first + i), static_cast<uint32_t>(row)});
        }
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float2 pair = Pair::widen(words[word]);
          sum[2 * word] += pair.x;
          sum[2 * word + 1] += pair.y;
        }
      }
    }
  }
};

}  // namespace flux::exchange
