// Layer 0 as a Rows policy of the grouped GEMM: the rows are the tokens of all ranks. Own tokens are read from x,
// peers' tokens from this rank's slots as they arrive. The first CTAs of the launch send this rank's tokens before
// they compute, in the order in which experts need them (SendOrder).
//
// A call ends only after the first signal of every peer has arrived: with expert parallelism a rank that needs no token
// of a peer could get two calls ahead, and write to buffers that the peer still reads.
#pragma once

#include "moe/plan.h"
#include "runtime/device/copy.cuh"
#include "runtime/device/sync.cuh"

namespace flux::moe {

struct ArrivingRows {
  struct Params {
    runtime::SymmBuffer symm;
    Layout layout;
    SendOrder order;
    const char* x;
    int row_bytes;
    const int32_t* rows;    // [max_rows]: source * max_tokens + slot row
    const int32_t* sent;    // [ep_size][max_tokens]: slot row of each own token at a slice
    const int32_t* firsts;  // [ep_size][max_tokens]: first expert of a slice that chose each own token, or -1
    int num_pushers;
  };
  using Call = sync::Call;
  static constexpr bool kInOrder = false, kArrive = true, kCombine = false;

  FLUX_DEVICE static Call begin(const Params& p) { return sync::begin_call(p.symm); }
  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }
  FLUX_DEVICE static int num_pushers(const Params& p) { return p.num_pushers; }

  FLUX_DEVICE static Sources sources(const Params& p, const Call& call) {
    return {p.symm.slots(p.symm.rank, call.epoch), p.x};
  }
  FLUX_DEVICE static int place(const Params& p, int row) {
    const int found = p.rows[row], source = found / p.layout.max_tokens;
    const int slot_row = found - source * p.layout.max_tokens;
    if (source == p.symm.rank) return ~slot_row;
    return runtime::slot_index(source, p.symm.rank) * p.layout.max_tokens + slot_row;
  }

  FLUX_DEVICE static void push(const Params& p, const Call& call, void* memory) {
    push_tokens(p, call, memory, p.row_bytes, [&](char* to, int token) { copy_token(p, to, token); });
  }

  // Called by a warp.
  FLUX_DEVICE static void copy_token(const Params& p, char* to, int token) {
    runtime::copy_bytes<32, 16>(to, p.x + static_cast<int64_t>(token) * p.row_bytes, p.row_bytes,
                                ptx::lane());
  }

  // copy(to, token): called by a warp, copies a token to its slot row; slot rows have `slot_row_bytes`.
  template <class Copy>
  FLUX_DEVICE static void push_tokens(const Params& p, const Call& call, void* memory, int slot_row_bytes,
                                      const Copy& copy) {
    constexpr int kMostTokens = kUnitRows * kMaxShares;  // maximum of SendOrder::part_tokens
    // `drawn` and `count` are double-buffered: the first warp starts the next unit before the others finish this one.
    struct Unit {
      int drawn[2], count[2], tokens[kMostTokens], slot_rows[kMostTokens];
    };
    auto& [drawn, count, tokens, slot_rows] = *static_cast<Unit*>(memory);
    const SendOrder& order = p.order;
    const int units = order.units();
    const auto draw = [&] { return static_cast<int>(atomicAdd(&p.symm.header()->next_piece, 1u)); };
    int next = threadIdx.x != 0 ? 0 : call.aborted ? units : draw();
    uint32_t* stored = nullptr;  // signal of the previous unit, published while this unit is copied
    for (int turn = 0;; turn ^= 1) {
      if (threadIdx.x == 0) {
        drawn[turn] = next;
        count[turn] = 0;
      }
      __syncthreads();
      const int index = drawn[turn];
      const SendUnit unit = order.at(index);
      if (index < units && static_cast<int>(threadIdx.x) < order.part_tokens) {
        const int token = unit.part * order.part_tokens + static_cast<int>(threadIdx.x);
        if (token < p.layout.max_tokens) {
          const int64_t at = static_cast<int64_t>(p.layout.slice_of(unit.peer)) * p.layout.max_tokens + token;
          const int first = p.firsts[at], slot_row = p.sent[at];
          if (first >= order.begin(unit.share) && first < order.ends[unit.share]) {
            const int i = atomicAdd(&count[turn], 1);
            tokens[i] = token;
            slot_rows[i] = slot_row;
          }
        }
      }
      __syncthreads();
      if (threadIdx.x == 0 && stored != nullptr) sync::publish(stored, call.epoch);
      if (index >= units) return;
      const int slot = runtime::slot_index(p.symm.rank, unit.peer);
      if (threadIdx.x == 0) {
        stored = p.symm.signal(unit.peer, slot, order.signal(unit.share, unit.part));
        next = draw();
      } else if (threadIdx.x >= 32) {
        char* const slots = p.symm.slots(unit.peer, call.epoch) +
                            static_cast<int64_t>(slot) * p.layout.max_tokens * slot_row_bytes;
        for (int i = threadIdx.x / 32 - 1; i < count[turn]; i += blockDim.x / 32 - 1)
          copy(slots + static_cast<int64_t>(slot_rows[i]) * slot_row_bytes, tokens[i]);
      }
    }
  }

