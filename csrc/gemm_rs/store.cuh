// GEMM+ReduceScatter as a Store policy. A tile of another rank's shard is sent to its owner's slot when it is finished.
// Tiles of the own shard come last, and add the peers' contributions in their epilogue: one launch, no zeroing, one
// rounding of the sum.
//
// Deterministic: partial tiles travel as 16 bits and are summed in fp32 in rank order. This rank's accumulators are not
// rounded, unless the bits of a row must not depend on the rank that owns it (`rounds_own`).
#pragma once

#include "gemm/elements.cuh"
#include "gemm/policy.h"
#include "gemm_rs/plan.h"
#include "runtime/device/sync.cuh"

namespace flux::gemm_rs {

struct SlotStore : gemm::LocalScales {
  struct Params {
    runtime::SymmBuffer symm;
    Layout layout;
    Pace pace;
    uint32_t epoch;  // if copy engines send the tiles: the epoch, which the host counts; else 0
    Chunks chunks;
    char* staging;  // memory in which tiles wait for the copy engine
    int rows_per_shard;
    int n;
    bool rounds_own;
  };
  struct Call : sync::Call {
    int64_t next_send = 0;  // in SM cycles
  };

  static constexpr bool kReduces = true, kGathers = false, kSplitsK = false;

  FLUX_DEVICE static Call begin(const Params& p) {
    Call call = {sync::begin_call(p.symm)};
    if (p.epoch != 0) call.epoch = p.epoch;
    return call;
  }

  // x is local: it contains the rows of all shards, one after the other.
  template <class GemmParams>
  FLUX_DEVICE static gemm::Source source(const GemmParams& params, const Call&, const gemm::Tile& tile) {
    return {&params.a, tile.shard * params.rows_per_shard + tile.m * gemm::kBlockM};
  }

  FLUX_DEVICE static uint32_t* tile_counter(const Params& p) { return &p.symm.header()->next_tile; }

  FLUX_DEVICE static bool is_local(const Params& p, const gemm::Tile& t) { return t.shard == p.symm.rank; }

  // Paces the stores: beyond the bandwidth of the link they back up into the SM and delay the loads of the next
  // mainloop (docs/design/gemm-rs.md#pacing).
  FLUX_DEVICE static void send(const Params& p, Call& call, const gemm::Tile& tile, bool last_wave,
                               int warpgroup, int first_chunk, int num_chunks, uint32_t smem) {
    const int chunks = min(num_chunks, chunks_of(p, tile, warpgroup) - first_chunk);
    if (chunks <= 0) return;
    if (p.epoch != 0) {
      const int slot = runtime::slot_index(tile.shard, p.symm.rank);
      ptx::bulk_store(p.staging + fragment_offset(p, slot, tile, warpgroup, first_chunk), smem,
                      chunks * gemm::kChunkBytes);
      return;
    }
    if (call.aborted) return;
    const int slot = runtime::slot_index(p.symm.rank, tile.shard);
    char* dst = p.symm.slots(tile.shard, call.epoch) + fragment_offset(p, slot, tile, warpgroup, first_chunk);
    const int pace = last_wave ? p.pace.last_wave : p.pace.cycles_per_chunk;
    if (pace == 0) {
      ptx::bulk_store(dst, smem, chunks * gemm::kChunkBytes);
      return;
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      while (clock64() < call.next_send) {
      }
      ptx::bulk_store(dst + chunk * gemm::kChunkBytes, smem + chunk * gemm::kChunkBytes, gemm::kChunkBytes);
      call.next_send = clock64() + pace;
    }
  }

  FLUX_DEVICE static void publish(const Params& p, const Call& call, const gemm::Tile& tile, int warpgroup) {
    if (p.epoch != 0) {
      const int slot = runtime::slot_index(tile.shard, p.symm.rank);
      const int chunk = p.chunks.of(p.layout.tile_index(tile.m, tile.n));
      sync::count(&p.symm.header()->pieces_staged[slot * p.chunks.count + chunk]);
      return;
    }
    if (call.aborted) return;
    const int slot = runtime::slot_index(p.symm.rank, tile.shard);
    sync::signal(p.symm.signal(tile.shard, slot, p.layout.signal_index(tile.m, tile.n, warpgroup)),
                 call.epoch);
  }

