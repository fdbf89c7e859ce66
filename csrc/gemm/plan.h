// The plan of a GEMM: the tile shapes for which its kernels are instantiated, the order of a launch's tiles, and what the
// cost model chooses among both. Shared by kernels, host, CPU path and tests.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/symm_buffer.h"

namespace flux::gemm {

// --- tile shapes ---
//
// A CTA computes kBlockM x block_n with two math warpgroups of 64 rows each, in k-blocks of 128 bytes through a ring of
// `stages`. A finished tile is staged in a second ring: `slabs` buffers of slab_n columns. Few are enough for stores to
// local memory, and leave room for another stage; those of a whole tile let the math warps run ahead of a slow link.

constexpr int kBlockM = 128;
constexpr int kBlockBytes = 128;    // of K: one row of the 128-byte TMA swizzle
constexpr int kResultBytes = 2;     // bf16 and fp16; fp32 results do not go through shared memory
constexpr int kSmemLimit = 232448;  // shared memory of a CTA on sm_90
constexpr int kNumMathWarpgroups = 2;
constexpr int kNumThreads = 128 * (1 + kNumMathWarpgroups);  // of a CTA: loaders and storers, and math
constexpr int kTileQueue = 2;                                // entries of the tile queue
constexpr int kMaxPeers = runtime::kMaxWorldSize - 1;

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

// --- the order of tiles ---
//
// Pure functions that the roles of a kernel, host plans and CPU tests call. The rows are `world_size` shards, and no
// tile crosses their boundary. Two regions: this rank's shard, all others.
//
//   kTakeTurns   tiles travel by storers: remote tiles first. Consecutive tiles go to different peers, starting with
//                rank+1, so that a rank sends to all peers at any time, and no peer receives from all at once
//   kOneByOne    tiles travel by copy engines: remote tiles first, shard by shard (rank+1, rank+2, ...). Copies to one
//                peer at a time have more bandwidth than copies to all peers at once
//   kGathered    x is gathered: own tiles first, then shard by shard in the order of arrival (rank-1, rank-2, ...)
//
// If tiles travel, own tiles wait for the peers'. A CTA, or a pair that shares loads, must never have a remote tile
// after an own one, or ranks could deadlock: so the two regions are rastered separately. Inside a region, rows are
// walked in groups of `group_m`, all columns of a group before the next: tiles in flight then share A and W in the L2.

struct Tile {
  int shard;   // the rank that owns these rows
  int m, n;    // tile coordinates inside the shard
  bool valid;  // false: no tile; the idle CTA of a pair at the edge of a region
};

// What the CTAs of a cluster share. kPairM: the loads of W, for two tiles in one column. kPairN: the loads of x, for
// two tiles in one row. kSplit2, kSplit3: one tile, of which each CTA multiplies a part of K (sm90/gemm.cuh).
enum class Cluster : int { kNone = 1, kPairM = 2, kPairN = 3, kSplit2 = 4, kSplit3 = 5 };
constexpr int kMinKSplit = 2, kMaxKSplit = 3;

enum class Peers { kTakeTurns, kOneByOne, kGathered };

struct TileOrder {
  int m_tiles;  // per shard
  int n_tiles;
  int world_size = 1;
  int rank = 0;
  Cluster cluster = Cluster::kNone;
  int group_m = 1;  // in clusters
  Peers peers = Peers::kTakeTurns;

  FLUX_HD int cluster_m() const { return cluster == Cluster::kPairM ? 2 : 1; }
  FLUX_HD int cluster_n() const { return cluster == Cluster::kPairN ? 2 : 1; }
  FLUX_HD int split() const { return cluster > Cluster::kPairN ? static_cast<int>(cluster) - 2 : 1; }
  FLUX_HD int cluster_size() const { return split() > 1 ? split() : cluster == Cluster::kNone ? 1 : 2; }

  FLUX_HD int remote_rows() const { return (world_size - 1) * m_tiles; }
  FLUX_HD int cluster_columns() const { return (n_tiles + cluster_n() - 1) / cluster_n(); }
  FLUX_HD int clusters_in(int rows) const {
    return (rows + cluster_m() - 1) / cluster_m() * cluster_columns();
  }
  FLUX_HD int num_remote_clusters() const { return clusters_in(remote_rows()); }
  FLUX_HD int num_own_clusters() const { return clusters_in(m_tiles); }
  FLUX_HD int num_clusters() const { return num_remote_clusters() + num_own_clusters(); }

