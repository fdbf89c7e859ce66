// The layout of the rows of a mixture of experts, and the order in which they are computed and sent: pure functions,
// shared by kernels, host, CPU path and tests (docs/design/moe.md).
//
// Tokens are distributed over all ranks, at most max_tokens on each. Experts are divided into ep_size slices; tp_size
// consecutive ranks share those of a slice, each a part of every expert's columns: ep_size = 1 is tensor parallelism.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm/plan.h"

namespace flux::moe {

constexpr int kMaxTopK = 16;
constexpr int kMaxSteps = 8;    // largest world size
constexpr int kBlockRows = 32;  // slot rows that share a signal in layer 1, at most
constexpr int kMaxShares = 8;   // shares in which tokens are sent in layer 0, at most
constexpr int kUnitRows = 32;   // rows of a share that are sent at a time, at most (about)
constexpr int kPushers = 16;    // CTAs that send tokens; more add almost no bandwidth (docs/design/moe.md)
constexpr int kGroupM = 16;     // tiles in one column that share a weight tile in L2

using gemm::ceil_div;

struct Layout {
  int world_size, rank;
  int ep_size, num_experts, top_k;
  int max_tokens;  // maximum of each rank

  FLUX_HD int tp_size() const { return world_size / ep_size; }
  FLUX_HD int local_experts() const { return num_experts / ep_size; }
  FLUX_HD int slice_of(int owner) const { return owner / tp_size(); }
  FLUX_HD int tokens() const { return world_size * max_tokens; }
  // A token that chooses an expert twice has only one row there.
  FLUX_HD int max_rows() const { return tokens() * (top_k < local_experts() ? top_k : local_experts()); }
  // Rows on each rank if tokens are distributed evenly over experts.
  FLUX_HD int expected_rows() const {
    const int rows = tokens() * top_k / ep_size;
    return rows > 1 ? rows : 1;
  }
  FLUX_HD int max_tiles(int block_m) const { return max_rows() / block_m + local_experts(); }

  // The expert within a slice, or -1 if the slice does not hold it.
  FLUX_HD int local_expert(int id, int slice) const {
    const int first = slice * local_experts();
    return id >= first && id < first + local_experts() ? id - first : -1;  // ids may be invalid
  }

  // Own tokens are step 0, those of rank-1 arrive next: every rank sends to rank+1 first. Also the source of a step.
  FLUX_HD int step_of(int source) const { return (rank + world_size - source) % world_size; }

  // Whether the source sends only the tokens that the owner needs, in compacted slot rows. Else a token's slot row is
  // its index: without expert parallelism the owner needs nearly all, and own tokens are not sent.
  FLUX_HD bool compacts(int source, int owner) const { return ep_size > 1 && source != owner; }

