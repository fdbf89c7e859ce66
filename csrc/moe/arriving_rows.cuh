// Tokens of all ranks as Rows of a grouped GEMM: own ones are read where the user has them, those of peers from
// this rank's slots as they arrive. The first CTAs of the launch send this rank's tokens before they compute.
//
// A call ends only after the first block of every peer has arrived, needed or not: with expert parallelism a rank
// may need nothing from a peer, and without hearing from it could get two calls ahead, into buffers that the peer
// still reads.
#pragma once

#include "moe/job_queue.cuh"
#include "moe/plan.h"
#include "runtime/device/copy.cuh"
#include "runtime/device/sync.cuh"

namespace flux::moe {

struct ArrivingRows {
  struct Params {
    runtime::SymmBuffer symm;
    Layout layout;
    const char* x;
    int row_bytes;
    const int32_t* rows;      // [max_rows]: source * max_tokens + slot row
    const int32_t* received;  // [world_size]: slot rows that each source sends
    const int32_t* outgoing;  // [ep_size][max_tokens]: token of each slot row that this rank sends to a slice
    const int32_t* sending;   // [ep_size]: how many
    int num_pushers;
  };
  using Call = sync::Call;
  static constexpr uint32_t kOp = 7;
  static constexpr bool kInOrder = false, kArrive = true, kCombine = false;

  FLUX_DEVICE static Call begin(const Params& p) { return sync::begin_call(p.symm); }
  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }
  FLUX_DEVICE static int num_pushers(const Params& p) { return p.num_pushers; }

  // Slots of peers, and own tokens where the user has them.
  FLUX_DEVICE static Sources sources(const Params& p, const Call& call) {
    return {p.symm.slots(p.symm.rank, call.epoch), p.x};
  }
  FLUX_DEVICE static int place(const Params& p, int row) {
    const int found = p.rows[row], source = found / p.layout.max_tokens;
    const int slot_row = found - source * p.layout.max_tokens;
    if (source == p.symm.rank) return ~slot_row;
    return Layout::slot_index(source, p.symm.rank) * p.layout.max_tokens + slot_row;
  }

  // Whole blocks, all to rank+1, then all to rank+2: no peer is sent to by all at a time, and everybody
  // gets blocks in the order in which tiles need them.
  FLUX_DEVICE static void push(const Params& p, const Call& call) {
    __shared__ int drawn;
    const Layout& layout = p.layout;
    const int max_blocks = layout.max_blocks(), units = (layout.world_size - 1) * max_blocks;
    while (true) {
      if (threadIdx.x == 0) {
        drawn = call.aborted ? units : static_cast<int>(atomicAdd(&p.symm.header()->next_piece, 1u));
      }
      __syncthreads();
      const int unit = drawn;
      __syncthreads();
      if (unit >= units) return;
      const int peer = (p.symm.rank + 1 + unit / max_blocks) % layout.world_size;
      const int block = unit % max_blocks, to = layout.slice_of(peer);
      const int count = p.sending[to];
      if (block >= Layout::blocks_of(count)) continue;
      const int slot = Layout::slot_index(p.symm.rank, peer);
      const int last = min(count, (block + 1) * kBlockRows);
      char* const area =
          p.symm.slots(peer, call.epoch) + static_cast<int64_t>(slot) * layout.max_tokens * p.row_bytes;
      for (int row = block * kBlockRows + threadIdx.x / 32; row < last; row += blockDim.x / 32) {
        const int token = p.outgoing[to * layout.max_tokens + row];
        if (token < 0) continue;  // without expert parallelism a token that nobody needs has a row too
        runtime::copy_bytes<32>(area + static_cast<int64_t>(row) * p.row_bytes,
                                p.x + static_cast<int64_t>(token) * p.row_bytes, p.row_bytes, ptx::lane());
      }
      __syncthreads();
      if (threadIdx.x == 0) sync::publish(p.symm.signal(peer, slot, block), call.epoch);
    }
  }

  // What has arrived for sure, as a CTA knows: all steps before this one, and so many blocks of it.
  struct Progress {
    int step = 1, blocks = 0;
  };

  // Everything up to the block of the tile's last row: blocks arrive in the order (step, block), but each of them is
  // asked for, because different CTAs send them. A load takes half a microsecond, so each lane asks for others.
  FLUX_DEVICE static bool admit(const Params& p, const Call& call, Progress& progress, int last_row) {
    const int found = p.rows[last_row], last_source = found / p.layout.max_tokens;
    const int slot_row = found - last_source * p.layout.max_tokens;
    const int step = p.layout.step_of(last_source);
    bool here = true;
    for (; progress.step <= step; ++progress.step, progress.blocks = 0) {
      const int source = p.layout.source_at(progress.step);
      const int blocks =
          progress.step == step ? slot_row / kBlockRows + 1 : Layout::blocks_of(p.received[source]);
      for (int block = progress.blocks + ptx::lane(); block < blocks; block += 32) {
        here &= wait(p, call, source, block);
      }
      if (progress.step == step) {
        progress.blocks = max(progress.blocks, blocks);
        break;
      }
    }
    return here;
  }

  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    for (int source = 0; source < p.layout.world_size; ++source) {
      if (source != p.symm.rank) wait(p, call, source, 0);
    }
    sync::end_call(p.symm, call.epoch);
  }

 private:
  FLUX_DEVICE static bool wait(const Params& p, const Call& call, int source, int block) {
    const int slot = Layout::slot_index(source, p.symm.rank);
    return sync::wait_signal(p.symm, p.symm.signal(p.symm.rank, slot, block), call.epoch,
                             {kOp, static_cast<uint32_t>(source), static_cast<uint32_t>(block)});
  }
};

}  // namespace flux::moe
