// The choices of tokens of a mixture of experts, and the routing of them in the memory of a rank.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "case.h"
#include "moe/moe.h"
#include "moe/routing.h"

namespace cases {

using flux::moe::Layout;
using flux::moe::RoutingArrays;

constexpr int kInvalid = 1 << 20;                          // an expert id that nobody has
const float kOtherNan = std::bit_cast<float>(0x7FFF7FFF);  // what ranks agree on for a weight of all ones

// ids and weights [world_size][max_tokens][top_k]; ranks have fewer tokens than the maximum, or none.
struct Choices {
  Layout layout;  // of rank 0
  Sums tokens;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  const char* name;

  // `only`: the expert that all tokens choose, if not -1.
  Choices(Random& random, const Layout& layout, int only = -1) : layout(layout) {
    const char* const names[] = {"even", "one expert", "few experts", "some invalid"};
    const int style = only >= 0 ? 1 : random.below(4);
    name = names[style];
    const int favourite = only >= 0 ? only : random.below(layout.num_experts);
    for (int rank = 0; rank < layout.world_size; ++rank) {
      tokens.push_back(random.below(3) == 0 ? random.below(layout.max_tokens + 1) : layout.max_tokens);
      for (int token = 0; token < layout.max_tokens; ++token) {
        for (int j = 0; j < layout.top_k; ++j) {
          int id = random.below(layout.num_experts);  // a token may choose an expert twice
          if (style == 1) id = favourite;
          if (style == 2) id = (favourite + random.below(2)) % layout.num_experts;
          if (style == 3 && random.below(4) == 0) id = random.one_of({-1, layout.num_experts, kInvalid});
          const bool there = token < tokens.back();
          ids.push_back(there ? id : kInvalid);
          weights.push_back(there ? random.one_of({1.0f, 2.0f, 0.5f, -1.0f}) : 0.0f);
        }
      }
    }
  }

  Layout of(int rank) const {
    Layout mine = layout;
    mine.rank = rank;
    return mine;
  }
  int64_t first(int rank) const { return static_cast<int64_t>(rank) * layout.max_tokens * layout.top_k; }
};

// The arrays of a routing in a rank's memory, uninitialised: every word has a value that no routing has.
struct Routing {
  static constexpr int32_t kUntouched = -12345;
  struct Array {
    const char* name;
    int32_t* words;
    int64_t count;
  };
  std::vector<Array> arrays;
  RoutingArrays out = {};
  float* weights;

  Routing(const Layout& layout, int device) {
    const int64_t world = layout.world_size, tokens = layout.max_tokens, experts = layout.local_experts();
    const auto take = [&](const char* name, int64_t count) {
      auto* const words = allocate<int32_t>(count, device, name);
      std::fill(words, words + count, kUntouched);
      arrays.push_back({name, words, count});
      return words;
    };
    out.offsets = take("offsets", experts + 1);
    out.counts = take("counts", experts * world);
    out.rows = take("rows", layout.max_rows());
    out.positions = take("positions", world * tokens * layout.top_k);
    out.incoming = take("incoming", world * tokens);
    out.received = take("received", world);
    out.sent = take("sent", layout.ep_size * tokens);
    out.firsts = take("firsts", layout.ep_size * tokens);
    out.tiles =
        reinterpret_cast<flux::moe::TileEntry*>(take("tiles", 4 * layout.max_tiles(flux::gemm::kBlockM)));
    out.num_tiles = take("num_tiles", 1);
    weights = reinterpret_cast<float*>(take("weights", world * tokens * layout.top_k));
  }

  // What every rank must know; computed by the sequential reference.
  void fill_on_host(const Choices& choices, int rank) const {
    route_on_host(choices.of(rank), flux::gemm::kBlockM, choices.ids.data(), out);
    std::copy(choices.weights.begin(), choices.weights.end(), weights);
    for (const Array& array : arrays) sim::mark_written(array.words, array.count * 4);
  }

  void expect(const Routing& right, const std::string& where) const {
    for (size_t i = 0; i < arrays.size(); ++i) {
      for (int64_t at = 0; at < arrays[i].count; ++at) {
        const int32_t found = arrays[i].words[at], expected = right.arrays[i].words[at];
        if (found == expected) continue;
        wrong(where, ": ", arrays[i].name, "[", at, "] is ", found, ", and not ", expected);
      }
    }
  }
};

// The choices of one rank's tokens in its memory, as a caller passes them.
struct OwnTokens {
  flux::moe::OwnChoices own = {};

  OwnTokens(const Choices& choices, int rank, bool wide) {
    const int64_t count = static_cast<int64_t>(choices.tokens[rank]) * choices.layout.top_k;
    const int64_t first = choices.first(rank);
    std::vector<int32_t> narrow;
    std::vector<int64_t> ids;
    std::vector<float> weights;
    for (int64_t i = first; i < first + count; ++i) {
      narrow.push_back(choices.ids[i]);
      ids.push_back(choices.ids[i] == kInvalid ? int64_t{1} << 32 : choices.ids[i]);
      weights.push_back(choices.weights[i]);
      if (std::isnan(weights.back())) std::memset(&weights.back(), 0xFF, sizeof(float));
    }
    own.ids = wide ? static_cast<void*>(copied(ids, rank, "topk_ids")) : copied(narrow, rank, "topk_ids");
    own.wide = wide;
    own.weights = copied(weights, rank, "topk_weights");
    own.tokens = choices.tokens[rank];
  }
};

}  // namespace cases
