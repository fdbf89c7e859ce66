// The shared memory of a CTA: rings of operand stages and of slabs for each math warpgroup, and mbarriers. A finished
// tile is staged in the slabs; before that, they are the inbox for the contributions of peers.
#pragma once

#include "gemm/elements.cuh"
#include "gemm/policy.h"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

template <int kSize>
struct RingCursor {
  int index = 0;
  uint32_t phase = 0;
  FLUX_DEVICE void advance(int size = kSize) {
    if (++index == size) {
      index = 0;
      phase ^= 1;
    }
  }
};

template <int kConfig>
struct Smem {
  static constexpr TileConfig kTile = kTileConfigs[kConfig];
  static constexpr int kABytes = kBlockM * kBlockBytes;
  static constexpr int kStageBytes = stage_bytes(kTile);
  static constexpr int kSlabBytes = 64 * kTile.slab_n * kResultBytes;
  static constexpr int kScaleBytes = scale_bytes(kTile);  // of a stage; TMA wants multiples of 128
  static constexpr int kScaleBoxBytes = kScaleBoxRows * 4;
  static_assert(kStageBytes % 1024 == 0 && kSlabBytes % 128 == 0 && kScaleBytes % 128 == 0);
  static constexpr int kSlabs = kTile.slabs;
  static constexpr int kPieceChunks = piece_chunks(kTile);
  static constexpr int kPieces = max_pieces(kTile);
  using Stages = RingCursor<kTile.stages>;
  using Slabs = RingCursor<kSlabs>;
  using Pieces = RingCursor<kPieces>;

  uint32_t base;
  const uint8_t* pointer_base;
  __device__ explicit Smem(const uint8_t* raw) : base((ptx::smem_addr(raw) + 1023) & ~1023u) {
    pointer_base = raw + (base - ptx::smem_addr(raw));
  }