  // Blocks of slot rows in layer 1. An empty slot has one: a rank must receive from every peer in every call.
  FLUX_HD static int blocks_of(int slot_rows, int block_rows) {
    return slot_rows <= block_rows ? 1 : ceil_div(slot_rows, block_rows);
  }
  // Small: sums that remain after the last tile occupy all SMs (docs/design/moe.md#layer-1-chunks-communication-ctas).
  FLUX_HD static int block_rows(int max_tokens) {
    constexpr int kFewest = 8, kBlocks = 128;
    int rows = kFewest;
    while (rows < kBlockRows && rows * kBlocks < max_tokens) rows *= 2;
    return rows;
  }
};

// ---- the routing kernel ------------------------------------------------------------------------------------

// Threads of a CTA, one token each: few, to use more SMs, but so many that all CTAs are resident.
constexpr int kFewRouteThreads = 256, kManyRouteThreads = 512, kMostRouteThreads = 1024;
constexpr int kManyRouteCtas = 100;
// SMs that a launch leaves to kernels that wait for other ranks, such as NCCL's: or both would wait for each other.
constexpr int kSmsOfOthers = 32;

FLUX_HD int route_threads(const Layout& layout) {
  // With more choices, so many threads have too few registers.
  const int most = layout.top_k <= 8 ? kMostRouteThreads : kManyRouteThreads;
  int threads = kFewRouteThreads;
  while (threads < most && layout.world_size * ceil_div(layout.max_tokens, threads) >= kManyRouteCtas)
    threads *= 2;
  return threads;
}
// Experts on one rank, limited by shared memory.
FLUX_HD int max_route_experts(int threads) { return threads == kMostRouteThreads ? 750 : 1500; }
FLUX_HD int route_chunks(const Layout& layout) {
  return layout.max_tokens > 0 ? ceil_div(layout.max_tokens, route_threads(layout)) : 1;
}
// All CTAs: one more computes the tile schedule. All of them must be resident at once.
FLUX_HD int route_ctas(const Layout& layout) { return layout.world_size * route_chunks(layout) + 1; }
FLUX_HD bool route_fits(const Layout& layout, int num_sms) {
  return route_ctas(layout) + kSmsOfOthers <= num_sms;
}
// Words of scratch memory: of each CTA the counts of the experts, and from an even word on a pair for each slice.
FLUX_HD int64_t route_scratch_words(const Layout& layout) {
  const int64_t ctas = route_ctas(layout) - 1;
  return ctas * (layout.local_experts() + 2 * layout.ep_size) + 1;
}

// Number of 16-byte vectors with a token's choices: its experts, then its weights, four in each vector.
FLUX_HD int route_vectors(int top_k) { return 2 * ceil_div(top_k, 4); }
FLUX_HD int64_t route_exchange_bytes(const Layout& layout) {
  return static_cast<int64_t>(layout.tokens()) * route_vectors(layout.top_k) * 16;
}

// ---- layer 0: the order in which tokens are sent -------------------------------------------------------------

// Tiles are computed expert by expert, so tokens are sent in the order of the first expert that needs them: that of a
// token of share s is below ends[s], and not below ends[s - 1]. A unit is the work of one CTA at a time: of
// `part_tokens` consecutive tokens, those of one share that go to one peer.
struct SendUnit {
  int share, part, peer;
};

struct SendOrder {
  int world_size, rank;
  int shares, parts, part_tokens;
  int ends[kMaxShares];  // for each share: index after its last expert in a slice

  FLUX_HD int share_of(int expert) const {
    int share = 0;
    while (expert >= ends[share]) ++share;
    return share;
  }
  FLUX_HD int begin(int share) const { return share == 0 ? 0 : ends[share - 1]; }
  // Those up to the end of share 1: their tiles of own tokens are computed first, while the first share travels. Those
  // of all experts would take longer, and read every weight twice.
  FLUX_HD int early_experts() const { return ends[shares > 1 ? 1 : 0]; }

