#include "ops.h"

#include <algorithm>

#include "cuda_runtime_api.h"
#include "routing.h"

namespace cases {
namespace {

using flux::runtime::SymmBuffer;
using Mode = flux::runtime::Exchange::Mode;
using Matrices = std::vector<std::vector<Values>>;  // [call][rank]

// Operands of every call and rank.
Matrices add_inputs(const Setup& setup, Op& op, const char* name, int rows, int columns, int most = 1) {
  Matrices all(setup.calls);
  for (int call = 0; call < setup.calls; ++call) {
    for (int rank = 0; rank < setup.world_size; ++rank) {
      const Values& values = all[call].emplace_back(setup.filled(rank, name, rows, columns, most));
      op.inputs.push_back({call, rank, values.data, static_cast<int64_t>(rows) * columns * 2});
    }
  }
  return all;
}

Values& at(Matrices& all, int call, int rank) { return all[call][rank]; }

// Adds results of every call and rank; right(call, rank) tells what they must be.
template <class Right>
Matrices add_outputs(const Setup& setup, Op& op, const char* name, int rows, int columns,
                     const Right& right) {
  Matrices all(setup.calls);
  for (int call = 0; call < setup.calls; ++call) {
    for (int rank = 0; rank < setup.world_size; ++rank) {
      all[call].emplace_back(rank, name, rows, columns);
      op.outputs.push_back({call, rank, at(all, call, rank), right(call, rank), name_of(call, rank, name)});
    }
  }
  return all;
}

Sums stacked(const std::vector<Values>& parts, const std::function<Sums(const Values&)>& of) {
  Sums all;
  for (const Values& part : parts) append(all, of(part));
  return all;
}

Op all_gather(const Setup& setup) {
  Random& random = setup.random;
  const int rows = random.one_of({1, 130, 200}), k = 8 * random.between(1, 20), m = rows * setup.world_size;
  const auto layout = flux::ag_gemm::make_layout(m, k, setup.world_size);
  Op op = {"all_gather", sizes_of(layout)};
  op.can_copy = true;
  auto xs = add_inputs(setup, op, "x", rows, k);
  auto outs = add_outputs(setup, op, "gathered", m, k, [&](int call, int) {
    return stacked(xs[call], [](const Values& x) { return x.values; });
  });
  op.enqueue = [=](int rank, int call, const SymmBuffer& symm, uint32_t copy_epoch) mutable {
    const flux::ag_gemm::Transport transport = {copy_epoch, copy_epoch > 0 ? 128 : 0};
    flux::ag_gemm::all_gather(at(xs, call, rank).matrix(), at(outs, call, rank).matrix(), symm, transport,
                              flux::ag_gemm::Rows::kToSend, {}, nullptr);
  };
  return op;
}

// Matrix products of all ranks: weights [n, k] or [k, n], and x of each call.
struct Products {
  std::vector<Values> weights;
  Matrices xs;
  bool transposed;

