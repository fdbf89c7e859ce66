// Signals between ranks. These functions contain the whole memory model of the library.
//
// A signal is an epoch: a u32 that only grows, so nothing is ever reset. `signal` makes data visible before the epoch;
// `wait_signal` reads the epoch before the data. Every wait has a deadline: a dead peer must not hang the GPU.
#pragma once

#include "runtime/device/ptx.cuh"
#include "runtime/symm_buffer.h"

namespace flux::sync {

// Called by one thread after its bulk copies are complete (ptx::bulk_wait_complete), which makes them visible to it.
// The proxy fence orders them before the following store, and the release at system scope publishes both.
FLUX_DEVICE void signal(uint32_t* address, uint32_t epoch) {
  ptx::fence_proxy_async();
  ptx::store_release_sys(address, epoch);
}

// The same for ordinary stores: called by one thread after a barrier with the threads that have stored.
FLUX_DEVICE void publish(uint32_t* address, uint32_t epoch) { ptx::store_release_sys(address, epoch); }

// As `signal`, for a counter on which a stream waits: every finished piece of the data adds one.
FLUX_DEVICE void count(uint32_t* address) {
  ptx::fence_proxy_async();
  ptx::add_release_sys(address, 1);
}

// Whether `seen` signals `epoch`. A live sender is in this call or in the next one; any other value is stale.
FLUX_DEVICE bool reached(uint32_t seen, uint32_t epoch) { return seen - epoch <= 1; }

// The state of a call in every thread of its launch: its epoch, and whether an earlier call on this rank timed out. Then
// it sends nothing: the rank no longer waits, so a late peer may be two calls behind, and its buffers in use.
struct Call {
  uint32_t epoch;
  bool aborted;
};

FLUX_DEVICE Call begin_call(const runtime::SymmBuffer& symm) {
  const runtime::Header* header = symm.header();
  return {ptx::load_relaxed(&header->epoch) + 1, ptx::load_relaxed(&header->aborted) != 0};
}

struct WaitInfo {
  uint32_t op, peer, tile;
};

// The first failure wins. The code is written last, so that a host that reads it also sees the other fields.
FLUX_DEVICE bool record(const runtime::SymmBuffer& symm, runtime::Failure failure, WaitInfo info,
                        uint32_t expected, uint32_t seen) {
  if (atomicCAS(&symm.header()->aborted, 0u, 1u) != 0) return false;
  runtime::ErrorRecord* record = symm.error;
  record->op = info.op;
  record->rank = symm.rank;
  record->peer = info.peer;
  record->tile = info.tile;
  record->expected = expected;
  record->seen = seen;
  __threadfence_system();
  ptx::store_release_sys(&record->code, static_cast<uint32_t>(failure));
  return true;
}

// Also tells the peers before this launch ends. Later calls of this rank send nothing, but copies by copy engines are
// already enqueued, and may overwrite what a late peer still reads.
inline __device__ __noinline__ void report(const runtime::SymmBuffer& symm, runtime::Failure failure,
                                           WaitInfo info, uint32_t expected, uint32_t seen) {
  if (!record(symm, failure, info, expected, seen)) return;
  for (int peer = 0; peer < symm.world_size; ++peer) {
    if (peer == symm.rank) continue;
    ptx::store_release_sys(&reinterpret_cast<runtime::Header*>(symm.peers[peer])->gave_up, symm.rank + 1);
  }
}

// Called by one thread of each CTA, after all its threads have read the epoch and its last tile has been drawn. The
// last CTA closes the call, and calls `reset` for further state that the next call must find at zero: before its work
// is complete, which hides two fences and two atomics (docs/design/decode.md#what-made-the-sum-faster). The next launch
// reads the epoch only after this one has ended. `repeats`: the call has the epoch of the previous one.
//
// Two launches at once (branches of a graph, or graphs on two streams) corrupt each other. That is recorded: the second
// to close an epoch finds it closed, or CTAs of the first among its own.
template <class Reset>
FLUX_DEVICE void end_call(const runtime::SymmBuffer& symm, uint32_t epoch, Reset reset,
                          bool repeats = false) {
  runtime::Header* header = symm.header();
  __threadfence();
  const uint32_t done = atomicAdd(&header->ctas_done, 1u), others = gridDim.x - 1;
  if (done < others) return;
  header->ctas_done = 0;
  header->next_tile = 0;
  header->next_piece = 0;
  reset();
  __threadfence();
  const bool closed = atomicExch(&header->epoch, epoch) == epoch && !repeats;
  // Inlined: ptxas fails if threads with different numbers of registers (setmaxnreg) call one function.
  if (closed || done > others) record(symm, runtime::Failure::kOverlap, {0, 0, 0}, epoch, epoch);
}

FLUX_DEVICE void end_call(const runtime::SymmBuffer& symm, uint32_t epoch, bool repeats = false) {
  end_call(symm, epoch, [] {}, repeats);
}

// Called by one thread that has read all that copy engines deliver: has a peer that failed overwritten it?
FLUX_DEVICE void check_peers(const runtime::SymmBuffer& symm, const Call& call, uint32_t op) {
  const uint32_t peer = ptx::load_acquire_sys(&symm.header()->gave_up);
  if (peer == 0) return;
  report(symm, runtime::Failure::kPeerGaveUp, {op, peer - 1, 0}, call.epoch, call.epoch);
}

// Called by one thread. True: what the sender wrote before `signal(address, epoch)` is visible to ordinary loads of this
// thread, and of threads that it then synchronises with. False: a deadline has passed on this rank.
FLUX_DEVICE bool wait_signal(const runtime::SymmBuffer& symm, const uint32_t* address, uint32_t epoch,
                             WaitInfo info) {
  uint32_t seen = ptx::load_acquire_sys(address);
  if (reached(seen, epoch)) return true;
  const uint64_t start = ptx::globaltimer_ns();
  while (ptx::load_relaxed(&symm.header()->aborted) == 0) {
    for (int poll = 0; poll < 1024; ++poll) {
      seen = ptx::load_acquire_sys(address);
      if (reached(seen, epoch)) return true;
    }
    if (ptx::globaltimer_ns() - start > symm.timeout_ns) {
      report(symm, runtime::Failure::kTimeout, info, epoch, seen);
      return false;
    }
  }
  return false;
}

}  // namespace flux::sync
