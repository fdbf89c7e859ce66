// Selects the tile shape and the raster of a GEMM. A cost model scores every candidate; there is no table of shapes
// and no tuning file. Its constants are fitted to measurements (docs/design/cost-model.md).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gemm/tile_order.h"

namespace flux::gemm {

struct Problem {
  int m, n, k;            // the GEMM of this rank: [m, k] x [k, n]
  bool transpose_weight;  // weight stored as [K, N]
  int world_size;         // 1: plain GEMM; else rows are world_size shards, and tiles of other shards travel
  int num_sms;
  bool gathers = false;      // rows of x travel instead of tiles; results stay local
  bool all_reduced = false;  // results are summed over ranks, in the same launch if the tile allows it
};

struct Choice {
  int config;  // -1: the requested choice is not possible for this problem and number of SMs
  Cluster cluster;
  int group_m;     // group of the raster; for a swap-AB tile: number of CTAs that share its weight
  double time_us;  // modelled
  std::string reason;
  std::vector<std::pair<std::string, double>> candidates;  // name, time_us; best first
  int split = 0;  // swap-AB tiles (swap_ab.h): number of CTAs that split K; 0: not a swap-AB tile
  // If results are summed over ranks: whether the GEMM kernel also sums them.
  bool sums_in_launch = false;
  bool swaps_ab() const { return split > 0; }
};

std::string config_name(int config, Cluster cluster);
std::string swap_ab_name(int config, int split, int sharers);

// Modelled time of a k-block of a tile that loads `kbytes` of operands from the L2, in microseconds.
double k_block_us(int block_n, double kbytes);

// Modelled time of one candidate, in microseconds.
double model_time_us(const Problem& problem, int config, Cluster cluster);

// Packs a choice into one integer, the argument of the low-level ops (also for tests and sweeps). 0 for cluster or
// group_m leaves that part to the cost model; the packed value -1 leaves everything to it. For a swap-AB tile,
// `cluster` is the split of K, and `group_m` the number of CTAs that share the weight.
constexpr int pack_choice(int config, int cluster, int group_m) {
  return config | cluster << 8 | group_m << 16;
}

Choice select(const Problem& problem, int packed_choice = -1);

}  // namespace flux::gemm
