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
  int world_size = 1;     // 1: plain GEMM; else rows are world_size shards, and tiles of other shards travel
  int num_sms;
  bool gathers = false;      // rows of x travel instead of tiles; results stay local
  bool all_reduced = false;  // results are summed over ranks, in the same launch
  bool swiglu = false;       // columns gate others (GemmArgs::swiglu)
  // fp8 operands have one byte. With block scales, or if they may not be fast, sums are promoted (tile_config.h).
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

}  // namespace flux::gemm
