// Grouped GEMM and both layers of a mixture of experts with fp8 operands.
#include <algorithm>

#include "cuda_runtime_api.h"
#include "experts.h"
#include "fp8.h"

namespace cases {
namespace {

using flux::gemm::ceil_div;
using Kind = ScaleValues::Kind;

constexpr int kConfigs[] = {11, 10, 17};

// The weights of all experts, one after the other, and their scales: of each expert, each row, or each block.
struct Experts {
  int n;
  Fp8Values weight;  // [experts * n, k]
  Kind kind;
  int blocks_n, blocks_k;
  Sums exponents;
  float* scales;

  Experts(Random& random, int device, int experts, int n, int k, Kind kind)
      : n(n),
        weight(Fp8Values(device, "weight", experts * n, k).fill(random, DType::kE4M3, 1)),
        kind(kind),
        blocks_n(kind == Kind::kTensor ? 1
                 : kind == Kind::kRows ? n
                                       : ceil_div(n, kScaleBlock)),
        blocks_k(kind == Kind::kBlocks ? k / kScaleBlock : 1) {
    const int count = experts * blocks_n * blocks_k;
    std::vector<float> powers;
    for (int i = 0; i < count; ++i) {
      exponents.push_back(random.between(0, 2));
      powers.push_back(std::ldexp(1.0f, exponents.back()));
    }
    scales = copied(powers, device, "weight's scales");
  }
  int exponent(int expert, int row, int k_block) const {
    const int block = kind == Kind::kTensor ? 0 : kind == Kind::kRows ? row : row / kScaleBlock;
    return exponents[(expert * blocks_n + block) * blocks_k + (kind == Kind::kBlocks ? k_block : 0)];
  }
  // Appends a row of x, times the weight of an expert.
  void multiply(const Fp8Values& x, const ScaleValues& x_scales, int row, int expert, Sums& to) const {
    for (int column = 0; column < n; ++column) {
      int sum = 0;
      for (int first = 0; first < x.columns; first += kScaleBlock) {
        int part = 0;
        for (int i = first; i < std::min(x.columns, first + kScaleBlock); ++i) {
          part += x.at(row, i) * weight.at(expert * n + column, i);
        }
        const int k_block = first / kScaleBlock;
        sum += part << (x_scales.exponent(row, k_block) + exponent(expert, column, k_block));
      }
      to.push_back(sum);
    }
  }
};

// What fp8 adds to the arguments of a grouped GEMM.
struct Operands {
  ScaleKinds kinds;
  DType x_dtype;

  Operands(Random& random, bool may_be_blocks)
      : kinds(draw_kinds(random, may_be_blocks)),
        x_dtype(random.below(3) == 0 ? DType::kE5M2 : DType::kE4M3) {}

