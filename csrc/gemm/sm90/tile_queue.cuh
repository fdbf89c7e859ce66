// The tile scheduler. The loader of a cluster's first CTA draws the next index of the tile order shortly before
// it has loaded the last k-block of its tile, and passes the index to every role of every CTA of the cluster
// through a short queue in shared memory.
//
// Tiles that leave over a link are drawn from a counter in global memory, as late as possible
// (docs/design/gemm-rs.md#the-kernel). A CTA whose local tile waits for peers draws nothing until their contributions
// have arrived; otherwise it would take a tile that an idle CTA could start.
//
// The order itself does not change: every CTA sees all its remote tiles before its first local one. The first
// tile is drawn too. So a local tile is drawn only after every remote tile has been drawn by a resident
// cluster. A CTA that is not resident yet (NCCL may occupy SMs) never holds a tile that other CTAs wait for.
#pragma once

#include "gemm/sm90/smem.cuh"

namespace flux::gemm {

// The state of a role (math warp, storer, loader) that reads the queue.
template <class Smem>
struct TileQueueReader {
  RingCursor<kTileQueue> cursor;

  // Called by one thread: waits for the next tile index.
  FLUX_DEVICE int next(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const int index = static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index)));
    ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
  // Called by all lanes of a warp. Lane 0 reads the entry and releases it itself, so that racecheck sees the order.
  FLUX_DEVICE int next_for_warp(const Smem& smem) {
    ptx::mbarrier_wait(smem.tile_full(cursor.index), cursor.phase);
    const bool reads = ptx::lane() == 0;
    int index = reads ? static_cast<int>(ptx::load_shared(smem.tile_index(cursor.index))) : 0;
    index = __shfl_sync(~0u, index, 0);
    if (reads) ptx::mbarrier_arrive_cluster(smem.tile_empty(cursor.index), 0);
    cursor.advance();
    return index;
  }
};

// The state of the only writer of the queue: the loader of the cluster's first CTA.
template <class Smem>
struct TileQueueWriter {
  RingCursor<kTileQueue> cursor;

  FLUX_DEVICE void put(const Smem& smem, int cluster_size, int index) {
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

  // Waits until all readers have released all entries.
  FLUX_DEVICE void drain(const Smem& smem) {
    for (int entry = 0; entry < kTileQueue; ++entry, cursor.advance()) {
      ptx::mbarrier_wait(smem.tile_empty(cursor.index), cursor.phase ^ 1);
    }
  }
};

}  // namespace flux::gemm
