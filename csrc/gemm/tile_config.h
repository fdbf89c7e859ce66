// The tile shapes for which the GEMM kernel is instantiated.
//
// A CTA computes kBlockM x block_n with two math warpgroups of 64 rows each, in k-blocks of 128 bytes through a ring of
// `stages`. A finished tile is staged in a second ring: `slabs` buffers of slab_n columns. Few are enough for stores to
// local memory, and leave room for another stage; those of a whole tile let the math warps run ahead of a slow link.
#pragma once

#include <cstdint>

#include "runtime/macros.h"

namespace flux::gemm {

constexpr int kBlockM = 128;
constexpr int kBlockBytes = 128;    // of K: one row of the 128-byte TMA swizzle
constexpr int kResultBytes = 2;     // bf16 and fp16; fp32 results do not go through shared memory
constexpr int kSmemLimit = 232448;  // shared memory of a CTA on sm_90
constexpr int kNumMathWarpgroups = 2;
constexpr int kNumThreads = 128 * (1 + kNumMathWarpgroups);  // of a CTA: loaders and storers, and math
constexpr int kTileQueue = 2;                                // entries of the tile queue
constexpr int kMaxPeers = 7;                                 // world sizes up to 8

// Ids of named barriers (bar.sync), of which a CTA has 16; 0 is __syncthreads. One set of threads each.
constexpr int kMathBarrier = 1;       // both warpgroups that compute, or all threads that normalise a row
constexpr int kWarpgroupBarrier = 2;  // one math warpgroup; plus its index
constexpr int kEpochBarrier = 4;      // all threads of a CTA: they have read the epoch
constexpr int kGroupBarrier = 5;      // a group of threads that sums rows of MoE layer 1; plus its index
constexpr int kNamedBarriers = 16;

FLUX_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a tile multiplies, and where it adds.
//
//   k16Bit      bf16 or fp16, in the tensor core's accumulators
//   kFast       e4m3, likewise. The tensor core keeps 13 bits of such a sum
//   kPromoted   fp8. The product of each k-block, or of two, is added to fp32 registers, times its scales
//               (docs/design/fp8.md#promotion)
enum class Arithmetic { k16Bit, kFast, kPromoted };

struct TileConfig {
  int id, block_n, stages, slab_n, slabs;
  Arithmetic arithmetic = Arithmetic::k16Bit;