  void give(flux::moe::GroupedGemmArgs& args, const Fp8Values& x, const ScaleValues& x_scales,
            const Experts& experts) const {
    args.x = x.matrix();
    args.weight = shards_of(experts.weight.matrix(), experts.weight.rows / experts.n);
    args.scales.x = x_scales.data;
    args.scales.weight = experts.scales;
    args.scales.x_step = x_scales.kind == Kind::kRows;
    args.scales.weight_step = experts.kind == Kind::kRows;
    args.scales.blocks = kinds.blocks();
    args.scales.x_stride = x_scales.k_step;
    args.scales.x_dtype = x_dtype;
  }
};

// A gate and what it gates have blocks of their own.
int draw_n(Random& random, int config, Activation activation, int tiles, bool blocks) {
  const int n = draw_columns(random, config, activation, tiles);
  return blocks && activation == Activation::kSwiglu ? ceil_div(n / 2, kScaleBlock) * 2 * kScaleBlock : n;
}

void grouped_gemm(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  int config = kConfigs[random.below(3)];
  auto activation = static_cast<Activation>(random.below(4));
  const bool indexed = random.below(2) == 0;
  int k = draw_k(random, 3);
  const int num_experts = random.between(1, 6), num_sms = random.one_of({1, 2, 4});
  Operands operands(random, k % kScaleBlock == 0);
  int n = draw_n(random, config, activation, 2, operands.kinds.blocks());
  // The second half of the tile lies behind all blocks of the weight's scales.
  const bool narrow = seed % 6 == 4;
  if (narrow) {
    config = 17, activation = Activation::kNone, n = std::min(n, kScaleBlock);
    k = ceil_div(k, kScaleBlock) * kScaleBlock, operands.kinds = {Kind::kBlocks, Kind::kBlocks};
  }
  const bool swiglu = activation == Activation::kSwiglu;
  start(seed, 1, random.one_of({1, 2, 8}), random);

  const SortedRows sorted(random, num_experts, indexed,
                          [&] { return std::max<int>(narrow, random.one_of({0, 1, 40, 128, 129, 200})); });
  describe(sorted.words(), operands.kinds.name(), operands.x_dtype == DType::kE5M2 ? "e5m2, " : "", n, " x ",
           k, ", tile ", config, ", activation ", static_cast<int>(activation), ", ", num_sms, " SMs, ",
           sim::machine.config.resident, " resident");
  const Experts experts(random, 0, num_experts, n, k, operands.kinds.weight);
  std::vector<Fp8Values> xs;
  std::vector<ScaleValues> x_scales;
  std::vector<Values> outs;
  for (int call = 0; call < 2; ++call) {
    xs.push_back(Fp8Values(0, "x", sorted.m, k).fill(random, operands.x_dtype, 1));
    x_scales.emplace_back(random, 0, "x's scales", operands.kinds.x, sorted.m, k, false, 1);
    outs.emplace_back(0, "out", std::max(1, sorted.room), swiglu ? n / 2 : n);
    flux::moe::GroupedGemmArgs args = {};
    operands.give(args, xs.back(), x_scales.back(), experts);
    sorted.give(args);
    args.activation = static_cast<int>(activation);
    args.out = outs.back().data;
    args.dtype = dtype;
    args.config = random.below(4) == 0 && !narrow ? -1 : config;
    args.num_sms = num_sms;
    flux::moe::grouped_gemm(args, nullptr);
  }
  cudaDeviceSynchronize();
  for (size_t call = 0; call < 2; ++call) {
    Sums sums;
    sorted.for_each(
        [&](int expert, int row) { experts.multiply(xs[call], x_scales[call], row, expert, sums); });
    expect(outs[call], activated(sums, n, activation), dtype, call == 0 ? "out" : "second out");
  }
}

// One rank's operands and results of one call of both layers.
struct Layers {
  Routing routing;
  Fp8Values x, sorted;
  ScaleValues x_scales, sorted_scales;
  Values hidden, products, out;

