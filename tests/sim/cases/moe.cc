// Mixtures of experts: routing, grouped GEMM, both layers, the sum over experts, and steps between GEMMs.
#include <algorithm>
#include <cmath>

#include "cuda_runtime_api.h"
#include "experts.h"

namespace cases {
namespace {

void route(uint64_t seed) {
  constexpr int kCalls = 3;
  Random random(seed);
  const int world_size = random.one_of({1, 2, 2, 3, 4, 8});
  const int ep_size = divisor(random, world_size);
  const int top_k = random.below(4) == 0 ? random.between(5, 16) : random.between(1, 4);
  const int max_tokens = world_size > 2 ? random.between(0, 70) : random.one_of({1, 33, 256, 257, 600});
  const int num_experts =
      ep_size * (max_tokens < 40 && random.below(6) == 0 ? 600 : random.one_of({1, 2, 5, 16, 150}));
  Layout layout = {world_size, 0, ep_size, num_experts, top_k, max_tokens};
  const bool wide = random.below(2) == 0;
  // In half of the runs, another kernel, such as NCCL's, has the SMs that the plan leaves free until a rank has finished.
  // The plan refuses what does not fit beside it.
  Random others(seed);
  const bool beside = others.below(2) == 0;
  if (beside && world_size <= 3) layout.max_tokens = 600;
  const int room = std::max(world_size + 1, route_ctas(layout) - others.between(1, 2));
  const int num_sms = room + flux::moe::kSmsOfOthers;
  while (beside && !route_fits(layout, num_sms)) layout.max_tokens -= flux::moe::kFewRouteThreads;
  // All CTAs of the launch must be resident.
  start(seed, world_size, route_ctas(layout) + random.below(3), random);
  if (beside) {
    sim::MachineConfig machine = sim::machine.config;
    machine.resident = num_sms;
    machine.occupied = flux::moe::kSmsOfOthers;
    machine.occupied_until = others.below(world_size);
    sim::reset_machine(machine);
  }
  std::vector<Choices> calls;
  for (int call = 0; call < kCalls; ++call) {
    Choices& choices = calls.emplace_back(random, layout);
    // A weight with the bits that stand for absent data; ranks agree on another NaN instead.
    if (choices.tokens[0] > 0) choices.weights[random.below(top_k)] = kOtherNan;
  }
  describe(words(calls[0]), wide ? ", int64" : ", int32");

  const Ranks ranks(world_size, {0, 0, route_exchange_bytes(layout)});
  std::vector<std::vector<Routing>> found(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    for (const Choices& choices : calls) {
      const OwnTokens tokens(choices, rank, wide);
      const Routing& mine = found[rank].emplace_back(choices.of(rank), rank);
      auto* const scratch = allocate<int32_t>(route_scratch_words(layout), rank, "scratch");
      flux::moe::route(choices.of(rank), flux::gemm::kBlockM, tokens.own,
                       world_size > 1 ? &ranks.symm[rank] : nullptr, mine.out, mine.weights, scratch,
                       nullptr);
    }
  }
  cudaDeviceSynchronize();
  ranks.expect_done(world_size > 1 && layout.max_tokens > 0 ? kCalls : 0);
  for (int rank = 0; rank < world_size; ++rank) {
    for (int call = 0; call < kCalls; ++call) {
      const Choices& choices = calls[call];
      const Routing right(choices.of(rank), rank);
      right.fill_on_host(choices, rank);
      found[rank][call].expect(right, name_of(call, rank, "routing"));
    }
  }
}

const int* row_of(const Values& x, int row) { return &x.values[row * x.columns]; }

void grouped_gemm(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const int config = flux::moe::kGroupedConfigs[random.below(4)];
  const auto activation = static_cast<Activation>(random.below(4));
  const bool swiglu = activation == Activation::kSwiglu, indexed = random.below(2) == 0;
  const bool many = random.below(6) == 0;  // experts: several for each thread of the schedule
  const int experts = many ? 300 : random.between(1, 6),
            n = many ? 16 : draw_columns(random, config, activation, 2);
  const int k = 8 * random.between(1, many ? 2 : 30), num_sms = random.one_of({1, 2, 4});
  const bool transposed = !swiglu && random.below(2) == 0;
  start(seed, 1, random.one_of({1, 2, 8}), random);

  const SortedRows sorted(
      random, experts, indexed,
      [&] { return many ? random.below(3) : random.one_of({0, 1, 40, 128, 129, 300}); },
      far_rows(seed, k * 2));
  const Weights weight(random, 0, experts, n, k, transposed, dtype);
  describe(sorted.words(), weight.words(), ", tile ", config, ", activation ", static_cast<int>(activation),
           ", ", num_sms, " SMs, ", sim::machine.config.resident, " resident");
  std::vector<Values> xs, outs;
  for (int call = 0; call < 2; ++call) {
    xs.emplace_back(0, "x", sorted.m, k, 0, sorted.before).fill(random, dtype, 1);
    outs.emplace_back(0, "out", std::max(1, sorted.room), swiglu ? n / 2 : n);
    flux::moe::GroupedGemmArgs args = {};
    sorted.give(args);
    args.x = xs.back().matrix();
    weight.give(args);
    args.activation = static_cast<int>(activation);
    args.out = outs.back().data;
    args.dtype = dtype;
    args.config = random.below(4) == 0 ? -1 : config;
    args.num_sms = num_sms;
    flux::moe::grouped_gemm(args, nullptr);
  }
  cudaDeviceSynchronize();
  for (size_t call = 0; call < 2; ++call) {
    Sums sums;
    sorted.for_each([&](int expert, int row) { weight.multiply_row(row_of(xs[call], row), expert, sums); });
    expect(outs[call], activated(sums, n, activation), dtype, call == 0 ? "out" : "second out");
  }
}

void combine(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const int tokens = random.between(0, 60), top_k = random.between(1, 9), n = 8 * random.between(1, 300);
  const int rows = random.between(1, 80);
  start(seed, 1, random.one_of({1, 8}), random);
  describe(tokens, " tokens, top ", top_k, ", ", rows, " x ", n);
  const int padding = 8 * random.below(2), before = far_rows(seed, (n + padding) * 2);
  Values products(0, "products", rows, n, padding, before), out(0, "out", std::max(1, tokens), n);
  products.fill(random, dtype, 8);
  std::vector<int32_t> positions;
  std::vector<float> weights, expected;
  for (int i = 0; i < tokens * top_k; ++i) {
    positions.push_back(random.below(4) == 0 ? -1 : before + random.below(rows));
    weights.push_back(random.one_of({1.0f, 2.0f, 0.5f, -1.0f}));
  }
  flux::moe::combine(products.matrix(), dtype, copied(positions, 0, "positions"),
                     copied(weights, 0, "weights"), tokens, top_k, out.data, nullptr);
  cudaDeviceSynchronize();
  for (int token = 0; token < tokens; ++token) {
    for (int column = 0; column < n; ++column) {
      float sum = 0;
      for (int i = token * top_k; i < (token + 1) * top_k; ++i) {
        const int position = positions[i];
        if (position >= 0) sum += weights[i] * static_cast<float>(products.at(position - before, column));
      }
      expected.push_back(sum);
    }
  }
  expect(out, expected, dtype, "out");
}

// Fails unless rows are these after one rounding, where fast functions are off by less, and all others are untouched.
void expect_near(const Values& out, const std::vector<double>& rows, DType dtype, const char* name) {
  const double allowed = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-10, none = 1e-40;
  for (int64_t i = 0; i < static_cast<int64_t>(out.rows) * out.columns; ++i) {
    const bool inside = i < static_cast<int64_t>(rows.size());
    const double right = inside ? rows[i] : 0, got = widened(out.data[i], dtype);
    if (inside ? std::abs(got - right) <= allowed * std::abs(right) + none
               : out.data[i] == Values::kUntouched)
      continue;
    wrong(name, "[", i / out.columns, "][", i % out.columns, "] is ", got, ", and not ",
          inside ? std::to_string(right) : "left alone");
  }
}

// The steps between GEMMs. Nobody has written the rows behind the last one of experts, so that reading them is an error.
void expert_rows(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const auto activation = random.one_of({Activation::kSilu, Activation::kGelu, Activation::kSwiglu});
  const bool scaled = random.below(3) > 0, dotted = random.below(3) > 0,
             gated = activation == Activation::kSwiglu;
  const bool many = random.below(4) == 0;  // rows: more than warps of a launch
  const int end = many ? 530 : random.one_of({0, 1, 9, 40}), count = end + random.one_of({0, 1, 30});
  const int n = 8 * (many ? random.between(1, 4) : random.one_of({31, 33, random.between(1, 300)}));
  start(seed, 1, random.one_of({1, 8}), random);
  describe(end, " of ", count, " rows of ", n, scaled ? ", scaled" : "", dotted ? ", with dot products" : "",
           ", activation ", static_cast<int>(activation));
  const flux::moe::ExpertRows rows = {copied(std::vector{end}, 0, "end"), count, n, dtype};
  const auto made = [&](const char* name, int columns) {
    return Values(0, name, std::max(1, count), columns);
  };
  const auto filled = [&](const char* name, int columns, int most) {
    Values values = made(name, columns);
    values.rows = end;
    values.fill(random, dtype, most);
    values.rows = std::max(1, count);
    return values;
  };
  std::vector<float> scores;
  std::vector<int32_t> tokens;
  const int before = far_rows(seed, n / 8);
  for (int row = 0; row < end; ++row) {
    scores.push_back(random.one_of({1.0f, 2.0f, 0.5f, -4.0f}));
    tokens.push_back(before + random.below(20));
  }
  const float* const device_scores = scaled ? copied(scores, 0, "scores") : nullptr;
  const auto score = [&](int row) { return scaled ? scores[row] : 1.0f; };

  Values x(0, "x", 20, n, 0, before), gathered = made("gathered", n);
  x.fill(random, dtype, 8);
  flux::moe::gather_rows(rows, x.matrix().data, copied(tokens, 0, "tokens"), device_scores, gathered.data,
                         nullptr);

  Values finished = filled("finished", n, 8);
  const Values other = filled("other", n, 4);
  // One more than there are: it must stay as it is.
  float* const dots = copied(std::vector<float>(count + 1, 77), 0, "dots");
  flux::moe::finish_rows(rows, finished.data, device_scores, dotted ? other.data : nullptr,
                         dotted ? dots : nullptr, nullptr);

  // Some are so large that functions are at their limits, where they are exact.
  Values product = filled("product", gated ? 2 * n : n, 3);
  for (int i = 0; i < end * n; i += 3) {
    const int at = i / n * product.columns + i % n, value = random.one_of({-128, 128});
    product.values[at] = value;
    product.data[at] = rounded(value, dtype);
  }
  const Values grad = filled("grad", n, 4);
  Values active = made("active", n), of_product = made("gradient of product", product.columns);
  const int number = static_cast<int>(activation);
  flux::moe::activate_rows(rows, number, product.matrix(), active.data, nullptr);
  flux::moe::activation_grad(rows, number, grad.data, product.matrix(), of_product.data, {}, nullptr);
  // Gradients, over which the rows are written.
  Values both = made("gradients and rows", n), of_both = made("gradient of both", product.columns);
  std::copy(grad.data, grad.data + end * n, both.data);
  sim::mark_written(both.data, end * n * int64_t{2});
  float* const both_dots = copied(std::vector<float>(count + 1, 77), 0, "dots of both");
  flux::moe::activation_grad(rows, number, both.data, product.matrix(), of_both.data,
                             {copied(scores, 0, "scores"), both.data, both_dots}, nullptr);
  cudaDeviceSynchronize();

  std::vector<float> of_gather, of_finish, sums;
  std::vector<double> of_active, slopes;
  for (int row = 0; row < end; ++row) {
    float sum = 0;
    std::vector<double> of_ups;
    for (int i = 0; i < n; ++i) {
      of_gather.push_back(score(row) * static_cast<float>(x.at(tokens[row] - before, i)));
      of_finish.push_back(score(row) * static_cast<float>(finished.at(row, i)));
      sum += static_cast<float>(finished.at(row, i) * other.at(row, i));
      const double z = product.at(row, i), up = gated ? product.at(row, n + i) : 1, g = grad.at(row, i);
      const double sigmoid = 1 / (1 + std::exp(-z)), share = 0.5 * std::erfc(-z * std::sqrt(0.5));
      const bool gelu = activation == Activation::kGelu;
      const double density = std::exp(-z * z / 2) / std::sqrt(2 * std::acos(-1.0));
      of_active.push_back((gelu ? z * share : z * sigmoid) * up);
      slopes.push_back(g * up * (gelu ? share + z * density : sigmoid + z * sigmoid * (1 - sigmoid)));
      of_ups.push_back(g * z * sigmoid);
    }
    if (gated) slopes.insert(slopes.end(), of_ups.begin(), of_ups.end());
    sums.push_back(sum);
  }
  expect(gathered, of_gather, dtype, "gathered");
  of_finish.resize(count * n);
  expect(finished, of_finish, dtype, "finished");
  sums.resize(count);
  sums.push_back(77);
  for (size_t row = 0; row < sums.size(); ++row) {
    const float right = dotted ? sums[row] : 77;
    if (dots[row] != right) wrong("dots[", row, "] is ", dots[row], ", and not ", right);
  }
  expect_near(active, of_active, dtype, "active");
  expect_near(of_product, slopes, dtype, "gradient of product");
  expect_near(both, of_active, dtype, "rows");
  for (int row = 0; row < end; ++row) {
    double sum = 0, most = 0;
    for (int i = 0; i < n; ++i) {
      const double term = grad.at(row, i) * of_active[row * n + i];
      sum += term, most += std::abs(term);
    }
    // Rows are rounded before, in fp16 to no less than 2^-24.
    if (std::abs(both_dots[row] - sum) > most * 0x1p-8 + 1e-5)
      wrong("dot product of row ", row, " is ", both_dots[row], ", and not ", sum);
    for (int i = 0; i < product.columns; ++i) slopes[row * product.columns + i] *= scores[row];
  }
  if (both_dots[count] != 77) wrong("a dot product of no row was written");
  expect_near(of_both, slopes, dtype, "gradient of both");
}

// One rank's operands and results of one call of both layers.
struct Layers {
  Routing routing;
  Values x, hidden, sorted, products, out;

