// AllGather+GEMM as a Store policy. Own rows are read from x, peers' rows from this rank's slots as they arrive. The
// first CTAs of the launch push this rank's rows before they compute, or copy engines do (push_by_copy_engine).
#pragma once

#include "ag_gemm/plan.h"
#include "gemm/policy.h"
#include "operators.h"
#include "runtime/device/copy.cuh"
#include "runtime/device/sync.cuh"

namespace flux::ag_gemm {

constexpr int kPushThreads = gemm::kNumThreads;

// `epoch`: of the call, if the host counts them (copy engines); else 0. `reuse`: the previous call has gathered rows.
FLUX_DEVICE sync::Call begin_gather(const runtime::SymmBuffer& symm, uint32_t epoch, bool reuse) {
  sync::Call call = sync::begin_call(symm);
  if (epoch != 0) {
    call.epoch = epoch;
  } else if (reuse) {
    --call.epoch;
  }
  return call;
}

// Pushes this rank's rows to all peers, in pieces that CTAs draw from a counter. Called by all kPushThreads threads of a
// CTA that is one of `pushers`. All warps but the first copy a piece; meanwhile the first announces the previous one,
// because a release at system scope waits for all stores of the SM. The CTA that completes a block signals it.
template <bool kScales = false>
FLUX_DEVICE void push_rows(const runtime::SymmBuffer& symm, const Layout& layout, const void* own_rows,
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
    // To rank+1, then to rank+2: so no peer receives from all ranks at the same time.
    const Piece piece = pieces.at(drawn[i % 2]);
    const int peer = (symm.rank + 1 + piece.peer) % symm.world_size, row = piece.block * gemm::kBlockM;
    const int slot = runtime::slot_index(symm.rank, peer);
    if (threadIdx.x == 0) {
      drawn[(i + 1) % 2] = draw();
    } else if (threadIdx.x >= 32) {
      const char* src = static_cast<const char*>(own_rows) + static_cast<int64_t>(row) * layout.row_bytes;
      char* const slots = symm.slots(peer, call.epoch);
      const int thread = threadIdx.x - 32;
      if (kScales && piece.bytes == Piece::kScales) {
        auto* const to = reinterpret_cast<float*>(slots + layout.scale_offset(slot));
        const int rows = min(layout.rows - row, gemm::kBlockM);
        for (int i = thread; i < rows * layout.scale_columns; i += kPushThreads - 32) {
          const int column = i / rows, at = row + i % rows;
          to[column * layout.scale_stride() + at] = scales.data[at * scales.step + column * scales.stride];
        }
      } else {
        char* const dst = slots + layout.offset(slot, row);
        runtime::copy_bytes<kPushThreads - 32>(dst + piece.offset, src + piece.offset, piece.bytes, thread);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && piece.bytes != 0) {
      // Orders this CTA's stores before its count, for the CTA that completes it and for the peer that it signals.
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

struct GatherParams {
  CUtensorMap gathered[2];  // the two slot buffers, as [(world_size - 1) * rows, k]
  runtime::SymmBuffer symm;
  Layout layout;
  const void* rows;       // this rank's
  int num_pushers;        // CTAs; 0: copy engines push, or an earlier call has
  int blocks_per_signal;  // of rows; 1 unless copy engines push
  uint32_t epoch;         // if the host counts the epochs (copy engines): the epoch of the call; else 0
  bool reuse;             // use the rows that the previous call has gathered
};

struct GatherStore : gemm::KeepsTiles<GatherParams, sync::Call> {
  using Params = GatherParams;
  using Call = sync::Call;
  static constexpr bool kGathers = true, kSplitsK = false;

  FLUX_DEVICE static Call begin(const Params& p) { return begin_gather(p.symm, p.epoch, p.reuse); }
  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    sync::end_call(p.symm, call.epoch, p.reuse);
  }

  FLUX_DEVICE static int num_pushers(const Params& p) { return p.num_pushers; }

  FLUX_DEVICE static void push(const Params& p) {
    push_rows(p.symm, p.layout, p.rows, begin(p), p.num_pushers);
  }

  // A dynamic schedule, because CTAs that push rows start to compute later than the others.
  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }

  FLUX_DEVICE static bool admit(const Params& p, const Call& call, const gemm::Tile& tile) {
    if (tile.shard == p.symm.rank) return true;
    const int slot = runtime::slot_index(tile.shard, p.symm.rank);
    const uint32_t* signal = p.symm.signal(p.symm.rank, slot, tile.m / p.blocks_per_signal);
    const bool here = sync::wait_signal(
        p.symm, signal, call.epoch,
        {runtime::kAgGemm, static_cast<uint32_t>(tile.shard), static_cast<uint32_t>(tile.m)});
    ptx::fence_proxy_async();  // the signal was read by an ordinary load, the rows are by TMA
    return here;
  }

  // Only copies by copy engines go on after a failure.
  FLUX_DEVICE static void check_peers(const Params& p, const Call& call) {
    if (p.epoch != 0) sync::check_peers(p.symm, call, runtime::kAgGemm);
  }

  template <class GemmParams>
  FLUX_DEVICE static gemm::Source source(const GemmParams& params, const Call& call, const gemm::Tile& tile) {
    const Params& p = params.store;
    const int row = tile.m * gemm::kBlockM;
    if (tile.shard == p.symm.rank) return {&params.a, row};
    return {&p.gathered[call.epoch & 1], runtime::slot_index(tile.shard, p.symm.rank) * p.layout.rows + row};
  }
};

// The same of fp8 rows, whose scales come with them.
struct ScaledGatherParams : GatherParams {
  CUtensorMap gathered_scales[2];  // of blocks, in the two slot buffers: [(world_size - 1) * k_blocks, rows]
  OwnScales scales;
};

struct ScaledGatherStore : GatherStore {
  using Params = ScaledGatherParams;

  FLUX_DEVICE static void push(const Params& p) {
    push_rows<true>(p.symm, p.layout, p.rows, begin(p), p.num_pushers, p.scales);
  }

  template <class GemmParams>
  FLUX_DEVICE static gemm::BlockScaleSource block_scales(const GemmParams& params, const Call& call,
                                                         const gemm::Tile& tile, const gemm::Source& x) {
    const Params& p = params.store;
    if (tile.shard == p.symm.rank) return {&params.scales.x_blocks, x.row, 0};
    const int slot = runtime::slot_index(tile.shard, p.symm.rank);
    return {&p.gathered_scales[call.epoch & 1], tile.m * gemm::kBlockM, slot * p.layout.scale_columns};
  }

  template <class GemmParams>
  FLUX_DEVICE static const float* row_scales(const GemmParams& params, const Call& call,
                                             const gemm::Tile& tile, const gemm::Source& x) {
    const Params& p = params.store;
    if (tile.shard == p.symm.rank)
      return params.scales.x + static_cast<int64_t>(x.row) * params.scales.x_step;
    const char* const slots = p.symm.slots(p.symm.rank, call.epoch);
    const int slot = runtime::slot_index(tile.shard, p.symm.rank);
    return reinterpret_cast<const float*>(slots + p.layout.scale_offset(slot)) +
           place_of_scale(tile.m * gemm::kBlockM, p.scales.step, /*copied=*/p.epoch != 0);
  }
};

// --- for launches: rows by copy engines ---

// Pushes this rank's rows to its peers by copy engines, after the work on `stream`; a signal follows each chunk.
// Enqueued before the launch that waits for them: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue.
// `apart`: copies do not wait for the signals of earlier ones, so the last is complete sooner, and the first signals
// arrive later (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines). `scales`: of the rows, if the layout has them.
void push_by_copy_engine(const runtime::SymmBuffer& symm, const Layout& layout, const void* rows,
                         uint32_t epoch, int chunk_rows, bool apart, cudaStream_t stream,
                         const OwnScales& scales = {});

inline void check_room(const Layout& layout, const runtime::SymmBuffer& symm, const Transport& transport) {
  FLUX_CHECK(layout.slot_bytes() <= symm.slot_bytes, layout.slot_bytes(), symm.slot_bytes);
  FLUX_CHECK(layout.num_signals() * 4 <= symm.signal_bytes, layout.num_signals(), symm.signal_bytes);
  FLUX_CHECK(transport.copy_epoch != 0 || layout.num_signals() <= runtime::kMaxPushBlocks,
             layout.num_signals());
}

}  // namespace flux::ag_gemm
