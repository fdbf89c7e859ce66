// What cases of mixtures of experts share.
#pragma once

#include <algorithm>
#include <cmath>

#include "moe/moe.h"
#include "moe/plan.h"
#include "moe/sm90_grouped_gemm.cuh"
#include "ranks.h"
#include "routing.h"

namespace cases {

using flux::moe::Activation;

inline std::string words(const Choices& choices) {
  const Layout& layout = choices.layout;
  const int late = sim::machine.config.late_rank;
  return text(layout.world_size, " ranks, ", layout.ep_size, " slices, ", layout.num_experts,
              " experts, top ", layout.top_k, ", ", layout.max_tokens, " tokens, ", choices.name,
              late >= 0 ? text(", rank ", late, " late, ") : ", ", sim::machine.config.resident, " resident");
}

inline int divisor(Random& random, int number) {
  int found = random.between(1, number);
  while (number % found != 0) found = random.between(1, number);
  return found;
}

// The activation of exact sums, as kernels compute it in fp32.
inline std::vector<float> activated(const Sums& sums, int n, Activation activation) {
  const auto silu = [](float x) { return x / (1.0f + std::exp(-x)); };
  std::vector<float> result;
  for (size_t row = 0; row < sums.size() / n; ++row) {
    const int* const at = &sums[row * n];
    for (int i = 0; i < (activation == Activation::kSwiglu ? n / 2 : n); ++i) {
      const auto x = static_cast<float>(at[i]);
      if (activation == Activation::kSilu) {
        result.push_back(silu(x));
      } else if (activation == Activation::kGelu) {
        result.push_back(0.5f * x * (1.0f + erff(x * 0.70710678f)));
      } else if (activation == Activation::kSwiglu) {
        result.push_back(silu(x) * static_cast<float>(at[n / 2 + i]));
      } else {
        result.push_back(x);
      }
    }
  }
  return result;
}

// Columns of an expert's weight for about `tiles` tiles.
inline int draw_columns(Random& random, int config, Activation activation, int tiles) {
  const bool swiglu = activation == Activation::kSwiglu;
  const int block_n = flux::gemm::kTileConfigs[config].block_n / (swiglu ? 2 : 1);
  const int n = std::max(8, block_n * random.between(1, tiles) - 8 * random.below(block_n / 8));
  return swiglu ? 2 * n : n;
}

// Rows of x sorted by expert, on device 0; indexed: in any order, with repetitions.
struct SortedRows {
  bool indexed;
  std::vector<int32_t> offsets = {0}, rows;
  int room, m;  // rows of the result, of which the last ones may be no expert's; rows of x
  int before;   // rows in front of these
  const int32_t *device_offsets, *device_rows;

  // count(): how many rows the next expert has.
  template <class Count>
  SortedRows(Random& random, int experts, bool indexed, const Count& count, int before = 0)
      : indexed(indexed), before(indexed ? before : 0) {
    for (int expert = 0; expert < experts; ++expert) offsets.push_back(offsets.back() + count());
    room = offsets.back() + random.below(3) * 50;
    m = indexed ? 50 : std::max(1, offsets.back());
    for (int row = 0; row < offsets.back(); ++row) rows.push_back(indexed ? random.below(m) : row);
    device_offsets = copied(offsets, 0, "offsets");
    std::vector<int32_t> places = rows;
    for (int32_t& place : places) place += this->before;
    device_rows = copied(places, 0, "rows");
  }

  int experts() const { return static_cast<int>(offsets.size()) - 1; }
  std::string words() const {
    return text(experts(), " experts, ", offsets.back(), " rows", before > 0 ? ", far" : "",
                indexed ? ", indexed, " : ", ");
  }
  void give(flux::moe::GroupedGemmArgs& args) const {
    args.offsets = device_offsets;
    args.rows = indexed ? device_rows : nullptr;
    args.num_rows = room;
    args.schedule =
        static_cast<int32_t*>(sim::allocate(flux::moe::schedule_words(room, experts()) * 4, 0, "schedule"));
  }
  // use(expert, row of x), in the order of the result.
  template <class Use>
  void for_each(const Use& use) const {
    for (int expert = 0; expert < experts(); ++expert) {
      const auto at = expert;
      for (int row = offsets[at]; row < offsets[at + 1]; ++row) use(expert, rows[row]);
    }
  }
};

// Weights of experts, each [n, k], or [k, n] if transposed. Behind each lie rows of NaN, or none.
struct Weights {
  int experts, n, k;
  bool transposed;
  int step;  // rows from one expert to the next
  Values values;