  Products(const Setup& setup, Op& op, int m, int n, int k)
      : xs(add_inputs(setup, op, "x", m, k)), transposed(setup.transposed) {
    for (int rank = 0; rank < setup.world_size; ++rank) {
      weights.push_back(setup.filled(rank, "weight", transposed ? k : n, transposed ? n : k));
    }
  }
  Sums sum(int call) const {
    Sums all;
    for (size_t rank = 0; rank < weights.size(); ++rank) {
      const Sums part = multiply(xs[call][rank], weights[rank], transposed);
      all.resize(part.size());
      add(all, part);
    }
    return all;
  }
  flux::gemm::GemmArgs args(int call, int rank, const Values& out, DType dtype, int config) {
    return {at(xs, call, rank).matrix(),
            weights[rank].matrix(),
            transposed,
            out.matrix(),
            nullptr,
            dtype,
            config,
            4};
  }
};

Op ag_gemm(const Setup& setup) {
  Random& random = setup.random;
  const int rows = random.one_of({8, 130}), k = 8 * random.between(1, 12), n = 64,
            m = rows * setup.world_size;
  const auto layout = flux::ag_gemm::make_layout(m, k, setup.world_size);
  Op op = {"ag_gemm", sizes_of(layout)};
  Products products(setup, op, rows, n, k);
  auto outs = add_outputs(setup, op, "out", m, n, [&](int call, int rank) {
    const Values& weight = products.weights[rank];
    return stacked(products.xs[call],
                   [&](const Values& x) { return multiply(x, weight, products.transposed); });
  });
  auto gathered = add_outputs(setup, op, "gathered", m, k, [&](int call, int) {
    return stacked(products.xs[call], [](const Values& x) { return x.values; });
  });
  const int config = pack(random.one_of({5, 9}), Cluster::kNone, 1);
  op.enqueue = [=, dtype = setup.dtype](int rank, int call, const SymmBuffer& symm, uint32_t) mutable {
    flux::ag_gemm::ag_gemm(products.args(call, rank, at(outs, call, rank), dtype, config), symm, {0, 0},
                           false, nullptr);
    flux::ag_gemm::all_gather(at(products.xs, call, rank).matrix(), at(gathered, call, rank).matrix(), symm,
                              {0, 0}, flux::ag_gemm::Rows::kHere, {}, nullptr);
  };
  return op;
}

Op gemm_rs(const Setup& setup) {
  Random& random = setup.random;
  const int rows = random.one_of({8, 130}), k = 8 * random.between(1, 12), n = 64,
            m = rows * setup.world_size;
  const int id = random.one_of({5, 3});
  const auto layout = flux::gemm_rs::make_layout(m, n, setup.world_size, flux::gemm::kTileConfigs[id]);
  Op op = {"gemm_rs", sizes_of(layout)};
  op.can_copy = true;
  Products products(setup, op, m, n, k);
  auto outs = add_outputs(setup, op, "out", rows, n, [&](int call, int rank) {
    const Sums sum = products.sum(call);
    const auto first = sum.begin() + rank * rows * n;
    return Sums(first, first + rows * n);
  });
  const int config = pack(id, Cluster::kNone, 1);
  op.enqueue = [=, dtype = setup.dtype](int rank, int call, const SymmBuffer& symm,
                                        uint32_t copy_epoch) mutable {
    flux::gemm_rs::gemm_rs(products.args(call, rank, at(outs, call, rank), dtype, config), symm,
                           transport_of(layout, rank, copy_epoch, 1), /*rounds_own=*/false, nullptr);
  };
  return op;
}

Op all_reduce(const Setup& setup) {
  Random& random = setup.random;
  const Mode mode = random.one_of({Mode::kOneShot, Mode::kTwoShot, Mode::kScatter});
  const bool scatters = mode == Mode::kScatter;
  const int rows = random.between(1, 3), m = scatters ? rows * setup.world_size : rows,
            n = 8 * random.between(1, 60);
  Op op = {"all_reduce, mode " + std::to_string(static_cast<int>(mode)),
           exchange_sizes(m, n, setup.world_size, mode)};
  auto xs = add_inputs(setup, op, "x", m, n, 8);
  auto outs = add_outputs(setup, op, "out", rows, n, [&](int call, int rank) {
    Sums sum(rows * n);
    const size_t first = scatters ? rank * sum.size() : 0;
    for (const Values& x : xs[call]) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += x.values[first + i];
    }
    return sum;
  });
  op.enqueue = [=, dtype = setup.dtype](int rank, int call, const SymmBuffer& symm, uint32_t) mutable {
    flux::gemm_ar::all_reduce(at(xs, call, rank).matrix(), at(outs, call, rank).matrix(), dtype, {}, symm, 2,
                              mode, nullptr);
  };
  return op;
}

Op gemm_ar(const Setup& setup) {
  Random& random = setup.random;
  const Mode mode = random.one_of({Mode::kOneShot, Mode::kTwoShot});
  const int m = random.between(1, 16), n = 64 * random.between(1, 2), k = 8 * random.between(1, 12);
  Op op = {"gemm_ar, mode " + std::to_string(static_cast<int>(mode)),
           exchange_sizes(m, n, setup.world_size, mode)};
  Products products(setup, op, m, n, k);
  auto outs = add_outputs(setup, op, "out", m, n, [&](int call, int) { return products.sum(call); });
  const int config = pack(flux::gemm::kFirstSwapAb + 2, 1, 1);
  op.enqueue = [=, dtype = setup.dtype](int rank, int call, const SymmBuffer& symm, uint32_t) mutable {
    flux::gemm_ar::gemm_ar(products.args(call, rank, at(outs, call, rank), dtype, config), {}, symm, mode,
                           nullptr);
  };
  return op;
}

// Both layers, with one choice for each token and the same number of tokens on each rank.
Op layers(const Setup& setup) {
  Random& random = setup.random;
  const int world = setup.world_size, ep = random.below(2) == 0 ? 1 : world, experts = 2;
  const flux::moe::Layout layout = {world, 0, ep, experts * ep, 1, random.between(1, 20)};
  auto choices = std::make_shared<Choices>(random, layout);
  std::fill(choices->weights.begin(), choices->weights.end(), 1.0f);
  const int k = 8 * random.between(1, 8), n = 64, rows = layout.max_rows(), config = 9;
  const int64_t signals = std::max(
      make_send_order(layout).signals(),
      flux::moe::Layout::blocks_of(layout.max_tokens, flux::moe::Layout::block_rows(layout.max_tokens)));
  Op op = {"layers",
           {(world - 1) * signals * 4, static_cast<int64_t>(world - 1) * layout.max_tokens * n * 2, 0}};
  op.epochs = 2;
  auto routings = std::make_shared<std::vector<Routing>>();
  auto xs = add_inputs(setup, op, "x", layout.max_tokens, k),
       sorted = add_inputs(setup, op, "sorted x", rows, k);
  std::vector<Values> weights;
  for (int rank = 0; rank < world; ++rank) {
    routings->emplace_back(choices->of(rank), rank).fill_on_host(*choices, rank);
    weights.push_back(setup.filled(rank, "weight", experts * n, k));
  }
  // Row `row` of x times the weight of the expert that a choice has on `owner`; nothing if it has none there.
  const auto product = [&](const Values& x, int row, int choice, int owner, int* to) {
    const flux::moe::Layout mine = choices->of(owner);
    const int expert = mine.local_expert(choices->ids[choice], mine.slice_of(owner));
    for (int column = 0; expert >= 0 && column < n; ++column) {
      for (int i = 0; i < k; ++i) {
        to[column] += x.at(row, i) * weights[owner].at(expert * n + column, i);
      }
    }
  };
  auto hidden = add_outputs(setup, op, "hidden", rows, n, [&](int call, int rank) {
    const Routing& routing = (*routings)[rank];
    Sums right((routing.out.offsets[experts]) * n);
    for (int choice = 0; choice < layout.tokens(); ++choice) {
      const int position = routing.out.positions[choice];
      if (position < 0) continue;
      product(at(xs, call, choice / layout.max_tokens), choice % layout.max_tokens, choice, rank,
              &right[position * n]);
    }
    return right;
  });
  auto outs = add_outputs(setup, op, "out", layout.max_tokens, n, [&](int call, int rank) {
    const int tokens = choices->tokens[rank];
    Sums right(tokens * n);
    for (int token = 0; token < tokens; ++token) {
      const int choice = rank * layout.max_tokens + token;
      for (int owner = 0; owner < world; ++owner) {
        const int position = (*routings)[owner].out.positions[choice];
        if (position >= 0) product(at(sorted, call, owner), position, choice, owner, &right[token * n]);
      }
    }
    return right;
  });
  op.enqueue = [=, dtype = setup.dtype](int rank, int call, const SymmBuffer& symm, uint32_t) mutable {
    const Routing& routing = (*routings)[rank];
    const flux::moe::Layout mine = choices->of(rank);
    flux::moe::GroupedGemmArgs args = {};
    args.x = at(xs, call, rank).matrix();
    args.weight = shards_of(weights[rank].matrix(), experts);
    args.num_rows = rows;
    args.out = at(hidden, call, rank).data;
    args.dtype = dtype;
    args.config = config;
    args.num_sms = 3;
    flux::moe::ag_scatter_gemm(args, mine, routing.out, symm, nullptr);
    args.x = at(sorted, call, rank).matrix();
    args.out = sim::allocate(static_cast<int64_t>(rows) * n * 2, rank, "products");
    const flux::moe::CombineArgs combine = {routing.weights, at(outs, call, rank).data, choices->tokens[rank],
                                            1, 1};
    flux::moe::gemm_gather_rs(args, combine, mine, routing.out, symm, nullptr);
  };
  return op;
}

// The exchange of choices.
Op route(const Setup& setup) {
  const flux::moe::Layout layout = {setup.world_size, 0, 1, 3, 2, setup.random.between(1, 40)};
  auto choices = std::make_shared<Choices>(setup.random, layout);
  Op op = {"route", {0, 0, route_exchange_bytes(layout)}};
  op.enqueue = [=](int rank, int, const SymmBuffer& symm, uint32_t) {
    const Routing routing(choices->of(rank), rank);
    auto* const scratch = allocate<int32_t>(route_scratch_words(layout), rank, "scratch");
    flux::moe::route(choices->of(rank), flux::gemm::kBlockM, OwnTokens(*choices, rank, false).own, &symm,
                     routing.out, routing.weights, scratch, nullptr);
  };
  return op;
}

}  // namespace

const std::vector<MakeOp> kOps = {all_gather, ag_gemm, gemm_rs, all_reduce, gemm_ar, layers};
const MakeOp kRoute = route;

}  // namespace cases