  __device__ uint32_t a(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ uint32_t slab(int warpgroup, int index) const {
    return base + kTile.stages * kStageBytes + (warpgroup * kSlabs + index) * kSlabBytes;
  }
  // The block scales of the rows of A in a stage; before them, if TMA loads them, those of up to three other rows.
  __device__ uint32_t scales(int stage) const { return slab(kNumMathWarpgroups, 0) + stage * kScaleBytes; }
  // Converts to a generic pointer, for ordinary loads, which the compiler can schedule.
  __device__ const uint8_t* pointer(uint32_t address) const { return pointer_base + (address - base); }

  // The inbox of a warpgroup holds as many pieces as fit; a piece is [peer][chunk].
  __device__ static constexpr int piece_bytes(int num_peers) {
    return num_peers * kPieceChunks * kChunkBytes;
  }
  __device__ static int num_pieces(int num_peers) {
    const int fit = inbox_bytes(kTile) / piece_bytes(num_peers);
    return fit < kPieces ? fit : kPieces;
  }
  __device__ uint32_t piece(int warpgroup, int index, int num_peers) const {
    return slab(warpgroup, 0) + index * piece_bytes(num_peers);
  }

  __device__ uint32_t full(int stage) const { return barrier(stage); }
  __device__ uint32_t empty(int stage) const { return barrier(kTile.stages + stage); }
  __device__ uint32_t slab_full(int warpgroup, int index) const {
    return barrier(2 * kTile.stages + warpgroup * kSlabs + index);
  }
  __device__ uint32_t slab_empty(int warpgroup, int index) const {
    return slab_full(kNumMathWarpgroups + warpgroup, index);
  }
  __device__ uint32_t piece_full(int warpgroup, int index) const {
    return barrier(2 * (kTile.stages + kNumMathWarpgroups * kSlabs) + warpgroup * kPieces + index);
  }
  __device__ uint32_t piece_empty(int warpgroup, int index) const {
    return piece_full(kNumMathWarpgroups + warpgroup, index);
  }
  __device__ uint32_t tile_full(int index) const {
    return barrier(2 * (kTile.stages + kNumMathWarpgroups * (kSlabs + kPieces)) + index);
  }
  __device__ uint32_t tile_empty(int index) const { return tile_full(kTileQueue + index); }
  // Completes one phase for each own tile, after both storers have seen the peers' contributions arrive.
  __device__ uint32_t arrived() const { return tile_empty(kTileQueue); }
  // Split K. ring_free: all CTAs have finished reading their stages. parts_full: the others' partial sums are here.
  __device__ uint32_t ring_free() const { return arrived() + 8; }
  __device__ uint32_t parts_full() const { return ring_free() + 8; }
  // Of no use in these kernels, whose machine code is measured with it.
  __device__ uint32_t shares() const { return barrier(num_barriers(kTile)); }
  __device__ uint32_t tile_index(int index) const { return shares() + kSharesBytes + index * 4; }
  // A flag that is set when a wait timed out: by the storer, or by the loader for both warpgroups.
  __device__ uint32_t failed(int warpgroup) const { return tile_index(kTileQueue + warpgroup); }
  // The end of the memory that num_barriers and smem_bytes describe.
  __device__ uint32_t end() const { return failed(kNumMathWarpgroups); }
  __device__ void set_failed() const {
    for (int warpgroup = 0; warpgroup < kNumMathWarpgroups; ++warpgroup)
      ptx::store_shared(failed(warpgroup), 1);
  }

  // Called by one thread before any barrier is used. Every math warp releases a stage to each of the `sharers`,
  // the CTAs whose loads fill it: a partner's multicast also writes to this CTA's stage.
  __device__ void init(int cluster_size, int sharers, int loaders) const {
    constexpr int kMathWarps = 4;  // of a warpgroup
    for (int stage = 0; stage < kTile.stages; ++stage) {
      ptx::mbarrier_init(full(stage), loaders);
      ptx::mbarrier_init(empty(stage), kNumMathWarpgroups * kMathWarps * sharers);
    }
    for (int warpgroup = 0; warpgroup < kNumMathWarpgroups; ++warpgroup) {
      for (int index = 0; index < kSlabs; ++index) {
        ptx::mbarrier_init(slab_full(warpgroup, index), 32 * kMathWarps);
        ptx::mbarrier_init(slab_empty(warpgroup, index), 1);
      }
      for (int index = 0; index < kPieces; ++index) {
        ptx::mbarrier_init(piece_full(warpgroup, index), 1);
        ptx::mbarrier_init(piece_empty(warpgroup, index), 32 * kMathWarps);
      }
      ptx::store_shared(failed(warpgroup), 0);
    }
    ptx::mbarrier_init(arrived(), kNumMathWarpgroups);
    ptx::mbarrier_init(ring_free(), kNumMathWarpgroups * kMathWarps * cluster_size);
    ptx::mbarrier_init(parts_full(), kNumMathWarpgroups);
    ptx::mbarrier_init(shares(), 1);
    for (int index = 0; index < kTileQueue; ++index) {
      constexpr int kReaders = kNumMathWarpgroups * (kMathWarps + 1);  // math warps and storers
      ptx::mbarrier_init(tile_full(index), 1);
      // In a pair, the loader of the second CTA also reads; the loader of the first CTA writes.
      ptx::mbarrier_init(tile_empty(index), kReaders * cluster_size + cluster_size - 1);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ uint32_t barrier(int index) const { return scales(kTile.stages) + index * 8; }
};

// A storer's view of its warpgroup's slabs: takes them in order, and releases each after its bulk copies have read it.
template <class Smem>
struct SlabRing {
  typename Smem::Slabs filled, freed;
  int in_flight = 0;

  FLUX_DEVICE uint32_t wait_full(const Smem& smem, int warpgroup) {
    ptx::mbarrier_wait(smem.slab_full(warpgroup, filled.index), filled.phase);
    return smem.slab(warpgroup, filled.index);
  }

  // Commits the bulk group of the slab. Blocks only if the math warps would otherwise have no free slab.
  FLUX_DEVICE void commit(const Smem& smem, int warpgroup) {
    ptx::bulk_commit();
    filled.advance();
    if (++in_flight == Smem::kSlabs) free_oldest<Smem::kSlabs - 1>(smem, warpgroup);
  }

  // Called after the last slab of a tile: releases all slabs as they are read, while the next mainloop runs.
  template <int kPending = Smem::kSlabs - 1>
  FLUX_DEVICE void drain(const Smem& smem, int warpgroup) {
    if (in_flight > kPending) free_oldest<kPending>(smem, warpgroup);
    if constexpr (kPending > 0) drain<kPending - 1>(smem, warpgroup);
  }

 private:
  template <int kPending>
  FLUX_DEVICE void free_oldest(const Smem& smem, int warpgroup) {
    ptx::bulk_wait_read<kPending>();
    ptx::mbarrier_arrive(smem.slab_empty(warpgroup, freed.index));
    freed.advance();
    --in_flight;
  }
};

// --- staging of accumulators in slabs ---
//
// wgmma leaves a 64 x N fp32 tile in the registers of 128 threads. Warp w holds rows 16w..16w+15. In each block
// of 8 columns, a thread has two adjacent columns of row lane/4, and the same two of row lane/4 + 8. Two such
// blocks are a chunk of 16 columns: 8 accumulators a thread, or 16 bytes after rounding to a 16-bit type.

// Stages a chunk for a TMA store. f: eight accumulators, rounded, in pairs of columns: {left block, row}, {left block,
// row + 8}, {right block, row}, {right block, row + 8}. A panel has kPanelN columns x 64 rows. The vectors of a row are
// swizzled, so that neither stmatrix nor TMA has bank conflicts.
template <int kPanelN>
FLUX_DEVICE void stage_rows(uint32_t slab, int chunk, int thread, const uint4& f) {
  constexpr int kRowBytes = kPanelN * kResultBytes, kPieces = kPanelN / kVector;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16, vector = chunk * (kChunkN / kVector) + lane / 16;
  const int swizzle = kPanelN == 64 ? row % 8 : kPanelN == 32 ? row / 2 % 4 : row / 4 % 2;
  const uint32_t panel = slab + vector / kPieces * (64 * kRowBytes);
  ptx::stmatrix_x4(panel + row * kRowBytes + (vector % kPieces ^ swizzle) * 16, f.x, f.y, f.z, f.w);
}

// Stages a chunk in fragment order (policy.h): one 16-byte store a thread, no bank conflicts, contiguous.
FLUX_DEVICE void stage_fragments(uint32_t slab, int chunk, int thread, const uint4& f) {
  ptx::store_shared_v4(slab + chunk * kChunkBytes + thread * 16, f.x, f.y, f.z, f.w);
}

// Called by the storer thread: stores 64 rows x `columns` of staged panels to a shard of D, whose edges TMA keeps.
template <int kPanelN>
FLUX_DEVICE void store_panels(const CUtensorMap* d, uint32_t slab, int row, int column, int columns,
                              int num_rows, int n, int shard) {
  if (row >= num_rows) return;
  for (int offset = 0; offset < columns && column + offset < n; offset += kPanelN)
    ptx::tma_store_3d(d, slab + offset * 64 * kResultBytes, column + offset, row, shard);
}

}  // namespace flux::gemm
