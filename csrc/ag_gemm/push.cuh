// Pushes this rank's rows to all peers, in pieces that CTAs draw from a counter. Any number of CTAs is enough,
// and no CTA waits for another one.
//
// All warps of a CTA except the first copy a piece. Meanwhile the first warp announces the previous piece,
// because a release at system scope waits for all stores of the SM. If each warp announced its own stores, the
// warps would wait for each other's stores.
//
// Several CTAs write one block of rows. The CTA that completes the block signals it, so each signal has one writer.
//
// The two slot buffers, selected by the parity of the epoch, need no closing barrier: this rank finishes call
// e-1 only after every peer has started e-1, and so has finished e-2. So no rank reads buffer e mod 2 when call
// e starts to write it.
#pragma once

#include "ag_gemm/plan.h"
#include "runtime/device/copy.cuh"
#include "runtime/device/sync.cuh"

namespace flux::ag_gemm {

constexpr int kPushThreads = 384;

// Called by all kPushThreads threads of a CTA that is one of `pushers`.
__device__ __forceinline__ void push_rows(const runtime::SymmBuffer& symm, const Layout& layout,
                                          const void* rows, const sync::Call& call, int pushers) {
  __shared__ int drawn[2];
  runtime::Header* header = symm.header();
  const int piece_bytes = ag_gemm::piece_bytes(layout, pushers);
  const int64_t block_bytes = static_cast<int64_t>(gemm::kBlockM) * layout.row_bytes;
  const int pieces_per_block = static_cast<int>((block_bytes + piece_bytes - 1) / piece_bytes);
  const int num_pieces = layout.num_signals() * pieces_per_block;
  const auto draw = [&] { return static_cast<int>(atomicAdd(&header->next_piece, 1u)); };
  // Calls after a timed-out one send nothing: they no longer wait for their peers, so a late peer may be two calls
  // behind and would find its buffers overwritten.
  if (threadIdx.x == 0) drawn[0] = call.aborted ? num_pieces : draw();
  __syncthreads();
  for (int i = 0;; ++i) {
    const int piece = drawn[i % 2];
    if (piece >= num_pieces) break;
    // All blocks to rank+1, then all to rank+2: no peer is sent to by all at a time.
    const int index = piece / pieces_per_block, offset = piece % pieces_per_block * piece_bytes;
    const int peer = (symm.rank + 1 + index / layout.row_blocks()) % symm.world_size;
    const int block = index % layout.row_blocks(), row = block * gemm::kBlockM;
    const int slot = Layout::slot_index(symm.rank, peer);
    const int num_bytes = min(gemm::kBlockM, layout.rows - row) * layout.row_bytes;
    if (threadIdx.x == 0) {
      drawn[(i + 1) % 2] = draw();
    } else if (threadIdx.x >= 32) {
      const char* src = static_cast<const char*>(rows) + static_cast<int64_t>(row) * layout.row_bytes;
      runtime::copy_bytes<kPushThreads - 32>(symm.slots(peer, call.epoch) + layout.offset(slot, row) + offset,
                                             src + offset, min(piece_bytes, num_bytes - offset),
                                             threadIdx.x - 32);
    }
    __syncthreads();
    if (threadIdx.x == 0 && offset < num_bytes) {
      // Everything pushed before a count is visible to whoever sees the count, and to whoever it then signals.
      __threadfence_system();
      const uint32_t pieces = (num_bytes + piece_bytes - 1) / piece_bytes;
      if (atomicAdd(&header->pieces_pushed[index], 1u) == pieces - 1) {
        header->pieces_pushed[index] = 0;
        __threadfence_system();
        sync::signal(symm.signal(peer, slot, block), call.epoch);
      }
    }
  }
}

}  // namespace flux::ag_gemm
