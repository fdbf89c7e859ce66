// Which tile a CTA computes next. Pure functions: the loader, storer and math warps of the kernel, the host
// plans and the CPU tests all call the same code.
//
// The rows of the problem are `world_size` shards; tiles never straddle two shards. This rank's own shard is a
// region apart, and so are the others together.
//
// Where tiles travel to their owners, the others come first. They take turns, starting with rank+1: at any time
// a rank sends to all of its peers, and no peer is sent to by all. Where copy engines carry them, they come one
// shard after the other, rank+1, rank+2 and so on: with everybody sending to one peer at a time, and each to
// another one, links carry 350 GB/s, with everybody sending to all at once 220 (4 GPUs behind a switch). Where
// x is gathered, the own shard comes first, then one shard after the other in the order of their arrival,
// rank-1, rank-2 and so on.
//
// Where tiles travel, own tiles wait for the peers' tiles: a CTA, or a pair of CTAs that share loads, must
// therefore never have a remote tile behind an own one, or ranks could wait for each other in a circle. That
// is why the two regions are rastered apart. Plain GEMM is the case world_size = 1: one region.
//
// Inside a region rows are walked in groups of `group_m`, all columns of a group before the next group, so
// that the tiles in flight at one time cover a near-square patch whose A rows and W columns stay in L2.
#pragma once

#include "gemm/tile_config.h"

namespace flux::gemm {

struct Tile {
  int shard;   // the rank that owns these rows
  int m, n;    // tile coordinates inside the shard
  bool valid;  // false: the idle half of a CTA pair at the edge of a region
};

// What a cluster of CTAs shares: kPairM the loads of W (tiles one above the other), kPairN those of x, and
// kSplit2 and so on one tile, of which each multiplies a part of K (split_k.cuh).
enum class Cluster : int { kNone = 1, kPairM = 2, kPairN = 3, kSplit2 = 4, kSplit3 = 5 };
constexpr int kMinKSplit = 2, kMaxKSplit = 3;

enum class Peers { kTakeTurns, kOneByOne, kGathered };

struct TileOrder {
  int m_tiles;  // per shard
  int n_tiles;
  int world_size;
  int rank;
  Cluster cluster;
  int group_m;  // in clusters
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
    if (row >= rows) row = rows - 1;  // the idle half loads what its partner loads, and drops it
    if (column >= n_tiles) column = n_tiles - 1;
    const int others = world_size - 1;
    const bool turns = peers == Peers::kTakeTurns;
    const int nth = turns ? row % others : row / m_tiles;  // of the other shards
    tile.shard = own ? rank : gathers ? (rank + others - nth) % world_size : (rank + 1 + nth) % world_size;
    tile.m = own ? row : turns ? row / others : row % m_tiles;
    tile.n = column;
    return tile;
  }
};

}  // namespace flux::gemm
