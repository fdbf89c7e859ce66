// GEMM+AllReduce with ordinary tiles, as a Store policy. Rows of a finished tile are sent to the ranks that sum
// them. After its last tile, every CTA sums the contributions of all ranks (gemm/finish.cuh). One launch, for more
// rows than swap-AB tiles serve well. The local product is never stored to global memory.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/named_barriers.h"
#include "gemm/policy.h"
#include "gemm/sm90/epilogue.cuh"

namespace flux::gemm_ar {

template <bool kSplit>
struct ExchangeStore : gemm::FixedTiles<gemm::ExchangeParams, sync::Call> {
  using Params = gemm::ExchangeParams;
  using Call = sync::Call;

  static constexpr bool kSplitsK = kSplit;
  static constexpr bool kExchanges = true;
  static constexpr int kThreads = 128 * gemm::kNumMathWarpgroups;

  FLUX_DEVICE static Call begin(const Params& p) { return gemm::begin_exchange(p.symm); }
  FLUX_DEVICE static gemm::Shares draw_shares(const Params& p) { return gemm::draw_shares(p.symm); }
  FLUX_DEVICE static void end(const Params& p, const Call& call) { gemm::end_exchange(p.symm, call.epoch); }

  // Stages the half tile in the slabs, which hold all of it, so that adjacent threads send adjacent vectors.
  template <class Element, class Smem, int kSums>
  FLUX_DEVICE static void contribute(const Params& p, const Call& call, const gemm::Tile& tile,
                                     const Smem& smem, int warpgroup, int thread, int first_chunk,
                                     int end_chunk, const float (&sums)[kSums]) {
    constexpr gemm::TileConfig kTile = Smem::kTile;
    constexpr int kPanelN = gemm::panel_n(kTile);
    constexpr int kChunkVectors = gemm::kChunkN / gemm::kVector;
    static_assert(kTile.slab_n * kTile.slabs >= kTile.block_n && kTile.slab_n % kPanelN == 0);
    const uint32_t slabs = smem.slab(warpgroup, 0);
    const int barrier = gemm::kWarpgroupBarrier + warpgroup;
    ptx::named_barrier_sync(barrier, 128);  // no thread still reads the previous tile
#pragma unroll
    for (int i = 0; i < kSums / gemm::kChunkAccumulators; ++i) {
      if (first_chunk + i >= end_chunk) break;
      gemm::stage_rows<kPanelN>(slabs, first_chunk + i, thread,
                                gemm::pack<Element>(&sums[i * gemm::kChunkAccumulators]));
    }
    ptx::named_barrier_sync(barrier, 128);
    const int first_row = tile.m * gemm::kBlockM + warpgroup * 64;
    const int rows = min(p.exchange.m - first_row, 64);
    const int vectors = (end_chunk - first_chunk) * kChunkVectors;
    for (int i = thread; i < rows * vectors; i += 128) {
      const int row = i / vectors, vector = first_chunk * kChunkVectors + i % vectors;
      const int column = tile.n * kTile.block_n + vector * gemm::kVector;
      if (column >= p.exchange.n) continue;
      const auto* staged = smem.pointer(gemm::staged_vector<kPanelN>(slabs, row, vector));
      exchange::contribute(p.symm, p.exchange, call, first_row + row, column,
                           *reinterpret_cast<const uint4*>(staged));
    }
  }

  template <class Element>
  FLUX_DEVICE static void finish(const Params& p, const Call& call, int thread, const gemm::Shares& shares,
                                 const gemm::SpareMemory& spare) {
    gemm::finish<Element, kThreads>(p, call, thread, shares, spare);
  }
};

}  // namespace flux::gemm_ar