  Layers(Random& random, const Choices& choices, int rank, const LayerSizes& sizes, const Operands& operands0,
         const Operands& operands1)
      : routing(choices.of(rank), rank),
        x(Fp8Values(rank, "x", std::max(1, choices.tokens[rank]), sizes.k0)
              .fill(random, operands0.x_dtype, 1)),
        sorted(Fp8Values(rank, "sorted x", choices.of(rank).max_rows(), sizes.k1)
                   .fill(random, operands1.x_dtype, 1)),
        x_scales(random, rank, "x's scales", operands0.kinds.x, x.rows, sizes.k0, false, 1),
        sorted_scales(random, rank, "sorted x's scales", operands1.kinds.x, sorted.rows, sizes.k1, false, 1),
        hidden(rank, "hidden", choices.of(rank).max_rows(), sizes.columns0()),
        products(rank, "products", choices.of(rank).max_rows(), sizes.n1),
        out(rank, "out", choices.tokens[rank], sizes.n1) {}
};

void layers(uint64_t seed) {
  constexpr int kCalls = 2;
  Random random(seed);
  const auto [layout, dtype, many] = draw_layers(random);
  const int world_size = layout.world_size;
  LayerSizes sizes = {};
  sizes.config0 = kConfigs[random.below(3)];
  sizes.config1 = kConfigs[random.below(3)];
  sizes.activation = static_cast<Activation>(random.below(4));
  sizes.k0 = draw_k(random, many ? 1 : 3);
  sizes.k1 = draw_k(random, 2);
  const Operands operands0(random, sizes.k0 % kScaleBlock == 0),
      operands1(random, sizes.k1 % kScaleBlock == 0);
  sizes.n0 = draw_n(random, sizes.config0, sizes.activation, many ? 1 : 2, operands0.kinds.blocks());
  sizes.n1 = draw_columns(random, sizes.config1, Activation::kNone, many ? 2 : 3);
  sizes.num_sms = many ? 2 : random.one_of({2, 3, 4});
  sizes.comm_ctas = random.between(0, sizes.num_sms);
  sizes.tiles_per_chunk = random.between(1, 2);
  const int least = std::min(sizes.comm_ctas, sizes.num_sms - 1) + 1;
  start(seed, world_size, random.one_of({least, sizes.num_sms}), random);

  std::vector<Choices> calls;
  for (int call = 0; call < kCalls; ++call) calls.emplace_back(random, layout);
  describe(words(calls[0]), ", ", operands0.kinds.name(), operands1.kinds.name(), sizes.words());

  const int64_t peers = world_size - 1;
  const int signals = layer_signals(layout, sizes.n1, sizes.config1, sizes.tiles_per_chunk);
  const int row_bytes =
      flux::moe::slot_row_bytes(sizes.k0, operands0.kinds.blocks() ? sizes.k0 / kScaleBlock : 1);
  const Ranks region(world_size,
                     {peers * signals * 4, peers * layout.max_tokens * std::max(row_bytes, sizes.n1 * 2), 0});
  const int experts = layout.local_experts();
  std::vector<Experts> weights0, weights1;
  for (int rank = 0; rank < world_size; ++rank) {
    weights0.emplace_back(random, rank, experts, sizes.n0, sizes.k0, operands0.kinds.weight);
    weights1.emplace_back(random, rank, experts, sizes.n1, sizes.k1, operands1.kinds.weight);
  }
  std::vector<std::vector<Layers>> all(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    const Choices& choices = calls[call];
    for (int rank = 0; rank < world_size; ++rank) {
      cudaSetDevice(rank);
      const Layers& own = all[call].emplace_back(random, choices, rank, sizes, operands0, operands1);
      own.routing.fill_on_host(choices, rank);
      const auto give = [&](flux::moe::GroupedGemmArgs& args, int layer) {
        if (layer == 1) return operands1.give(args, own.sorted, own.sorted_scales, weights1[rank]);
        operands0.give(args, own.x, own.x_scales, weights0[rank]);
        const bool of_rows = args.scales.blocks || args.scales.x_step > 0;
        if (of_rows && choices.tokens[rank] == 0) args.scales.x = nullptr;  // torch's address of no elements
      };
      call_layers(choices, rank, own, sizes, dtype, region.symm[rank], true, true, give);
    }
  }
  cudaDeviceSynchronize();
  region.expect_done(2 * kCalls);
  expect_layers(calls, all, sizes, dtype, true, true,
                [&](const Layers& of, int rank, int layer, int row, int expert, Sums& to) {
                  if (layer == 0) return weights0[rank].multiply(of.x, of.x_scales, row, expert, to);
                  weights1[rank].multiply(of.sorted, of.sorted_scales, row, expert, to);
                });
}

}  // namespace

const std::vector<NamedCase> kCases = {{"fp8_grouped_gemm", grouped_gemm}, {"fp8_moe_layers", layers}};

}  // namespace cases
