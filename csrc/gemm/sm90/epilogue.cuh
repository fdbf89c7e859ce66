// Building blocks of the GEMM kernels: TMA loads and wgmma descriptors of the operands, and staging of the accumulators
// in shared memory.
//
// wgmma leaves a 64 x N fp32 tile in the registers of 128 threads. Warp w holds rows 16w..16w+15. In each block
// of 8 columns, a thread has two adjacent columns of row lane/4, and the same two of row lane/4 + 8. Two such
// blocks are a chunk of 16 columns: 8 accumulators a thread, or 16 bytes after rounding to a 16-bit type.
#pragma once

#include "gemm/elements.cuh"
#include "gemm/policy.h"
#include "gemm/sm90/wgmma.cuh"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

// --- operands: x, and the weight as [N, K] (K-major) or [K, N] (MN-major) ---

constexpr int kPanelK = kBlockBytes / 2;    // elements of a k-block; those of MN-major operands have 16 bits
constexpr int kPanelBytes = kPanelK * 128;  // MN-major: 64 columns (128 bytes) of all its rows

// Bytes in a stage from one wgmma step of K (32 bytes of a row) to the next.
template <Major kMajorB>
constexpr int kBStepBytes = kMajorB == Major::K ? 32 : 16 * 128;

template <Major kMajorB>
FLUX_DEVICE uint64_t make_b_descriptor(uint32_t address) {
  return make_descriptor(address, kMajorB == Major::K ? 0 : kPanelBytes, 1024);
}

// The tensor map and box size of an operand of one tile. A tile at the edge uses smaller boxes, because TMA is
// slower on rows beyond the edge. The rest of the stage keeps stale data, which affects only results beyond the
// edge.
struct Boxes {
  const CUtensorMap* map;
  int rows;  // rows of a box (x, K-major weight), or columns of all boxes together (MN-major weight)
};

// A pair of CTAs whose tiles have the same columns shares B: each fetches half and multicasts it to both.
template <Major kMajorB, int kBlockN>
FLUX_DEVICE void load_b(const Boxes& b, uint32_t dst, uint32_t full, int k, int column, int cta,
                        bool shared) {
  if constexpr (kMajorB == Major::K) {
    if (!shared) {
      ptx::tma_load_2d(b.map, dst, full, k, column);
    } else {
      ptx::tma_load_2d_multicast(b.map, dst + cta * b.rows * 128, full, k, column + cta * b.rows, 0b11);
    }
  } else {
#pragma unroll
    for (int panel = 0; panel < kBlockN / 64; ++panel) {
      if (panel * 64 >= b.rows) break;
      if (!shared) {
        ptx::tma_load_2d(b.map, dst + panel * kPanelBytes, full, column + panel * 64, k);
      } else {
        constexpr int kHalf = kPanelK / 2;
        ptx::tma_load_2d_multicast(b.map, dst + panel * kPanelBytes + cta * kHalf * 128, full,
                                   column + panel * 64, k + cta * kHalf, 0b11);
      }
    }
  }
}

// Loads a stage of A. A pair of CTAs whose tiles have the same rows shares A by multicast.
FLUX_DEVICE void load_a(const Boxes& a, uint32_t dst, uint32_t full, int k, int row, int cta, bool shared) {
  if (!shared) {
    ptx::tma_load_2d(a.map, dst, full, k, row);
  } else {
    ptx::tma_load_2d_multicast(a.map, dst + cta * a.rows * 128, full, k, row + cta * a.rows, 0b11);
  }
}

// --- staging ---

// Stages a chunk for a TMA store. A panel has kPanelN columns x 64 rows. The 16-byte vectors of a row are swizzled, so
// that neither stmatrix nor TMA has bank conflicts.
template <int kPanelN>
FLUX_DEVICE void stage_rows(uint32_t slab, int chunk, int thread, const Fragment& f) {
  constexpr int kRowBytes = kPanelN * kResultBytes, kPieces = kPanelN / kVector;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16, vector = chunk * (kChunkN / kVector) + lane / 16;
  const int swizzle = kPanelN == 64 ? row % 8 : kPanelN == 32 ? row / 2 % 4 : row / 4 % 2;
  const uint32_t panel = slab + vector / kPieces * (64 * kRowBytes);
  ptx::stmatrix_x4(panel + row * kRowBytes + (vector % kPieces ^ swizzle) * 16, f.pair[0], f.pair[1],
                   f.pair[2], f.pair[3]);
}

// Stages a chunk in fragment order (policy.h): one 16-byte store a thread, no bank conflicts, contiguous.
FLUX_DEVICE void stage_fragments(uint32_t slab, int chunk, int thread, const Fragment& f) {
  ptx::store_shared_v4(slab + chunk * kChunkBytes + thread * 16, f.pair[0], f.pair[1], f.pair[2], f.pair[3]);
}

// Called by the storer thread: stores 64 rows x `columns` of staged panels to a shard of D by TMA, which drops
// elements beyond the edges of the shard.
template <int kPanelN>
FLUX_DEVICE void store_panels(const CUtensorMap* d, uint32_t slab, int row, int column, int columns,
                              int num_rows, int n, int shard) {
  if (row >= num_rows) return;
  for (int offset = 0; offset < columns && column + offset < n; offset += kPanelN) {
    ptx::tma_store_3d(d, slab + offset * 64 * kResultBytes, column + offset, row, shard);
  }
}

}  // namespace flux::gemm
