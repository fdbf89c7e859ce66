// AllGather+GEMM as a Store policy. Own rows are read from x, peers' rows from this rank's slots as they
// arrive, block by block. This rank's rows are pushed by the first CTAs of the launch, before they take part in
// the GEMM, or by copy engines (copy_engine.cc).
#pragma once

#include "ag_gemm/push.cuh"
#include "gemm/policy.h"

namespace flux::ag_gemm {

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

  static constexpr bool kGathers = true;
  static constexpr bool kSplitsK = false;

  FLUX_DEVICE static Call begin(const Params& p) { return begin_gather(p.symm, p.epoch, p.reuse); }
  FLUX_DEVICE static void end(const Params& p, const Call& call) {
    sync::end_call(p.symm, call.epoch, p.reuse);
  }

  FLUX_DEVICE static int num_pushers(const Params& p) { return p.num_pushers; }

  FLUX_DEVICE static void push(const Params& p) {
    static_assert(kPushThreads == 128 * (1 + gemm::kNumMathWarpgroups));
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
  CUtensorMap
      gathered_scales[2];  // block scales: of the two slot buffers, as [(world_size - 1) * k_blocks, rows]
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

}  // namespace flux::ag_gemm
