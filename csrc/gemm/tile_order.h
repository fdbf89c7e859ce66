// The order of tiles: pure functions that the roles of a kernel, host plans and CPU tests call.
//
// The rows are `world_size` shards, and no tile crosses their boundary. Two regions: this rank's shard, all others.
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
#pragma once

#include "gemm/tile_config.h"

namespace flux::gemm {

struct Tile {
  int shard;   // the rank that owns these rows
  int m, n;    // tile coordinates inside the shard
  bool valid;  // false: no tile; the idle CTA of a pair at the edge of a region
};

// What the CTAs of a cluster share. kPairM: the loads of W, for two tiles in one column. kPairN: the loads of x, for
// two tiles in one row. kSplit2, kSplit3: one tile, of which each CTA multiplies a part of K (split_k.cuh).
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

}  // namespace flux::gemm