  // The tile of CTA `cta` (0 <= cta < cluster_size) in the index-th cluster of the order.
  FLUX_HD Tile at(int index, int cta) const {
    const bool gathers = peers == Peers::kGathered;
    const int first_region = gathers ? num_own_clusters() : num_remote_clusters();
    const bool own = gathers == (index < first_region);
    const int rows = own ? m_tiles : remote_rows();
    const int local = index < first_region ? index : index - first_region;

    const int cluster_rows = (rows + cluster_m() - 1) / cluster_m();
    const int group_size = group_m * cluster_columns();
    const int first_row = local / group_size * group_m;
    const int rows_in_group = cluster_rows - first_row < group_m ? cluster_rows - first_row : group_m;
    const int in_group = local % group_size;
    int row = first_row + in_group % rows_in_group;
    int column = in_group / rows_in_group;
    if (cluster == Cluster::kPairM) row = row * 2 + cta;
    if (cluster == Cluster::kPairN) column = column * 2 + cta;

    Tile tile;
    tile.valid = row < rows && column < n_tiles;
    if (row >= rows) row = rows - 1;  // the idle CTA of a pair loads its partner's operands, and drops them
    if (column >= n_tiles) column = n_tiles - 1;
    const int others = world_size - 1;
    const bool turns = peers == Peers::kTakeTurns;
    const int nth = turns ? row % others : row / m_tiles;  // index among the other shards
    tile.shard = own ? rank : gathers ? (rank + others - nth) % world_size : (rank + 1 + nth) % world_size;
    tile.m = own ? row : turns ? row / others : row % m_tiles;
    tile.n = column;
    return tile;
  }
};

// --- the choice of a tile shape and a raster ---
//
// A cost model scores every candidate; there is no table of shapes and no tuning file. Its constants are fitted to
// measurements (docs/design/cost-model.md).

struct Problem {
  int m, n, k;            // the GEMM of this rank: [m, k] x [k, n]
  bool transpose_weight;  // weight stored as [K, N]
  int world_size = 1;     // 1: plain GEMM; else rows are world_size shards, and tiles of other shards travel
  int num_sms;
  bool gathers = false;      // rows of x travel instead of tiles; results stay local
  bool all_reduced = false;  // results are summed over ranks, in the same launch
  bool swiglu = false;       // columns gate others (GemmArgs::swiglu)
  // fp8 operands have one byte. With block scales, or if they may not be fast, sums are promoted.
  int operand_bytes = 2;
  bool promotes = false;
  bool block_scales = false;

  bool is_fp8() const { return operand_bytes == 1; }
};

// A choice as one integer, the argument of the low-level ops. `cluster` and `raster`: the cluster and group_m of an
// ordinary tile, the split and the sharers of a swap-AB tile. 0 leaves that part to the cost model, -1 everything.
constexpr int pack_choice(int config, int cluster, int raster) {
  return config | cluster << 8 | raster << 16;
}

struct Choice {
  int config = -1;  // -1: select has not chosen yet
  Cluster cluster = Cluster::kNone;
  int group_m = 1;  // group of the raster
  // Swap-AB tiles (swap_ab.h): number of CTAs that split K, and of those that share the weight. 0: another tile.
  int split = 0, sharers = 0;
  double time_us = 0;  // modelled
  std::string reason = {};
  std::vector<std::pair<std::string, double>> candidates = {};  // name, time_us; best first

  bool swaps_ab() const { return split > 0; }
  int packed() const {
    return swaps_ab() ? pack_choice(config, split, sharers)
                      : pack_choice(config, static_cast<int>(cluster), group_m);
  }
};

std::string config_name(int config, Cluster cluster);
std::string swap_ab_name(int config, int split, int sharers);

// Modelled time of a k-block of a tile that loads `kbytes` of operands from the L2, in microseconds. in_pairs: two are
// promoted at once, if the tile can (promotes_pairs).
double k_block_us(const TileConfig& tile, double kbytes, bool in_pairs);

// Throws runtime::Error if no choice is possible.
Choice select(const Problem& problem, int packed_choice = -1);

// --- what a quantisation to fp8 writes: by a kernel of its own (quantize.cu), or behind a sum (finish.cuh) ---

// What has one scale; in the order of python/flux/ops/quantize.py.
enum class Granularity { kTensor, kToken, kGroup, kBlock };

// A scale made of a whole tensor is found by one launch and used by the next. The first one leaves the number of its
// CTAs, as an int, and the largest absolute value that each of them has seen.
constexpr int kMaxParts = 511, kPartsFloats = 1 + kMaxParts;

struct Quantized {
  void* q = nullptr;  // contiguous; null: nothing is quantised
  // kTensor: [1]. kToken: [rows]. kGroup: [columns / 128] of scale_stride. kBlock: [rows / 128][columns / 128].
  float* scales = nullptr;
  float* parts = nullptr;        // kTensor, if not given: kPartsFloats of scratch memory
  const float* given = nullptr;  // kTensor: the scale to use; `scales` is not written
  int64_t scale_stride = 0;
  Granularity granularity = Granularity::kTensor;
  bool e5m2 = false, ue8m0 = false;

  FLUX_HD bool needs_all() const {
    return q != nullptr && granularity == Granularity::kTensor && given == nullptr;
  }
};

}  // namespace flux::gemm
