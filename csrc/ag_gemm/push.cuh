// How CTAs send this rank's rows to all peers: pieces go through shared memory, in and out by bulk copies. Pieces
// are drawn from a counter, so any number of CTAs is enough, and waits for nobody.
//
// Many CTAs write one block of rows. Whoever completes it announces it, so that each signal has one writer and
// stays an epoch.
//
// Two slot buffers, chosen by the parity of the epoch, need no closing barrier: this rank finishes call e-1 only
// after every peer has started e-1, that is finished e-2, so nobody reads buffer e mod 2 when call e begins to
// write it.
#pragma once

#include "ag_gemm/plan.h"
#include "runtime/device/sync.cuh"

namespace flux::ag_gemm {

constexpr int kPieceBytes = 16384;
constexpr int kPushWarps = 12;

// The shared memory that the CTA has for it.
struct PushSmem {
  uint32_t data;
  uint32_t barriers;
  int num_pieces;
};

// All threads of a CTA.
__device__ __forceinline__ void push_rows(const runtime::SymmBuffer& symm, const Layout& layout,
                                          const void* rows, const sync::Call& call, const PushSmem& smem) {
  const int warp = threadIdx.x / 32;
  // Calls behind one that ran out of time send nothing: they no longer wait for their peers, so a peer that is
  // merely late may be two calls behind and would find its buffers overwritten.
  if (ptx::lane() == 0 && warp < smem.num_pieces && warp < kPushWarps && !call.aborted) {
    const uint32_t buffer = smem.data + warp * kPieceBytes;
    const uint32_t loaded = smem.barriers + warp * sizeof(uint64_t);
    ptx::mbarrier_init(loaded, 1);
    ptx::fence_mbarrier_init();
    runtime::Header* header = symm.header();
    const int64_t block_bytes = static_cast<int64_t>(gemm::kBlockM) * layout.row_bytes;
    const int pieces_per_block = static_cast<int>((block_bytes + kPieceBytes - 1) / kPieceBytes);
    const int num_blocks = layout.num_signals();
    const auto draw = [&] { return static_cast<int>(atomicAdd(&header->next_piece, 1u)); };
    uint32_t phase = 0;
    // All blocks to rank+1, then all to rank+2: no peer is sent to by all at a time.
    for (int drawn = draw(); drawn / pieces_per_block < num_blocks;) {
      const int index = drawn / pieces_per_block;
      const int offset = drawn % pieces_per_block * kPieceBytes;
      const int peer = (symm.rank + 1 + index / layout.row_blocks()) % symm.world_size;
      const int block = index % layout.row_blocks();
      const int row = block * gemm::kBlockM;
      const int num_bytes = min(gemm::kBlockM, layout.rows - row) * layout.row_bytes;
      drawn = draw();
      if (offset >= num_bytes) continue;
      const uint32_t bytes = min(kPieceBytes, num_bytes - offset);
      const char* src =
          static_cast<const char*>(rows) + static_cast<int64_t>(row) * layout.row_bytes + offset;
      ptx::mbarrier_arrive_expect_tx(loaded, bytes);
      ptx::bulk_load(buffer, src, bytes, loaded);
      ptx::mbarrier_wait(loaded, phase);
      phase ^= 1;
      const int slot = Layout::slot_index(symm.rank, peer);
      ptx::bulk_store(symm.slots(peer, call.epoch) + layout.offset(slot, row) + offset, buffer, bytes);
      ptx::bulk_commit();
      ptx::bulk_wait_complete();
      // Everything pushed before a count is visible to whoever sees the count, and to whoever it then signals.
      ptx::fence_proxy_async();
      __threadfence_system();
      const uint32_t num_pieces = (num_bytes + kPieceBytes - 1) / kPieceBytes;
      if (atomicAdd(&header->pieces_pushed[index], 1u) == num_pieces - 1) {
        header->pieces_pushed[index] = 0;
        __threadfence_system();
        sync::signal(symm.signal(peer, slot, block), call.epoch);
      }
    }
    ptx::mbarrier_invalidate(loaded);
  }
  __syncthreads();
}

}  // namespace flux::ag_gemm