  // Peers take turns, and each rank starts with a different one, so that no peer receives from all ranks at once.
  FLUX_HD int units() const { return signals() * (world_size - 1); }
  FLUX_HD SendUnit at(int index) const {
    const int peers = world_size - 1, unit = index / peers;
    return {unit / parts, unit % parts, (rank + 1 + index % peers) % world_size};
  }
  // Signals of each peer: one for each pair of share and part.
  FLUX_HD int signals() const { return shares * parts; }
  FLUX_HD int signal(int share, int part) const { return share * parts + part; }
};

// Shares have about the same number of tokens if tokens are distributed evenly over experts: of the tokens with
// `choices` experts in a slice, a fraction 1 - (1 - e / experts)^choices has one among the first e experts.
inline SendOrder make_send_order(const Layout& layout) {
  const int experts = layout.local_experts();
  const double choices = std::max(1.0, static_cast<double>(layout.top_k) / layout.ep_size);
  SendOrder order = {};
  order.world_size = layout.world_size;
  order.rank = layout.rank;
  for (int share = 1; share <= kMaxShares; ++share) {
    const double left = 1.0 - static_cast<double>(share) / kMaxShares;
    const int end = static_cast<int>(std::ceil(experts * (1.0 - std::pow(left, 1.0 / choices))));
    if (order.shares == 0 || end > order.ends[order.shares - 1]) order.ends[order.shares++] = end;
  }
  // At least two units for each sending CTA, if necessary with few rows, so that all of them send concurrently.
  const int64_t rows = static_cast<int64_t>(layout.world_size - 1) * layout.max_tokens / (2 * kPushers);
  order.part_tokens = static_cast<int>(std::clamp<int64_t>(rows, 8, kUnitRows)) * order.shares;
  order.parts = std::max(1, ceil_div(layout.max_tokens, order.part_tokens));
  return order;
}

// The two matrices from which a sorted row can come (sm90_grouped_gemm.cuh).
struct Sources {
  const char *first, *second;
};

// fp8: the scales of a sorted row, of one k-block after the other. With a step of 0 all of them are the first.
struct RowScales {
  const float* first;
  int64_t step;
};
// A row of fp8 in a slot of layer 0, and its scales behind it.
FLUX_HD int slot_row_bytes(int k, int scale_columns) { return (k + 4 * scale_columns + 15) / 16 * 16; }

// ---- tiles ------------------------------------------------------------------------------------------------
//
// Rows are sorted by (expert, step of their source, token), without padding. The first tile of an expert starts
// at its first row. Tiles are computed expert by expert, except for some that need only own tokens (step 0).

// The number of tiles of an expert that come before all others.
FLUX_HD int early_tiles(int expert, int early_experts, int own_rows, int rows, int block_m) {
  if (expert >= early_experts) return 0;
  return own_rows == rows ? ceil_div(rows, block_m) : own_rows / block_m;
}

// Of a tile row of the schedule. Those of an expert are adjacent, except for early tiles. Up to kGroupM adjacent tile
// rows form a group, whose tiles are computed column by column.
struct TileEntry {
  int expert;
  int first_m;  // first tile row of the group, within the expert
  int base;     // first entry of the group
  int size;     // entries of the group
};
static_assert(sizeof(TileEntry) == 16);

// Entry number `index` of `count` adjacent tile rows that start at first_m and at entry `base`.
FLUX_HD TileEntry make_entry(int expert, int first_m, int count, int base, int index) {
  const int group = index / kGroupM * kGroupM;
  const int left = count - group;
  return {expert, first_m + group, base + group, left < kGroupM ? left : kGroupM};
}

struct Tile {
  int expert, m, n;  // tile coordinates within the expert
};

// Tile number `index` of the schedule, for `n_tiles` columns of tiles (with column chunks: the columns of the chunk).
FLUX_HD Tile tile_at(const TileEntry* entries, int n_tiles, int index) {
  const TileEntry group = entries[index / n_tiles];
  const int local = index - group.base * n_tiles;
  return {group.expert, group.first_m + local % group.size, local / group.size};
}

// ---- layer 1: chunks of columns, and the work of communication CTAs ----------------------------------------

// All experts' tiles of one chunk of columns are computed before those of the next.
struct ColumnChunks {
  int n_tiles, tiles_per_chunk;

  FLUX_HD int count() const { return ceil_div(n_tiles, tiles_per_chunk); }
  FLUX_HD int first(int chunk) const { return chunk * tiles_per_chunk; }
  FLUX_HD int size(int chunk) const {
    const int left = n_tiles - first(chunk);
    return left < tiles_per_chunk ? left : tiles_per_chunk;
  }
};

// More chunks overlap better, because no sum overlaps with the tiles of the first chunk, and no tile with the sums of
// the last chunk. But every chunk reads x again. Eight chunks: docs/design/moe.md#layer-1-chunks-communication-ctas.
inline ColumnChunks make_chunks(int n, int block_n) {
  constexpr int kChunks = 8;
  const int n_tiles = ceil_div(n, block_n);
  return {n_tiles, ceil_div(n_tiles, kChunks)};
}

// A unit of work of the communication CTAs: a block of tokens of `peer` in a chunk of columns. For a peer: sum each
// token's rows and send the sums. For the own rank: add the peers' contributions and write the result.
struct CommUnit {
  int chunk, peer, block;
};

// The order in which communication CTAs draw units. Own blocks wait for peers, so they come one chunk later. When a
// unit waits, all earlier ones have been drawn, by CTAs that wait at most for earlier chunks: ranks cannot deadlock.
struct CommOrder {
  int world_size, rank;
  int blocks;  // blocks of one rank's tokens
  int chunks;

