// Who computes what next. The loader of a cluster's first CTA draws the next index of the tile order, just
// before it has loaded the last of the tile in hand, and passes it on to every role of every CTA of the
// cluster through a short queue in shared memory.
//
// Drawing from a counter in global memory instead of a fixed stride matters when tiles leave over a link: the
// link serves the SMs unevenly, an SM whose stores wait also loads late, and with equal shares the unluckiest
// SM would decide the time (docs/design/gemm-rs.md: the median SM was done 76 of 517 us before the last).
// Drawing late matters too: an index drawn long before its turn is a remote tile that others wait for (599 us
// instead of 463 where each SM has three tiles). A CTA whose own tile waits for peers draws nothing until
// their parts are there: with two tiles an SM, the four SMs that get an own tile in the first wave would take
// a second one and finish it a third of a tile after everybody else (384 us instead of 339).
//
// The order itself stays: every CTA sees all its remote tiles before its first own one. The first tile is
// drawn too: an own tile is then drawn only after every remote one has been drawn by a cluster that is
// running, so a CTA still waiting for an SM (NCCL may hold some) never holds a tile that others wait for.
#pragma once

#include "gemm/smem.cuh"

namespace flux::gemm {

// What a role keeps to read the queue.
template <class Smem>
struct TileQueueReader {
  RingCursor<kTileQueue> cursor;

  // For one thread.
  __device__ __forceinline__ int next(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const int index = static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index)));
    ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
  // For all lanes of a warp, of which one reads. It also gives the entry back, so that racecheck can follow.
  __device__ __forceinline__ int next_for_warp(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const bool reads = ptx::lane() == 0;
    int index = reads ? static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index))) : 0;
    index = __shfl_sync(~0u, index, 0);
    if (reads) ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
};

// Loader of the cluster's first CTA.
template <class Smem>
struct TileQueueWriter {
  RingCursor<kTileQueue> cursor;

  __device__ __forceinline__ void put(const Smem& smem, int cluster_size, int index) {
    ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);
    if (cluster_size == 1) {
      ptx::store_shared(smem.tile_index(cursor.index), index);
      ptx::mbarrier_arrive(smem.tile_full(cursor.index));
    } else {
      for (int cta = 0; cta < cluster_size; ++cta) {
        ptx::mbarrier_arrive_expect_tx_cluster(smem.tile_full(cursor.index), sizeof(index), cta);
        ptx::store_async_cluster(smem.tile_index(cursor.index), index, smem.tile_full(cursor.index), cta);
      }
    }
    cursor.advance();
  }

  // Until all have read what was put.
  __device__ __forceinline__ void drain(const Smem& smem) {
    for (int entry = 0; entry < kTileQueue; ++entry, cursor.advance()) {
      ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);
    }
  }
};

}  // namespace flux::gemm
