
#include <algorithm>
#include <cmath>

#include "gemm/swap_ab.h"

namespace flux::gemm {
namespace {

// Fitted to 75 shapes with 20 to 30 candidates each, on one GPU (docs/design/cost-model.md).
constexpr double kLaunchUs = 2.0;
constexpr double kTileUs = 0.3;      // between two mainloops
constexpr double kKblockUs = 0.031;  // per k-block, for any width: loads of A, mbarriers
constexpr double kMathUs = 0.0023;   // per k-block and column of a tile: 4 cycles at about 1.75 GHz
constexpr double kL2Us = 0.0019;     // per k-block and KB of operands from the L2
// fp8, fitted on one GPU: 8 problems, 16 candidates each (docs/design/fp8.md#cost-model). Operands from the L2 compete
// with more of them at a time, because a k-block has as many bytes and half the time of one of 16 bits for its columns.
constexpr double kFp8L2Us = 0.0035;
constexpr double kPromoteUs = 0.07;  // per k-block, or pair of them
// With 0.07 the tile of 192 columns would seem 5 % faster than it is beside the one of 256, which it displaces.
constexpr double kPromote192Us = 0.105;
// Where other tiles promote pairs, and this one has too few stages (docs/design/fp8.md#pairs-of-k-blocks).
constexpr double kPromoteAloneUs = 0.135;
// Slowdown with every SM busy: the GPU then runs at its power limit. Factors from 1.04 to 1.10 choose equally well.
constexpr double kPower = 1.08;
// Smallest block_n for which a pair of CTAs was ever the fastest choice.
constexpr int kMinPairM = 80;
constexpr int kMinPairN = 160;
// Split K: to wait for the other CTAs, and to exchange partial sums. Set by hand (docs/design/cost-model.md#split-k).
constexpr double kSplitUs = 2.0;
constexpr double kSplitBytesPerUs = 60e3;
constexpr int kMinSplitBlocks = 8;  // k-blocks for each part
constexpr int kAccumulatorBytes = 4;
// GEMM+ReduceScatter, fitted to 20 shapes on four GPUs, but for kSentTileUs: by hand, for mid-size shapes.
constexpr double kSentTileUs = 1.0;        // kTileUs, with the tile sent or added to
constexpr double kLinkBytesPerUs = 310e3;  // stores to peers beside a running GEMM
constexpr double kArrivalUs = 2.0;         // from the last store to the owner's sum
constexpr double kAddUs = 5.0;

// Few rows, with weights in global memory and not in the L2: fitted to fifteen weights, 1 to 256 rows and every
// tile and cluster, on one GPU (docs/design/cost-model.md#few-rows).
constexpr int kMaxSwapAbRows = 256;
constexpr int kAlwaysSwapAbRows = 32;
constexpr double kSmallLaunchUs = 3.5;
constexpr double kMemoryBytesPerUs = 4.0e6;  // to ordinary tiles
constexpr double kSwapAbLaunchUs = 1.8;
constexpr double kSwapAbMemoryBytesPerUs = 4.14e6;
// Costs of a k-block: fixed, per row of the tile, and the exponent of bandwidth that is lost if SMs have no tile.
struct SwapAbBlock {
  double us, row_us, unused;
};
constexpr SwapAbBlock kSingleBlock = {0.097, 0.0009, 0.175};
constexpr SwapAbBlock kTwoBlocks = {0.0834, 0.0011, 0.056};
// The tile of 192 rows has too few stages to hide loads behind math (docs/design/cost-model.md#the-tile-of-192-rows).
constexpr int kFewStages = 5;
constexpr double kFewStagesUs = 0.204;
constexpr double kFewStagesL2BytesPerUs = 25.7e6;
constexpr double kTwoBlocksMemory = 1.015;  // factor of the memory time: two k-blocks a stage, lowest tile
constexpr double kPairMemory = 1.16;        // factor of the memory time: a pair shares the weight
constexpr double kL2BytesPerUs = 11.3e6;    // to all SMs
constexpr double kSwapAbTileUs = 0.9;       // at the end of a mainloop
constexpr double kMeetRowUs = 0.016;        // to combine partial tiles in distributed shared memory, per row
constexpr double kPromoteRowUs = 0.0017;    // to promote a k-block, per row of the tile
constexpr double kWideUs = 0.295;           // for each doubling of a cluster beyond two CTAs
// The share of the SMs that clusters of four or eight CTAs can use: they must fit into one group of SMs (GPC).
constexpr double kWideRoom = 15.0 / 16;
// Costs of a sum over ranks after a GEMM: the latency of the link, and the transfer that does not overlap. Set by hand
// for five weights and 1 to 256 rows on two GPUs (docs/design/decode.md#what-made-the-sum-faster).
constexpr double kExchangeUs = 1.7;
constexpr double kExchangeBytesPerUs = 0.36e6;
constexpr double kLeftByRounds = 0.7, kLeftByMeetings = 0.4;

// Time to read the weight from global memory.
double memory_us(const Problem& p, double bytes_per_us) {
  return static_cast<double>(p.n) * p.k * p.operand_bytes / bytes_per_us;
}

constexpr Cluster kClusters[] = {Cluster::kNone, Cluster::kPairM, Cluster::kPairN, Cluster::kSplit2,
                                 Cluster::kSplit3};

// An order of one tile, to query the properties of a cluster.
TileOrder one_tile(Cluster cluster) { return {1, 1, 1, 0, cluster, 1}; }

// Splitting K pays if SMs would otherwise have no tile, and if K is long enough to offset the cost of combining.
bool worth_splitting(const Problem& p, const TileConfig& tile, int split) {
  const int tiles = ceil_div(p.m, kBlockM) * ceil_div(p.n, tile.block_n);
  // Groups of SMs (GPCs) have an even number of SMs, so clusters of three leave some SMs without a CTA.
  const int room = split == 2 ? p.num_sms : p.num_sms * 7 / 8;
  return supports_split(tile) && tiles * split <= room &&
         ceil_div(p.k, tile.block_k()) >= kMinSplitBlocks * split;
}

bool worth_a_cluster(const Problem& p, const TileConfig& tile, Cluster cluster) {
  switch (cluster) {
    case Cluster::kNone:
      return true;
    case Cluster::kPairM:
      return tile.block_n >= kMinPairM;
    case Cluster::kPairN:
      return p.world_size == 1 && tile.block_n >= kMinPairN;  // not measured where ranks exchange rows
    default:
      return p.world_size == 1 && worth_splitting(p, tile, one_tile(cluster).split());
  }
}

// Whether kernels for the problem's operands and result are compiled for the tile.
bool serves(const Problem& p, const TileConfig& tile) {
  if (tile.operand_bytes() != p.operand_bytes) return false;
  return supports(tile, p.world_size > 1 && !p.gathers, p.gathers) && (!p.promotes || tile.promotes());
}

// Modelled time of one candidate, in microseconds.
double model_time_us(const Problem& p, int config, Cluster cluster) {
  const TileConfig& tile = kTileConfigs[config];
  const int m_tiles = ceil_div(p.m / p.world_size, kBlockM);
  const int n_tiles = ceil_div(p.n, tile.block_n);
  const TileOrder order = {m_tiles, n_tiles, p.world_size, 0, cluster, 1};
  const int slots = p.num_sms / order.cluster_size();
  const double waves = ceil_div(order.num_clusters(), slots);
  const double average = std::max(1.0, static_cast<double>(order.num_clusters()) / slots);

  // A pair shares one operand. Loads of an idle half are charged to real tiles: one row of tiles gains nothing.
  const int split = order.split();
  const double useful_ctas = static_cast<double>(m_tiles) * p.world_size * n_tiles * split;
  const double ctas_per_tile = order.num_clusters() * order.cluster_size() / useful_ctas;
  const double kbytes =
      0.128 * (kBlockM / order.cluster_n() + tile.block_n / order.cluster_m()) * ctas_per_tile;
  const double block_us = k_block_us(tile, kbytes, /*in_pairs=*/!p.block_scales);
  const bool sends = p.world_size > 1 && !p.gathers;
  const double fetched =
      static_cast<double>(kAccumulatorBytes) * kBlockM * tile.block_n * (split - 1) / split;
  const double meet_us = split > 1 ? kSplitUs + fetched / kSplitBytesPerUs : 0.0;
  const double tile_us =
      ceil_div(ceil_div(p.k, tile.block_k()), split) * block_us + (sends ? kSentTileUs : kTileUs);
  double time_us = kLaunchUs + tile_us * std::max(waves, kPower * average) + meet_us;
  if (!sends) {
    // SMs without a tile leave memory bandwidth unused.
    const double unused = std::sqrt(waves * slots * order.cluster_size() / useful_ctas);
    return std::max(time_us, kSmallLaunchUs + kTileUs + memory_us(p, kMemoryBytesPerUs) * unused + meet_us);
  }

  // Lower bound by the link: the transfer, then the waves of this rank's own tiles.
  const double tile_bytes = kBlockM * tile.block_n * kResultBytes;
  const double wire_bytes = static_cast<double>(p.m) * p.n * kResultBytes * (p.world_size - 1) / p.world_size;
  time_us = std::max(time_us, wire_bytes / kLinkBytesPerUs + time_us / p.world_size);
  // Remote tiles in the last wave: nothing is left to compute while they travel.
  const int remote_in_last_wave = order.num_remote_clusters() - (static_cast<int>(waves) - 1) * slots;
  if (remote_in_last_wave > 0)
    time_us += kArrivalUs + remote_in_last_wave * order.cluster_size() * tile_bytes / kLinkBytesPerUs;
  return time_us + kAddUs;
}

double swap_ab_time_us(const Problem& p, const SwapAbConfig& tile, int split, int sharers) {
  const int cluster_size = split * sharers;
  const int tiles = ceil_div(p.m, tile.rows * sharers) * ceil_div(p.n, kSwapAbN);  // of a cluster
  const double room = cluster_size > 2 ? kWideRoom : 1.0;
  const int clusters = std::max(1, static_cast<int>(p.num_sms * room) / cluster_size);
  const int rounds = ceil_div(tiles, clusters);
  const SwapAbBlock& block = tile.k_blocks > 1 ? kTwoBlocks : kSingleBlock;
  const int k_blocks = ceil_div(swap_ab_stage_blocks(tile, p.k), split) * tile.k_blocks;
  const int rows_bytes = std::min(p.m, tile.rows) * kBlockBytes;
  const double l2_bytes = static_cast<double>(kSwapAbWeightBytes) / sharers + rows_bytes;
  double l2_us = std::min(tiles, clusters) * cluster_size * l2_bytes / kL2BytesPerUs;
  double end_us = kSwapAbTileUs;
  if (split > 1) end_us += kMeetRowUs * tile.rows;
  if (cluster_size > 2) end_us += kWideUs * std::log2(cluster_size / 2);
  const double unused =
      std::pow(static_cast<double>(rounds) * p.num_sms / cluster_size / tiles, block.unused);
  double weight_us = memory_us(p, kSwapAbMemoryBytesPerUs) * unused;
  if (sharers > 1) weight_us *= kPairMemory;
  if (tile.k_blocks > 1 && tile.rows == kSwapAbConfigs[0].rows) weight_us *= kTwoBlocksMemory;
  // Loads continue while a tile ends, but not for as long as combining partial tiles three times takes.
  const int ends = split > 1 && tile.rows > 2 * swap_ab_meeting_rows(tile) ? rounds : 1;
  double block_us = block.us + (block.row_us + (tile.is_fp8 ? kPromoteRowUs : 0.0)) * tile.rows;
  if (tile.stages * tile.k_blocks <= kFewStages) {
    block_us = kFewStagesUs + l2_us * kL2BytesPerUs / kFewStagesL2BytesPerUs;
    l2_us = 0.0;
  }
  const double math_us = rounds * (k_blocks * block_us + end_us);
  const double load_us = std::max(static_cast<double>(rounds) * k_blocks * l2_us, weight_us) + ends * end_us;
  const double time_us = kSwapAbLaunchUs + std::max(math_us, load_us);
  if (!p.all_reduced) return time_us;
  const bool meets_twice = split > 1 && tile.rows > swap_ab_meeting_rows(tile);
  const double left = meets_twice ? kLeftByMeetings : rounds > 1 ? kLeftByRounds : 1.0;
  return time_us + kExchangeUs + left * kResultBytes * p.m * p.n / kExchangeBytesPerUs;
}

void consider_swap_ab(const Problem& p, Choice& best) {
  const auto consider = [&](const SwapAbConfig& tile, int split, int sharers) {
    const double time_us = swap_ab_time_us(p, tile, split, sharers);
    best.candidates.emplace_back(swap_ab_name(kFirstSwapAb + tile.id, split, sharers), time_us);
    if (time_us >= best.time_us) return;
    best.config = kFirstSwapAb + tile.id;
    best.cluster = Cluster::kNone;
    best.split = split;
    best.sharers = sharers;
    best.time_us = time_us;
  };
  int enough = 0;  // rows of the lowest tile that holds all rows; higher tiles would load rows for nothing
  for (const SwapAbConfig& tile : kSwapAbConfigs) {
    if (tile.is_fp8 != p.is_fp8() || (p.all_reduced && !supports_sum(tile))) continue;
    if (p.m <= tile.rows) {
      if (enough == 0) enough = tile.rows;
      if (tile.rows > enough) break;
      const int max_split = std::min({kMaxSplit, p.num_sms, swap_ab_stage_blocks(tile, p.k)});
      for (int split = 1; split <= (p.swiglu ? 1 : max_split); split *= 2) consider(tile, split, 1);
    } else if (p.m <= 2 * tile.rows && p.num_sms >= 2 && tile.in_pairs) {
      // Only pairs: two CTAs that each load the whole weight take a quarter longer for a k-block.
      consider(tile, 1, 2);
    }
  }
}

Choice sorted(Choice choice, int packed_choice) {
  FLUX_CHECK(choice.config >= 0, packed_choice);
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  return choice;
}

}  // namespace

std::string config_name(int config, Cluster cluster) {
  const TileConfig& tile = kTileConfigs[config];
  std::string name =
      std::to_string(kBlockM) + "x" + std::to_string(tile.block_n) + "x" + std::to_string(tile.stages);
  if (tile.operand_bytes() == 1 && !tile.promotes()) name += " fast";
  if (cluster == Cluster::kPairM) name += " pair-m";
  if (cluster == Cluster::kPairN) name += " pair-n";
  const int split = one_tile(cluster).split();
  if (split > 1) name += " split-" + std::to_string(split);
  return name;
}

double k_block_us(const TileConfig& tile, double kbytes, bool in_pairs) {
  const double promote_us = !tile.promotes()                   ? 0.0
                            : in_pairs && promotes_pairs(tile) ? kPromoteUs / 2
                            : in_pairs                         ? kPromoteAloneUs
                            : tile.block_n == 192              ? kPromote192Us
                                                               : kPromoteUs;
  return kKblockUs + kMathUs * tile.block_n + (tile.is_fp8() ? kFp8L2Us : kL2Us) * kbytes + promote_us;
}

std::string swap_ab_name(int config, int split, int sharers) {
  const SwapAbConfig& tile = kSwapAbConfigs[config - kFirstSwapAb];
  return "swap-ab " + std::to_string(kSwapAbN) + "x" + std::to_string(tile.rows) + "x" +
         std::to_string(tile.stages) + " split " + std::to_string(split) + (sharers > 1 ? " pair" : "");
}

Choice select(const Problem& p, int packed_choice) {
  const bool fixed = packed_choice >= 0;
  const int fixed_config = packed_choice & 0xFF, fixed_cluster = packed_choice >> 8 & 0xFF;
  const int fixed_raster = fixed ? packed_choice >> 16 & 0xFF : 0;
  Choice best;
  // Mostly, a plan has already made the choice. No candidate is scored or named on the path of a launch.
  const bool fixes_all = fixed && fixed_cluster > 0 && fixed_raster > 0;
  if (fixed && (fixes_all || fixed_config >= kFirstSwapAb)) {
    best.config = fixed_config;
    best.reason = "fixed";
    if (fixed_config >= kFirstSwapAb) {
      best.split = std::max(1, fixed_cluster);
      best.sharers = std::max(1, fixed_raster);
    } else {
      best.cluster = static_cast<Cluster>(fixed_cluster);
      best.group_m = fixed_raster;
    }
    return best;
  }
  best.time_us = INFINITY;
  const bool swap_ab = !fixed && p.world_size == 1 && p.m <= kMaxSwapAbRows;
  if (swap_ab) {
    consider_swap_ab(p, best);
    if (p.m <= kAlwaysSwapAbRows) return sorted(best, packed_choice);
  }
  if (p.all_reduced || (p.swiglu && !fixed)) return sorted(best, packed_choice);
  for (const TileConfig& tile : kTileConfigs) {
    if ((fixed && tile.id != fixed_config) || !serves(p, tile)) continue;
    if (p.transpose_weight && !supports_transposed_weight(tile)) continue;
    for (const Cluster cluster : kClusters) {
      if (one_tile(cluster).cluster_size() > p.num_sms) continue;
      const bool is_free = !fixed || fixed_cluster == 0;
      if (is_free ? !worth_a_cluster(p, tile, cluster) : static_cast<int>(cluster) != fixed_cluster) continue;
      const double time_us = model_time_us(p, tile.id, cluster);
      best.candidates.emplace_back(config_name(tile.id, cluster), time_us);
      if (time_us < best.time_us) {  // ties: the first is the widest tile, which takes least energy
        best.config = tile.id;
        best.cluster = cluster;
        best.split = best.sharers = 0;
        best.time_us = time_us;
      }
    }
  }
  best = sorted(best, packed_choice);
  if (best.swaps_ab()) return best;
  best.group_m = fixed_raster > 0 ? fixed_raster : best.cluster == Cluster::kPairM ? 8 : 16;
  return best;
}

}  // namespace flux::gemm
