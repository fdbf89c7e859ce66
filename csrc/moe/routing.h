// Routing: computes from every token's experts the order of rows, the tokens that ranks send each other, and the tile
// schedule, in arrays of fixed maximum sizes: the host needs no counts. plan.h defines each number. route_on_host is
// the sequential reference: the CPU path uses it, and tests compare the kernel (routing.cu) with it.
#pragma once

#include <numeric>
#include <vector>

#include "moe/plan.h"

namespace flux::moe {

// All int32. Unused entries are -1, or 0 in `tiles`.
struct RoutingArrays {
  int32_t* offsets;    // [local_experts + 1]: first row of each expert, then the number of rows
  int32_t* counts;     // [local_experts][world_size]: rows of each expert from the source of each step
  int32_t* rows;       // [max_rows]: source * max_tokens + slot row, of each sorted row
  int32_t* positions;  // [world_size][max_tokens][top_k]: sorted row of each choice of each token
  int32_t* incoming;   // [world_size][max_tokens]: token of each slot row that a source sends
  int32_t* received;   // [world_size]: slot rows that each source sends
  int32_t* sent;       // [ep_size][max_tokens]: slot row of each token of this rank at a slice
  int32_t* firsts;   // [ep_size][max_tokens]: the first expert of a slice that chose each token of this rank
  TileEntry* tiles;  // [max_tiles]
  int32_t* num_tiles;  // [1]: tile rows of the schedule
};

constexpr int kRoutingArrays = 10;

// array(i): the address of array number i.
template <class Array>
RoutingArrays routing_arrays(const Array& array) {
  const auto words = [&](int i) { return static_cast<int32_t*>(array(i)); };
  return {words(0), words(1), words(2),
          words(3), words(4), words(5),
          words(6), words(7), static_cast<TileEntry*>(array(8)),
          words(9)};
}

// The lowest expert of a slice among the experts `ids` of a token, or -1.
inline int first_expert(const Layout& layout, const int32_t* ids, int slice) {
  int first = -1;
  for (int j = 0; j < layout.top_k; ++j) {
    const int expert = layout.local_expert(ids[j], slice);
    if (expert >= 0 && (first < 0 || expert < first)) first = expert;
  }
  return first;
}

// Writes the slot row of each token of a source that a slice needs, or -1; returns the number of slot rows.
inline int number_tokens(const Layout& layout, const int32_t* ids, int slice, bool compact, int32_t* slots) {
  int next = 0;
  for (int token = 0; token < layout.max_tokens; ++token) {
    slots[token] = -1;
    if (first_expert(layout, ids + token * layout.top_k, slice) < 0) continue;
    slots[token] = compact ? next : token;
    next = slots[token] + 1;
  }
  return next;
}

// ids: [world_size][max_tokens][top_k], the choices of all ranks; invalid expert ids are not routed.
inline void route_on_host(const Layout& layout, int block_m, const int32_t* ids, const RoutingArrays& out) {
  const int experts = layout.local_experts(), steps = layout.world_size, k = layout.top_k;
  const int slice = layout.slice_of(layout.rank);

  // The local expert of a choice, or -1 if another slice holds it. `first`: the token's first choice of that expert.
  const auto choice = [&](int64_t token, int j, int* first) {
    const int32_t* mine = ids + token * k;
    const int expert = layout.local_expert(mine[j], slice);
    *first = 0;
    while (expert >= 0 && mine[*first] != mine[j]) ++*first;
    return expert;
  };

  for (int i = 0; i < experts * steps; ++i) out.counts[i] = 0;
  for (int source = 0; source < layout.world_size; ++source) {
    const int64_t begin = static_cast<int64_t>(source) * layout.max_tokens;
    for (int64_t token = begin; token < begin + layout.max_tokens; ++token) {
      for (int j = 0, first; j < k; ++j) {
        const int expert = choice(token, j, &first);
        if (expert >= 0 && first == j) ++out.counts[expert * steps + layout.step_of(source)];
      }
    }
  }
  std::vector<int> next(experts * steps);  // [expert][step]: row of the next token
  int row = 0;
  for (int expert = 0; expert < experts; ++expert) {
    out.offsets[expert] = row;
    for (int step = 0; step < steps; ++step) {
      next[expert * steps + step] = row;
      row += out.counts[expert * steps + step];
    }
  }
  out.offsets[experts] = row;

  std::vector<int32_t> slots(layout.max_tokens);
  for (int source = 0; source < layout.world_size; ++source) {
    const int64_t begin = static_cast<int64_t>(source) * layout.max_tokens;
    const bool compact = layout.compacts(source, layout.rank);
    out.received[source] = number_tokens(layout, ids + begin * k, slice, compact, slots.data());
    for (int token = 0; token < layout.max_tokens; ++token) out.incoming[begin + token] = -1;
    for (int token = 0; token < layout.max_tokens; ++token) {
      if (slots[token] >= 0) out.incoming[begin + slots[token]] = token;
    }
    for (int64_t token = begin; token < begin + layout.max_tokens; ++token) {
      for (int j = 0, first; j < k; ++j) {
        const int expert = choice(token, j, &first);
        int32_t& position = out.positions[token * k + j];
        position = expert < 0 ? -1 : out.positions[token * k + first];
        if (expert < 0 || first != j) continue;
        position = next[expert * steps + layout.step_of(source)]++;
        out.rows[position] = static_cast<int32_t>(begin) + slots[token - begin];
      }
    }
  }
  for (int i = row; i < layout.max_rows(); ++i) out.rows[i] = -1;

  const int32_t* own = ids + static_cast<int64_t>(layout.rank) * layout.max_tokens * k;
  for (int to = 0; to < layout.ep_size; ++to) {
    const int64_t begin = static_cast<int64_t>(to) * layout.max_tokens;
    number_tokens(layout, own, to, layout.ep_size > 1, out.sent + begin);
    for (int token = 0; token < layout.max_tokens; ++token)
      out.firsts[begin + token] = first_expert(layout, own + token * k, to);
  }
  const int early_experts = make_send_order(layout).early_experts();
  int base = 0;
  for (const bool early : {true, false}) {
    for (int expert = 0; expert < experts; ++expert) {
      const int32_t* sources = out.counts + expert * steps;
      const int rows = std::accumulate(sources, sources + steps, 0);
      const int before = early_tiles(expert, early_experts, sources[0], rows, block_m);
      const int first = early ? 0 : before;
      const int count = early ? before : ceil_div(rows, block_m) - before;
      for (int i = 0; i < count; ++i) out.tiles[base + i] = make_entry(expert, first, count, base, i);
      base += count;
    }
  }
  *out.num_tiles = base;
  for (int i = *out.num_tiles; i < layout.max_tiles(block_m); ++i) out.tiles[i] = {0, 0, 0, 0};
}

}  // namespace flux::moe
