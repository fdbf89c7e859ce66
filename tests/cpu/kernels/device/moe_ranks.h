// The ranks of a mixture of experts in one process, with a routing, for programs that run both layers' device code.
#pragma once

#include <random>
#include <vector>

#include "launch.h"
#include "moe/routing.h"
#include "runtime/device/sync.cuh"

struct Case {
  int world_size, ep_size, num_experts, top_k, max_tokens;
};

constexpr int kBlockM = 8;

struct Rank {
  flux::moe::Layout layout;
  flux::runtime::SymmBuffer symm = {};
  flux::runtime::ErrorRecord error = {};
  std::vector<char> buffer;
  std::vector<int32_t> offsets, counts, rows, positions, incoming, received, sent, firsts, num_tiles;
  std::vector<flux::moe::TileEntry> tiles;

  void route(const std::vector<int32_t>& ids) {
    const flux::moe::Layout& l = layout;
    const int p = l.world_size, experts = l.local_experts();
    offsets.resize(experts + 1);
    counts.resize(experts * p);
    rows.resize(l.max_rows());
    positions.resize(p * l.max_tokens * l.top_k);
    incoming.resize(p * l.max_tokens);
    received.resize(p);
    sent.resize(l.ep_size * l.max_tokens);
    firsts.resize(l.ep_size * l.max_tokens);
    tiles.resize(l.max_tiles(kBlockM));
    num_tiles.resize(1);
    flux::moe::route_on_host(l, kBlockM, ids.data(),
                             {offsets.data(), counts.data(), rows.data(), positions.data(), incoming.data(),
                              received.data(), sent.data(), firsts.data(), tiles.data(), num_tiles.data()});
  }
};

inline std::vector<int32_t> choose_experts(const Case& c) {
  std::vector<int32_t> ids(c.world_size * c.max_tokens * c.top_k);
  std::mt19937 random(c.max_tokens);
  for (int32_t& id : ids) id = static_cast<int>(random() % (c.num_experts + 1)) - 1;  // -1: not routed
  return ids;
}

// Ranks whose slots hold rows of `row_bytes` and which have so many signals of each source.
inline std::vector<Rank> make_ranks(const Case& c, const std::vector<int32_t>& ids, int row_bytes,
                                    int signals) {
  std::vector<Rank> ranks(c.world_size);
  const int64_t peers = c.world_size - 1;
  for (int rank = 0; rank < c.world_size; ++rank) {
    Rank& r = ranks[rank];
    r.layout = {c.world_size, rank, c.ep_size, c.num_experts, c.top_k, c.max_tokens};
    r.route(ids);
    r.symm.rank = rank;
    r.symm.world_size = c.world_size;
    r.symm.signal_bytes = peers * signals * 4;
    r.symm.slot_bytes = peers * c.max_tokens * row_bytes;
    r.symm.timeout_ns = 60'000'000'000;
    r.buffer.resize(flux::runtime::kHeaderBytes + r.symm.signal_bytes + 2 * r.symm.slot_bytes);
  }
  for (Rank& r : ranks) {
    r.symm.error = &r.error;
    for (int peer = 0; peer < c.world_size; ++peer) {
      r.symm.peers[peer] = reinterpret_cast<uint64_t>(ranks[peer].buffer.data());
    }
  }
  return ranks;
}

// As for_all_ranks, and says which case was wrong.
template <class Body>
bool run_ranks(std::vector<Rank>& ranks, const char* what, const Case& c, const Body& body) {
  const bool all = for_all_ranks(static_cast<int>(ranks.size()), body);
  if (!all) {
    std::printf("%s wrong: %d ranks, ep_size %d, %d experts, %d tokens\n", what, c.world_size, c.ep_size,
                c.num_experts, c.max_tokens);
  }
  return all;
}