  Weights(Random& random, int device, int experts, int n, int k, bool transposed, DType dtype)
      : experts(experts),
        n(n),
        k(k),
        transposed(transposed),
        step((transposed ? k : n) + random.below(2) * 24),
        values(device, "weight", experts * step, transposed ? n : k, 8 * random.below(2)) {
    values.fill(random, dtype, 1);
    for (int row = 0; row < values.rows; ++row) {
      uint16_t* const at = values.data + static_cast<int64_t>(row) * values.stride;
      if (row % step >= (transposed ? k : n)) std::fill(at, at + values.columns, Values::kUntouched);
    }
  }
  void give(flux::moe::GroupedGemmArgs& args) const {
    args.transpose_weight = transposed;
    args.weight = {{values.data, transposed ? k : n, values.columns, values.stride},
                   experts,
                   static_cast<int64_t>(step) * values.stride};
  }
  // Appends a row of x, times the weight of an expert.
  void multiply_row(const int* x, int expert, Sums& to) const {
    for (int column = 0; column < n; ++column) {
      int sum = 0;
      for (int i = 0; i < k; ++i) {
        const int row = expert * step + (transposed ? i : column);
        sum += x[i] * values.at(row, transposed ? column : i);
      }
      to.push_back(sum);
    }
  }
  std::string words() const { return text(n, " x ", k, transposed ? ", [K, N]" : ", [N, K]"); }
};

// How many ranks, slices, experts and tokens the layers have. many: ranks, so that everything else is small.
struct LayersDraw {
  Layout layout;
  DType dtype;
  bool many;
};

inline LayersDraw draw_layers(Random& random) {
  const int world_size = random.one_of({2, 2, 2, 3, 4, 8});
  const bool many = world_size > 4;
  const int ep_size = random.below(2) == 0 ? world_size : divisor(random, world_size);
  const int top_k = random.between(1, 4);
  const auto dtype = draw_dtype(random);
  const int num_experts = ep_size * random.between(1, 4);
  const int max_tokens = many ? random.between(1, 12) : random.one_of({1, 7, 40, 64, 150}) / world_size + 1;
  return {{world_size, 0, ep_size, num_experts, top_k, max_tokens}, dtype, many};
}

// Signals of each source that both layers need; n, config: of layer 1.
inline int layer_signals(const Layout& layout, int n, int config, int tiles_per_chunk) {
  const int tiles = flux::moe::ceil_div(n, flux::gemm::kTileConfigs[config].block_n);
  const flux::moe::ColumnChunks chunks = {tiles, tiles_per_chunk};
  const int block_rows = Layout::block_rows(layout.max_tokens);
  return std::max(make_send_order(layout).signals(),
                  Layout::blocks_of(layout.max_tokens, block_rows) * chunks.count());
}

// Where the token in a sorted row is.
struct Place {
  int source, token;
};

inline Place place_of(const Layout& layout, const RoutingArrays& routing, int row) {
  const int source = routing.rows[row] / layout.max_tokens, slot_row = routing.rows[row] % layout.max_tokens;
  if (source == layout.rank) return {source, slot_row};
  return {source, routing.incoming[source * layout.max_tokens + slot_row]};
}

// The sums that layer 1 must give a rank's tokens: of rounded products, with contributions of the ranks in their order,
// rounded if sent. products: of all sorted rows of each rank, [rows, n].
template <class OfRank>
std::vector<float> sums_of_tokens(const std::vector<OfRank>& ranks, const Choices& choices, int rank,
                                  const std::vector<Sums>& products, int n, DType dtype) {
  const int top_k = choices.layout.top_k;
  std::vector<float> all;
  for (int token = 0; token < choices.tokens[rank]; ++token) {
    std::vector<float> total(n);
    for (int owner = 0; owner < choices.layout.world_size; ++owner) {
      const Layout layout = choices.of(owner);
      std::vector<float> part(n);
      for (int j = 0; j < top_k; ++j) {
        const auto at = (choices.first(rank) + token * top_k + j);
        if (layout.local_expert(choices.ids[at], layout.slice_of(owner)) < 0) continue;
        const int position = ranks[owner].routing.out.positions[at];
        const int* const product = &products[owner][position * n];
        for (size_t i = 0; i < part.size(); ++i) {
          const uint16_t stored = rounded(product[i], dtype);
          part[i] += choices.weights[at] * widened(stored, dtype);
        }
      }
      for (size_t i = 0; i < part.size(); ++i) {
        total[i] += owner == rank ? part[i] : rounded_to(part[i], dtype);
      }
    }
    all.insert(all.end(), total.begin(), total.end());
  }
  return all;
}

// What both layers multiply, in which tiles.
struct LayerSizes {
  int k0, n0, k1, n1, config0, config1;
  Activation activation;
  int num_sms, comm_ctas, tiles_per_chunk;