  template <class Smem>
  FLUX_DEVICE static void fetch(const Params& p, const Call& call, const gemm::Tile& tile, int warpgroup,
                                const Smem& smem, typename Smem::Pieces& cursor) {
    const int num_peers = p.symm.world_size - 1;
    bool arrived = true;
    for (int slot = 0; slot < num_peers && arrived; ++slot) {
      const uint32_t peer = slot < p.symm.rank ? slot : slot + 1;
      const int word = p.epoch != 0 ? p.chunks.of(p.layout.tile_index(tile.m, tile.n))
                                    : p.layout.signal_index(tile.m, tile.n, warpgroup);
      const uint32_t* signal = p.symm.signal(p.symm.rank, slot, word);
      arrived = sync::wait_signal(
          p.symm, signal, call.epoch,
          {runtime::kGemmRs, peer, static_cast<uint32_t>(p.layout.tile_index(tile.m, tile.n))});
    }
    ptx::mbarrier_arrive(smem.arrived());
    ptx::fence_proxy_async();  // the signal was read by an ordinary load, the data is by bulk copies
    if (!arrived) ptx::store_shared(smem.failed(warpgroup), 1);

    const char* slots = p.symm.slots(p.symm.rank, call.epoch) + fragment_offset(p, 0, tile, warpgroup, 0);
    const int64_t slot_stride = p.layout.tile_offset(1, 0, 0);
    const int chunks = chunks_of(p, tile, warpgroup);
    const int num_pieces = Smem::num_pieces(num_peers);
    for (int chunk = 0; chunk < chunks; chunk += Smem::kPieceChunks, cursor.advance(num_pieces)) {
      const uint32_t full = smem.piece_full(warpgroup, cursor.index);
      ptx::mbarrier_wait(smem.piece_empty(warpgroup, cursor.index), cursor.phase ^ 1);
      if (!arrived) {
        ptx::mbarrier_arrive(full);  // releases the math warps, which will see `failed`
        continue;
      }
      const uint32_t bytes = min(Smem::kPieceChunks, chunks - chunk) * gemm::kChunkBytes;
      ptx::mbarrier_arrive_expect_tx(full, num_peers * bytes);
      uint32_t dst = smem.piece(warpgroup, cursor.index, num_peers);
      const char* src = slots + chunk * gemm::kChunkBytes;
      for (int slot = 0; slot < num_peers; ++slot) {
        ptx::bulk_load(dst, src, bytes, full);
        dst += Smem::kPieceChunks * gemm::kChunkBytes;
        src += slot_stride;
      }
    }
  }

  template <class Element, class Smem, int kAccumulators>
  FLUX_DEVICE static void add_arrived(const Params& p, const gemm::Tile& tile, int warpgroup,
                                      const Smem& smem, typename Smem::Pieces& cursor,
                                      float (&d)[kAccumulators]) {
    constexpr int kPieceChunks = Smem::kPieceChunks;
    constexpr int kPieceAccumulators = kPieceChunks * gemm::kChunkAccumulators;
    const int num_peers = p.symm.world_size - 1;
    const int num_pieces = Smem::num_pieces(num_peers);
    const int chunks = chunks_of(p, tile, warpgroup);
#pragma unroll
    for (int first = 0; first < kAccumulators; first += kPieceAccumulators) {
      if (first / gemm::kChunkAccumulators >= chunks) break;
      ptx::mbarrier_wait(smem.piece_full(warpgroup, cursor.index), cursor.phase);
      // [peer][chunk][thread]. The unused half of an odd last piece is added to accumulators that are not stored.
      const auto* fragments =
          reinterpret_cast<const uint4*>(smem.pointer(smem.piece(warpgroup, cursor.index, num_peers))) +
          threadIdx.x % 128;
      float sum[kPieceAccumulators] = {};
      const auto add_peers = [&](int begin, int end) {
#pragma unroll 2
        for (int slot = begin; slot < end; ++slot) {
#pragma unroll
          for (int chunk = 0; chunk < kPieceChunks; ++chunk) {
            const uint4 v = fragments[(slot * kPieceChunks + chunk) * 128];
            const uint32_t bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 pair = gemm::Pair<Element>::widen(bits[i]);
              sum[chunk * gemm::kChunkAccumulators + 2 * i] += pair.x;
              sum[chunk * gemm::kChunkAccumulators + 2 * i + 1] += pair.y;
            }
          }
        }
      };
      add_peers(0, p.symm.rank);
#pragma unroll
      for (int i = 0; i < kPieceAccumulators; i += 2) {
        if (first + i >= kAccumulators) break;
        float2 own = {d[first + i], d[first + i + 1]};
        if (p.rounds_own) own = gemm::Pair<Element>::widen(gemm::Pair<Element>::round(own.x, own.y));
        sum[i] += own.x;
        sum[i + 1] += own.y;
      }
      add_peers(p.symm.rank, num_peers);
      ptx::mbarrier_arrive(smem.piece_empty(warpgroup, cursor.index));  // by each reader, for racecheck
      cursor.advance(num_pieces);
#pragma unroll
      for (int i = 0; i < kPieceAccumulators; ++i)
        if (first + i < kAccumulators) d[first + i] = sum[i];
    }
    // The tile is about to be written over the pieces: no warp may still be reading one.
    ptx::named_barrier_sync(gemm::kWarpgroupBarrier + warpgroup, 128);
  }

  // Only copies by copy engines go on after a failure.
  FLUX_DEVICE static void check_peers(const Params& p, const Call& call) {
    if (p.epoch != 0) sync::check_peers(p.symm, call, runtime::kGemmRs);
  }

  FLUX_DEVICE static void end(const Params& p, const Call& call) { sync::end_call(p.symm, call.epoch); }

 private:
  // The chunks of a tile that contain data, for one warpgroup. Data beyond the edges of the shard does not travel.
  FLUX_DEVICE static int chunks_of(const Params& p, const gemm::Tile& tile, int warpgroup) {
    if (tile.m * gemm::kBlockM + warpgroup * 64 >= p.rows_per_shard) return 0;
    const int block_n = p.layout.tile_bytes / (gemm::kBlockM * gemm::kResultBytes);
    const int columns = min(block_n, p.n - tile.n * block_n);
    return (columns + gemm::kChunkN - 1) / gemm::kChunkN;
  }

  FLUX_DEVICE static int64_t fragment_offset(const Params& p, int slot, const gemm::Tile& tile, int warpgroup,
                                             int chunk) {
    return p.layout.tile_offset(slot, tile.m, tile.n) + warpgroup * (p.layout.tile_bytes / 2) +
           chunk * gemm::kChunkBytes;
  }
};

}  // namespace flux::gemm_rs