  struct Progress {
    int signals = 0;
  };

  // A tile with only own tokens does not wait. Any other waits for its expert's share of all peers' tokens. Each lane
  // polls different signals, to overlap their latency.
  FLUX_DEVICE static bool admit(const Params& p, const Call& call, Progress& progress, int expert,
                                int last_row) {
    if (p.rows[last_row] / p.layout.max_tokens == p.symm.rank) return true;
    const int peers = p.layout.world_size - 1;
    const int needed = (p.order.share_of(expert) + 1) * p.order.parts;
    bool here = true;
    for (int i = progress.signals * peers + static_cast<int>(ptx::lane()); i < needed * peers; i += 32)
      here &= wait(p, call, i % peers, i / peers);
    progress.signals = max(progress.signals, needed);
    return here;
  }

  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    for (int slot = 0; slot < p.layout.world_size - 1; ++slot) wait(p, call, slot, 0);
    sync::end_call(p.symm, call.epoch);
  }

 private:
  FLUX_DEVICE static bool wait(const Params& p, const Call& call, int slot, int signal) {
    const uint32_t source = slot < p.symm.rank ? slot : slot + 1;
    return sync::wait_signal(p.symm, p.symm.signal(p.symm.rank, slot, signal), call.epoch,
                             {runtime::kAgScatterGemm, source, static_cast<uint32_t>(signal)});
  }
};

// The same of fp8 tokens, whose scales come with them: each has its own, if only because ranks may have others.
struct ScaledArrivingRows : ArrivingRows {
  struct Params : ArrivingRows::Params {
    const float* scales;  // of own tokens: of token i in k-block b at scales[i * step + b * stride]
    int step;
    int64_t stride;
    int columns;
    int slot_row_bytes;
  };

  FLUX_DEVICE static int first_row_bytes(const Params& p) { return p.slot_row_bytes; }
  FLUX_DEVICE static RowScales scales(const Params& p, const Call& call, int place) {
    const int64_t many = p.columns > 1;
    if (place < 0) return {p.scales + static_cast<int64_t>(~place) * p.step, many * p.stride};
    const char* const row =
        p.symm.slots(p.symm.rank, call.epoch) + static_cast<int64_t>(place) * p.slot_row_bytes;
    return {reinterpret_cast<const float*>(row + p.row_bytes), many};
  }

  FLUX_DEVICE static void push(const Params& p, const Call& call, void* memory) {
    push_tokens(p, call, memory, p.slot_row_bytes, [&](char* to, int token) {
      copy_token(p, to, token);
      auto* const scales = reinterpret_cast<float*>(to + p.row_bytes);
      for (int column = ptx::lane(); column < p.columns; column += 32)
        scales[column] = p.scales[static_cast<int64_t>(token) * p.step + column * p.stride];
    });
  }
};

}  // namespace flux::moe
