// Which CTAs of a launch sum, and what. A sum has as many shares as its launch has CTAs.
//
// Another kernel may hold SMs, so no CTA may wait before all have sent what others wait for. A CTA that has loaded its
// tiles stays to sum if it sees that all CTAs have begun, as the last to begin does; else it leaves, and one that has
// not begun gets its SM. CTAs that stay draw the shares of all, before they wait.
#pragma once

#include "gemm/tile_config.h"
#include "runtime/device/sync.cuh"

namespace flux::gemm {

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

// Where the thread that draws shares leaves them for the threads that sum: an mbarrier, then two words of shared memory.
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

}  // namespace flux::gemm
