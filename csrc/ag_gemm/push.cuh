// Pushes this rank's rows to all peers, in pieces that CTAs draw from a counter. Any number of CTAs is enough,
// and no CTA waits for another one.
//
// All warps of a CTA except the first copy a piece. Meanwhile the first warp announces the previous piece,
// because a release at system scope waits for all stores of the SM. If each warp announced its own stores, the
// warps would wait for each other's stores.
//
// Several CTAs write one block of rows. The CTA that completes the block signals it, so each signal has one writer.
#pragma once

#include "ag_gemm/plan.h"
#include "runtime/device/copy.cuh"
#include "runtime/device/sync.cuh"

namespace flux::ag_gemm {

constexpr int kPushThreads = 384;

// `epoch`: if the host counts the epochs (copy engines), the epoch of the call; else 0. `reuse`: the call reads the rows
// that the previous one has gathered.
FLUX_DEVICE sync::Call begin_gather(const runtime::SymmBuffer& symm, uint32_t epoch, bool reuse) {
  sync::Call call = sync::begin_call(symm);
  if (epoch != 0) {
    call.epoch = epoch;
  } else if (reuse) {
    --call.epoch;
  }
  return call;
}

// Called by kThreads threads: sends the scales of a block of rows to a slot's place for scales.
template <int kThreads>
FLUX_DEVICE void push_scales(const Layout& layout, const OwnScales& scales, int first_row, float* slot,
                             int thread) {
  const int rows = min(layout.rows - first_row, gemm::kBlockM);
  for (int i = thread; i < rows * layout.scale_columns; i += kThreads) {
    const int column = i / rows, row = first_row + i % rows;
    slot[column * layout.scale_stride() + row] = scales.data[row * scales.step + column * scales.stride];
  }
}

// Called by all kPushThreads threads of a CTA that is one of `pushers`.
template <bool kScales = false>
FLUX_DEVICE void push_rows(const runtime::SymmBuffer& symm, const Layout& layout, const void* rows,
                           const sync::Call& call, int pushers,
                           [[maybe_unused]] const OwnScales& scales = {}) {
  __shared__ int drawn[2];
  runtime::Header* header = symm.header();
  const Pieces pieces = make_pieces(layout, piece_bytes(layout, pushers), kScales);
  const int num_pieces = pieces.count(symm.world_size - 1);
  const auto draw = [&] { return static_cast<int>(atomicAdd(&header->next_piece, 1u)); };
  if (threadIdx.x == 0) drawn[0] = call.aborted ? num_pieces : draw();
  __syncthreads();
  for (int i = 0;; ++i) {
    if (drawn[i % 2] >= num_pieces) break;
    // All blocks to rank+1, then all to rank+2: so no peer receives from all ranks at the same time.
    const Piece piece = pieces.at(drawn[i % 2]);
    const int peer = (symm.rank + 1 + piece.peer) % symm.world_size, row = piece.block * gemm::kBlockM;
    const int slot = runtime::slot_index(symm.rank, peer);
    if (threadIdx.x == 0) {
      drawn[(i + 1) % 2] = draw();
    } else if (threadIdx.x >= 32) {
      const char* src = static_cast<const char*>(rows) + static_cast<int64_t>(row) * layout.row_bytes;
      char* const slots = symm.slots(peer, call.epoch);
      const int thread = threadIdx.x - 32;
      if (kScales && piece.bytes == Piece::kScales) {
        auto* const to = reinterpret_cast<float*>(slots + layout.scale_offset(slot));
        push_scales<kPushThreads - 32>(layout, scales, row, to, thread);
      } else {
        char* const dst = slots + layout.offset(slot, row);
        runtime::copy_bytes<kPushThreads - 32>(dst + piece.offset, src + piece.offset, piece.bytes, thread);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && piece.bytes != 0) {
      // Orders this CTA's stores before its count: they are visible to the CTA that reads the full count, and to the
      // peer that this CTA then signals.
      __threadfence_system();
      uint32_t* const pushed = &header->pieces_pushed[piece.peer * layout.row_blocks() + piece.block];
      if (atomicAdd(pushed, 1u) == pieces.of_block(piece.block) - 1u) {
        *pushed = 0;
        __threadfence_system();
        sync::signal(symm.signal(peer, slot, piece.block), call.epoch);
      }
    }
  }
}

}  // namespace flux::ag_gemm