  int columns0() const { return activation == Activation::kSwiglu ? n0 / 2 : n0; }
  std::string words() const {
    return text(n0, " x ", k0, ", activation ", static_cast<int>(activation), ", ", n1, " x ", k1, ", tiles ",
                config0, " and ", config1, ", ", num_sms, " SMs, ", comm_ctas, " communicate, chunks of ",
                tiles_per_chunk);
  }
};

// A rank's call of the layers that are wanted. give(args, layer): its operands.
template <class OfRank, class Give>
void call_layers(const Choices& choices, int rank, const OfRank& own, const LayerSizes& sizes, DType dtype,
                 const flux::runtime::SymmBuffer& symm, bool first, bool second, const Give& give) {
  const Layout mine = choices.of(rank);
  flux::moe::GroupedGemmArgs args = {};
  give(args, 0);
  args.num_rows = mine.max_rows();
  args.activation = static_cast<int>(sizes.activation);
  args.out = own.hidden.data;
  args.dtype = dtype;
  args.config = sizes.config0;
  args.num_sms = sizes.num_sms;
  if (first) flux::moe::ag_scatter_gemm(args, mine, own.routing.out, symm, nullptr);
  give(args, 1);
  args.activation = 0;
  args.out = own.products.data;
  args.config = sizes.config1;
  const flux::moe::CombineArgs combine = {own.routing.weights, own.out.data, choices.tokens[rank],
                                          sizes.tiles_per_chunk, sizes.comm_ctas};
  if (second) flux::moe::gemm_gather_rs(args, combine, mine, own.routing.out, symm, nullptr);
}

// Fails unless all calls of the layers gave what they must. multiply(of, rank, layer, row, expert, sums) appends a row of
// a rank's operands times the weight of an expert of `rank`.
template <class OfRank, class Multiply>
void expect_layers(const std::vector<Choices>& calls, const std::vector<std::vector<OfRank>>& all,
                   const LayerSizes& sizes, DType dtype, bool first, bool second, const Multiply& multiply) {
  for (int call = 0; call < calls.size(); ++call) {
    const Choices& choices = calls[call];
    const std::vector<OfRank>& ranks = all[call];
    std::vector<Sums> products(ranks.size());  // of all sorted rows, in layer 1
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const RoutingArrays& routing = ranks[rank].routing.out;
      Sums hidden;
      for (int expert = 0; expert < choices.layout.local_experts(); ++expert) {
        for (int row = routing.offsets[expert]; row < routing.offsets[expert + 1]; ++row) {
          const Place place = place_of(choices.of(rank), routing, row);
          if (first) multiply(ranks[place.source], rank, 0, place.token, expert, hidden);
          if (second) multiply(ranks[rank], rank, 1, row, expert, products[rank]);
        }
      }
      const OfRank& found = ranks[rank];
      if (first)
        expect(found.hidden, activated(hidden, sizes.n0, sizes.activation), dtype,
               name_of(call, rank, "hidden"));
      if (second) expect(found.products, products[rank], dtype, name_of(call, rank, "products"));
    }
    for (int rank = 0; second && rank < ranks.size(); ++rank) {
      expect(ranks[rank].out, sums_of_tokens(ranks, choices, rank, products, sizes.n1, dtype), dtype,
             name_of(call, rank, "out"));
    }
  }
}

}  // namespace cases