  Layers(Random& random, const Choices& choices, int rank, const LayerSizes& sizes, DType dtype)
      : routing(choices.of(rank), rank),
        x(rank, "x", choices.tokens[rank], sizes.k0),
        hidden(rank, "hidden", choices.of(rank).max_rows(), sizes.columns0()),
        sorted(rank, "sorted x", choices.of(rank).max_rows(), sizes.k1),
        products(rank, "products", choices.of(rank).max_rows(), sizes.n1),
        out(rank, "out", choices.tokens[rank], sizes.n1) {
    x.fill(random, dtype, 1);
    sorted.fill(random, dtype, 1);
  }
};

// Both layers behind each other, or calls of only one of them, with the routing by the kernel or already known.
void layers(uint64_t seed) {
  Random random(seed);
  const bool only_0 = random.below(4) == 0, only_1 = !only_0 && random.below(3) == 0;
  const int kCalls = only_0 || only_1 ? 3 : 2;
  const auto [layout, dtype, many] = draw_layers(random);
  const int world_size = layout.world_size, ep_size = layout.ep_size;
  LayerSizes sizes = {};
  sizes.config0 = flux::moe::kGroupedConfigs[random.below(4)];
  sizes.config1 = flux::moe::kGroupedConfigs[random.below(4)];
  sizes.activation = static_cast<Activation>(random.below(4));
  sizes.k0 = 8 * random.between(1, many ? 8 : 20);
  sizes.n0 = draw_columns(random, sizes.config0, sizes.activation, 2);
  sizes.k1 = 8 * random.between(1, 8);
  sizes.n1 = draw_columns(random, sizes.config1, Activation::kNone, many ? 2 : 3);
  const bool transposed0 = sizes.activation != Activation::kSwiglu && random.below(3) == 0;
  const bool transposed1 = random.below(3) == 0;
  sizes.num_sms = many ? 2 : random.one_of({2, 3, 4});
  sizes.comm_ctas = random.between(0, sizes.num_sms);
  sizes.tiles_per_chunk = random.between(1, 2);
  const bool routes = random.below(3) == 0;
  // All tokens choose one expert, so that in one layer a rank needs nothing from a peer that is late.
  const bool lopsided = (only_0 || only_1) && ep_size == world_size && random.below(2) == 0;
  const int expert = lopsided ? random.below(layout.num_experts) : -1;
  const int owner = std::max(0, expert) / layout.local_experts();
  const int late = !lopsided ? -1 : only_0 ? owner : (owner + 1) % world_size;
  start(seed, world_size, std::max(routes ? route_ctas(layout) : 1, random.between(1, sizes.num_sms)), random,
        /*cluster=*/0, late);

  std::vector<Choices> calls;
  for (int call = 0; call < kCalls; ++call) calls.emplace_back(random, layout, expert);
  describe(words(calls[0]),
           only_0   ? ", layer 0, "
           : only_1 ? ", layer 1, "
                    : ", ",
           routes ? "routed, " : "", transposed0 ? "[K, N] of layer 0, " : "",
           transposed1 ? "[K, N] of layer 1, " : "", sizes.words());

  const int64_t peers = world_size - 1;
  const int signals = layer_signals(layout, sizes.n1, sizes.config1, sizes.tiles_per_chunk);
  const Ranks region(world_size,
                     {peers * signals * 4, peers * layout.max_tokens * std::max(sizes.k0, sizes.n1) * 2,
                      routes ? route_exchange_bytes(layout) : 0},
                     epochs_before(seed));
  const int experts = layout.local_experts();
  std::vector<Weights> weights0, weights1;
  for (int rank = 0; rank < world_size; ++rank) {
    weights0.emplace_back(random, rank, experts, sizes.n0, sizes.k0, transposed0, dtype);
    weights1.emplace_back(random, rank, experts, sizes.n1, sizes.k1, transposed1, dtype);
  }
  std::vector<std::vector<Layers>> all(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    const Choices& choices = calls[call];
    for (int rank = 0; rank < world_size; ++rank) {
      cudaSetDevice(rank);
      const auto& symm = region.symm[rank];
      const Layers& own = all[call].emplace_back(random, choices, rank, sizes, dtype);
      if (routes) {
        const OwnTokens tokens(choices, rank, false);
        auto* const scratch = allocate<int32_t>(route_scratch_words(layout), rank, "scratch");
        flux::moe::route(choices.of(rank), flux::gemm::kBlockM, tokens.own, &symm, own.routing.out,
                         own.routing.weights, scratch, nullptr);
      } else {
        own.routing.fill_on_host(choices, rank);
      }
      const auto give = [&](flux::moe::GroupedGemmArgs& args, int layer) {
        args.x = (layer == 0 ? own.x : own.sorted).matrix();
        (layer == 0 ? weights0 : weights1)[rank].give(args);
      };
      call_layers(choices, rank, own, sizes, dtype, symm, !only_1, !only_0, give);
    }
  }
  cudaDeviceSynchronize();
  region.expect_done(static_cast<uint32_t>(kCalls * (routes + !only_1 + !only_0)));
  expect_layers(calls, all, sizes, dtype, !only_1, !only_0,
                [&](const Layers& of, int rank, int layer, int row, int expert, Sums& to) {
                  const int* const x = row_of(layer == 0 ? of.x : of.sorted, row);
                  (layer == 0 ? weights0 : weights1)[rank].multiply_row(x, expert, to);
                });
}

}  // namespace

const std::vector<NamedCase> kCases = {{"moe_route", route},
                                       {"grouped_gemm", grouped_gemm},
                                       {"moe_combine", combine},
                                       {"expert_rows", expert_rows},
                                       {"moe_layers", layers}};

}  // namespace cases