  constexpr bool is_fp8() const { return arithmetic != Arithmetic::k16Bit; }
  constexpr bool promotes() const { return arithmetic == Arithmetic::kPromoted; }
  constexpr int operand_bytes() const { return is_fp8() ? 1 : 2; }
  constexpr int block_k() const { return kBlockBytes / operand_bytes(); }
};

constexpr TileConfig kTileConfigs[] = {
    // id, block_n, stages, slab_n, slabs
    {0, 256, 4, 64, 2},
    {1, 256, 3, 64, 5},
    {2, 224, 4, 32, 6},
    {3, 192, 4, 64, 4},
    {4, 160, 5, 32, 5},
    {5, 128, 5, 64, 4},
    {6, 112, 6, 112, 1},
    {7, 96, 6, 96, 2},
    {8, 80, 7, 80, 2},
    {9, 64, 8, 64, 2},
    {10, 64, 7, 64, 3, Arithmetic::kPromoted},
    {11, 128, 5, 64, 3, Arithmetic::kPromoted},
    {12, 160, 5, 32, 5, Arithmetic::kPromoted},
    {13, 128, 5, 64, 4, Arithmetic::kFast},
    {14, 256, 4, 64, 2, Arithmetic::kFast},
    {15, 256, 3, 64, 5, Arithmetic::kFast},
    {16, 256, 4, 32, 3, Arithmetic::kPromoted},
    {17, 256, 3, 64, 4, Arithmetic::kPromoted},
    {18, 192, 5, 32, 2, Arithmetic::kPromoted},
    {19, 192, 4, 64, 3, Arithmetic::kPromoted},
};
constexpr int kNumTileConfigs = sizeof(kTileConfigs) / sizeof(kTileConfigs[0]);

constexpr int stage_bytes(const TileConfig& c) { return (kBlockM + c.block_n) * kBlockBytes; }
constexpr int staging_bytes(const TileConfig& c) { return kBlockM * c.slab_n * c.slabs * kResultBytes; }

// Block scales (fp8): of each row of x and kScaleBlock elements of K, and each kScaleBlock x kScaleBlock of the weight.
// Those of a tile's rows arrive with each stage. TMA loads begin at multiples of 16 bytes, tiles at any row, so up to
// three scales of rows before the tile come first.
constexpr int kScaleBlock = 128;
constexpr int kScaleAlignment = 16 / 4;
constexpr int kScaleBoxRows = kBlockM + kScaleAlignment;
constexpr int scale_bytes(const TileConfig& c) {
  return c.promotes() ? (kScaleBoxRows * 4 + 127) / 128 * 128 : 0;
}

// Contributions of peers are added to a tile through the same memory, in pieces: a few chunks of 16 columns of a half
// tile from every peer, so that one barrier covers all peers. A piece must fit for the largest world size.
constexpr int kChunkN = 16;
constexpr int kChunkBytes = 64 * kChunkN * kResultBytes;
constexpr int inbox_bytes(const TileConfig& c) { return 64 * c.slab_n * c.slabs * kResultBytes; }
constexpr int piece_chunks(const TileConfig& c) {
  return inbox_bytes(c) >= 2 * kMaxPeers * kChunkBytes ? 2 : 1;
}
// Pieces of a pair of ranks are the smallest, so this many barriers are enough for any world size.
constexpr int max_pieces(const TileConfig& c) {
  const int pieces = inbox_bytes(c) / (piece_chunks(c) * kChunkBytes);
  return pieces < 8 ? pieces : 8;
}

// Mbarriers: a full/empty pair for each stage and entry of the tile queue, and for each slab and piece of a warpgroup;
// `arrived` (the contributions to an own tile have arrived), and two for split K.
constexpr int num_barriers(const TileConfig& c) {
  return 2 * (kTileQueue + c.stages + kNumMathWarpgroups * (c.slabs + max_pieces(c))) + 3;
}
constexpr int kSharesBytes = 16;  // what a thread that draws shares of a sum leaves for others (finish.cuh)
// 1 KB aligns the ring for TMA. The last words are the tile queue and the flags for failed waits.
constexpr int smem_bytes(const TileConfig& c) {
  return 1024 + c.stages * (stage_bytes(c) + scale_bytes(c)) + staging_bytes(c) + 8 * num_barriers(c) +
         kSharesBytes + 4 * (kTileQueue + kNumMathWarpgroups);
}

// With the weight stored as [K, N] a B tile is made of 64-column swizzle panels. wgmma takes fp8 along K only.
constexpr bool supports_transposed_weight(const TileConfig& c) { return c.block_n % 64 == 0 && !c.is_fp8(); }

// Wider tiles do not split K (docs/design/cost-model.md#split-k). Those of fp8 that promote also serve problems that may
// be fast (docs/design/fp8.md#instances).
constexpr bool supports_split(const TileConfig& c) {
  return c.is_fp8() ? c.promotes() && c.block_n <= 128 : c.block_n <= 160;
}

// Of tiles that are sent, the slabs hold a whole one, or the math warps wait for the link. Narrower ones were slower.
constexpr bool supports_sending(const TileConfig& c) {
  return c.slab_n * c.slabs >= c.block_n && c.block_n >= 128;
}
// Of tiles that differ in their slabs only, the one that gives them the least memory: it has a stage more.
constexpr bool supports_keeping(const TileConfig& c) {
  for (const TileConfig& other : kTileConfigs) {
    if (other.arithmetic == c.arithmetic && other.block_n == c.block_n && other.stages > c.stages)
      return false;
  }
  return true;
}
// The fp8 tile of 192 columns gathers nothing: it was timed with no peers (docs/design/fp8.md#cost-model).
constexpr bool supports_gathering(const TileConfig& c) {
  return supports_keeping(c) && !(c.is_fp8() && c.block_n == 192);
}

constexpr bool supports(const TileConfig& c, bool sends, bool gathers) {
  return sends ? supports_sending(c) : gathers ? supports_gathering(c) : supports_keeping(c);
}

// Shared memory that a launch no longer needs for its tiles.
struct SpareMemory {
  uint32_t begin;
  int bytes;
};

// Width of the panels a finished tile is stored in; 64 columns are one 128-byte swizzle row.
constexpr int panel_n(const TileConfig& c) { return c.slab_n % 64 == 0 ? 64 : c.slab_n % 32 == 0 ? 32 : 16; }

// Parts of the columns of a tile that promotes, multiplied one after the other: registers for one product are enough.
constexpr int column_parts(const TileConfig& c) { return c.promotes() && c.block_n > 192 ? 2 : 1; }

// Whether the product of two k-blocks is promoted at once where scales are not of blocks. Others need their stages.
constexpr bool promotes_pairs(const TileConfig& c) { return c.promotes() && c.stages >= 4; }

}  // namespace flux::gemm