  FLUX_HD int sends() const { return (world_size - 1) * blocks; }
  FLUX_HD int units() const { return chunks * world_size * blocks; }

  FLUX_HD CommUnit at(int index) const {
    if (index < sends()) return send(0, index);
    index -= sends();
    const int round = sends() + blocks;  // the sends of a chunk, then the sums of the previous chunk
    const int chunk = index / round + 1;
    const int in_round = index % round;
    if (chunk == chunks) return {chunk - 1, rank, in_round};
    if (in_round < sends()) return send(chunk, in_round);
    return {chunk - 1, rank, in_round - sends()};
  }

  // Peers take turns, so that a rank sends to all of them concurrently.
  FLUX_HD CommUnit send(int chunk, int index) const {
    const int peers = world_size - 1;
    return {chunk, (rank + 1 + index % peers) % world_size, index / peers};
  }
};

// The number of CTAs that start with communication (COMET's adaptive assignment, arXiv 2502.19811): SMs are divided in
// proportion to the work, in microseconds of one SM. With few rows an expert the GEMM is bound by reading its weights,
// which seven eighths of the SMs do equally fast. Rates: docs/design/moe.md#layer-1-chunks-communication-ctas.
inline int communication_ctas(int64_t expected_rows, int64_t own_tokens, int experts, int n, int k,
                              int world_size, int num_sms, int operand_bytes = 2) {
  constexpr double kFlopsPerSmUs = 4.5e6;
  constexpr double kReadBytesPerSmUs = 3.3e4;
  constexpr double kSumBytesPerSmUs = 3.0e4;
  const double flops =
      2.0 * expected_rows * n * k * operand_bytes / 2;  // an SM multiplies twice as many of fp8
  const double weights = static_cast<double>(experts) * n * k * operand_bytes;
  const double compute_us = flops / kFlopsPerSmUs, read_us = weights / kReadBytesPerSmUs;
  const double gemm_us = std::max(compute_us, read_us);
  // Each row is read once; the sums for all ranks are written once and read once.
  const double sums = static_cast<double>(own_tokens) * world_size * 2;
  const double comm_us = (expected_rows + sums) * n * gemm::kResultBytes / kSumBytesPerSmUs;
  const int ctas = static_cast<int>(num_sms * comm_us / (gemm_us + comm_us) + 0.5);
  return std::clamp(ctas, read_us > compute_us ? std::max(1, num_sms / 8) : 1, std::max(1, num_sms / 2));
}

// ---- tile shapes: chosen by sizes that are the same on all ranks, which count chunks of columns in tiles ---------

// Ids in gemm/plan.h of the shapes that are stored in whole 64-column panels; those of fp8 promote.
constexpr int kGroupedConfigs[] = {0, 3, 5, 9, 17, 11, 10};
constexpr bool is_grouped_config(int config) {
  for (const int one : kGroupedConfigs)
    if (one == config) return true;
  return false;
}

// The fastest shape for `num_rows` rows over all experts, as modelled from the number of waves; ties: the first one.
// The last tile of an expert is half full on average.
inline int choose_grouped_config(int64_t num_rows, int experts, int columns, int k, int num_sms,
                                 int operand_bytes = 2) {
  const double filled = std::min<double>(experts, static_cast<double>(num_rows));
  const double tile_rows =
      filled * std::max(1.0, static_cast<double>(num_rows) / filled / gemm::kBlockM + 0.5);
  int best = -1;
  double best_us = INFINITY;
  for (const int config : kGroupedConfigs) {
    const gemm::TileConfig& tile = gemm::kTileConfigs[config];
    if (tile.operand_bytes() != operand_bytes) continue;
    const int block_n = tile.block_n;
    const double waves = std::ceil(tile_rows * gemm::ceil_div(columns, block_n) / num_sms);
    const double block_us = gemm::k_block_us(tile, 0.128 * (gemm::kBlockM + block_n), /*in_pairs=*/false);
    const double time_us = waves * (gemm::ceil_div(k, tile.block_k()) * block_us + 0.5);
    if (time_us < best_us) {
      best = config;
      best_us = time_us;
    }
  }
  return best;
}

}  // namespace flux::moe
