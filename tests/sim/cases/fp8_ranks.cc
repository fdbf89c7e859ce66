// GEMM+ReduceScatter and AllGather+GEMM of fp8 operands on two to eight ranks.
#include <algorithm>

#include "cuda_runtime_api.h"
#include "fp8.h"
#include "ranks.h"

namespace cases {
namespace {

using flux::gemm::TileConfig;
using Mode = flux::runtime::Exchange::Mode;

constexpr int kCalls = 3;  // each of the two buffers is used again

// The operands of a problem on all ranks, and what all ranks agree on.
struct Problem {
  ScaleKinds kinds;
  DType x_dtype, dtype;
  bool fast;

  // by_rows: each row of x and each column of the result has a scale.
  Problem(Random& random, bool promotes, int k, bool by_rows = false)
      : kinds(draw_kinds(random, promotes && k % kScaleBlock == 0)),
        x_dtype(promotes && random.below(3) == 0 ? DType::kE5M2 : DType::kE4M3),
        dtype(draw_dtype(random)),
        fast(!promotes || (!kinds.blocks() && random.below(2) == 0)) {
    if (by_rows) kinds = {ScaleValues::Kind::kRows, ScaleValues::Kind::kRows};
  }
  std::string name() const { return kinds.name() + std::string(x_dtype == DType::kE5M2 ? "e5m2, " : ""); }
};

// What each rank multiplies. Sums of ranks are exact if x, the weight and scales are small enough.
struct Product {
  Fp8Values weight;
  ScaleValues weight_scales;
  Values bias;
  std::vector<Fp8Values> xs;  // of each call
  std::vector<ScaleValues> x_scales;

  Product(Random& random, int rank, const Problem& problem, int m, int n, int k, int most)
      : weight(Fp8Values(rank, "weight", n, k).fill(random, DType::kE4M3, 1)),
        weight_scales(random, rank, "weight's scales", problem.kinds.weight, n, k, true, most),
        bias(rank, "bias", 1, n) {
    bias.fill(random, problem.dtype);
    for (int call = 0; call < kCalls; ++call) {
      xs.push_back(Fp8Values(rank, "x", m, k).fill(random, problem.x_dtype, most));
      x_scales.emplace_back(random, rank, "x's scales", problem.kinds.x, m, k, false, 1);
    }
  }
  Sums of(int call) const { return multiply(xs[call], x_scales[call], weight, weight_scales); }
  flux::gemm::GemmArgs args(const Problem& problem, int call, const flux::runtime::Matrix& out, DType dtype,
                            const void* bias_data, int config, int num_sms) const {
    return {xs[call].matrix(),
            weight.matrix(),
            false,
            out,
            bias_data,
            dtype,
            config,
            num_sms,
            scales_of(x_scales[call], weight_scales, problem.x_dtype, problem.fast)};
  }
};

// What is sent is rounded, what stays is not.
void gemm_rs(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 2, 3, 3, 4, 8});
  const bool many = world_size > 4;  // ranks: everything else is small
  const int config = draw_fp8_tile(random, flux::gemm::supports_sending);
  const TileConfig& tile = flux::gemm::kTileConfigs[config];
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  const int rows = many ? 8 : random.one_of({7, 8, 101, 128, 130, 255}), m = rows * world_size;
  const int n = std::max(8, tile.block_n * (many ? 1 : random.between(1, 2)) - 8 * random.below(8));
  const int k = draw_k(random, many ? 2 : 3), num_sms = many ? 2 : random.one_of({2, 4, 8});
  const bool copied = random.below(3) == 0, rounds_own = random.below(2) == 0;
  const Problem problem(random, tile.promotes(), k);
  start(seed, world_size, std::max(size, random.one_of({1, 2, 3, 8})), random, size);
  describe(flux::gemm::config_name(config, cluster), copied ? ", copied, " : ", ", problem.name(),
           rounds_own ? "own rounded, " : "", words(world_size, m, n, k, problem.dtype));

  const auto layout = flux::gemm_rs::make_layout(m, n, world_size, tile);
  const Ranks ranks(world_size, sizes_of(layout));
  std::vector<Product> products;
  std::vector<std::vector<Values>> outs(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    products.emplace_back(random, rank, problem, m, n, k, /*most=*/2);
    for (int call = 0; call < kCalls; ++call) outs[rank].emplace_back(rank, "out", rows, n);
  }
  const int chunks = std::min(layout.tiles_per_slot(), random.between(1, 3));
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    const Product& product = products[rank];
    for (int call = 0; call < kCalls; ++call) {
      const auto transport = transport_of(layout, rank, copied ? call + 1 : 0, chunks);
      const auto out = outs[rank][call].matrix();
      flux::gemm_rs::gemm_rs(product.args(problem, call, out, problem.dtype, product.bias.data,
                                          pack(config, cluster, 1), num_sms),
                             ranks.symm[rank], transport, rounds_own, nullptr);
    }
  }
  cudaDeviceSynchronize();
  ranks.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    std::vector<Sums> parts;
    for (const Product& each : products) parts.push_back(each.of(call));
    for (int rank = 0; rank < world_size; ++rank) {
      const Sums expected = scattered(parts, rank, rounds_own, problem.dtype, products[rank].bias);
      expect(outs[rank][call], expected, problem.dtype, name_of(call, rank, "out"));
    }
  }
}

void ag_gemm(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 2, 3, 3, 4, 8});
  const bool many = world_size > 4;  // ranks: everything else is small
  const int config = draw_fp8_tile(random, flux::gemm::supports_gathering);
  const TileConfig& tile = flux::gemm::kTileConfigs[config];
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM, Cluster::kPairN});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  const int rows = many ? random.one_of({7, 8}) : random.one_of({1, 8, 37, 128, 136, 200, 300}),
            m = rows * world_size;
  const int n = std::max(8, tile.block_n * (many ? 1 : random.between(1, 2)) - 8 * random.below(8));
  const int k = draw_k(random, many ? 2 : 3), num_sms = many ? 2 : random.one_of({2, 4, 8});
  const bool copied = random.below(3) == 0, collects = !many && random.below(2) == 0;
  const int chunk_rows = 128 * random.between(1, 2), num_weights = !many && random.below(4) == 0 ? 2 : 1;
  const Problem problem(random, tile.promotes(), k);
  const bool wide = random.below(3) == 0;  // an fp32 result
  start(seed, world_size, std::max(size, random.one_of({1, 2, 8})), random);
  describe(flux::gemm::config_name(config, cluster),
           copied ? ", chunks of " + std::to_string(chunk_rows) + ", " : ", ", problem.name(),
           num_weights > 1 ? "two weights, " : "", collects ? "collected, " : "", wide ? "fp32, " : "",
           num_sms, " SMs, ", words(world_size, m, n, k, problem.dtype));

  const int scale_columns = problem.kinds.blocks() ? k / kScaleBlock : 1;
  // Rows are contiguous.
  const int row_bytes = (k + 15) / 16 * 16;
  const Ranks region(world_size,
                     sizes_of(flux::ag_gemm::make_layout(m, row_bytes, world_size, scale_columns)));
  std::vector<Product> products;  // x of one weight, and the other's weight
  std::vector<Product> others;
  std::vector<std::vector<Values>> outs(world_size);
  std::vector<std::vector<Floats>> wides(world_size), scales(world_size);
  std::vector<std::vector<Fp8Values>> gathered(world_size);
  const int scale_rows = (m + 3) / 4 * 4;
  for (int rank = 0; rank < world_size; ++rank) {
    products.emplace_back(random, rank, problem, rows, n, k, /*most=*/2);
    others.emplace_back(random, rank, problem, rows, n, k, /*most=*/2);
  }
  const int packed = pack(config, cluster, random.between(1, 3));
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    Product& mine = products[rank];
    const Floats wide_bias(rank, "bias", 1, n);
    wide_bias.fill(mine.bias);
    const Fp8Values garbage(rank, "garbage", rows, k);
    for (int call = 0; call < kCalls; ++call) {
      const flux::ag_gemm::Transport transport =
          copied ? flux::ag_gemm::Transport{static_cast<uint32_t>(call + 1), chunk_rows}
                 : flux::ag_gemm::Transport{};
      for (int i = 0; i < num_weights; ++i) {
        const auto out = outs[rank].emplace_back(rank, "out", m, n, random.below(2) * 8).matrix();
        const auto sums = wides[rank].emplace_back(rank, "out", m, n, random.below(2) * 8).matrix();
        flux::gemm::GemmArgs args =
            mine.args(problem, call, wide ? sums : out, wide ? DType::kFloat32 : problem.dtype,
                      wide ? static_cast<const void*>(wide_bias.data) : mine.bias.data, packed, num_sms);
        if (i > 0) {
          args.weight = others[rank].weight.matrix();
          args.scales.weight = others[rank].weight_scales.data;
        }
        flux::ag_gemm::ag_gemm(args, region.symm[rank], transport, /*reuse=*/i > 0, nullptr);
      }
      const Fp8Values& x = mine.xs[call];
      const ScaleValues& x_scales = mine.x_scales[call];
      if (collects) {
        const Fp8Values& rows_of_all = gathered[rank].emplace_back(rank, "gathered", m, k);
        const Floats& scales_of_all =
            scales[rank].emplace_back(rank, "gathered scales", scale_columns, scale_rows);
        const bool blocks = problem.kinds.blocks();
        const int step = x_scales.kind == ScaleValues::Kind::kTensor ? 0 : 1;
        const auto in_words = [&](const Fp8Values& matrix) -> flux::runtime::Matrix {
          return {matrix.data, matrix.rows, matrix.stride / 2, matrix.stride / 2};
        };
        flux::ag_gemm::all_gather(
            in_words(x), in_words(rows_of_all), region.symm[rank], transport, flux::ag_gemm::Rows::kHere,
            {{x_scales.data, blocks ? 1 : step, x_scales.k_step}, scale_columns, scales_of_all.data},
            nullptr);
      }
      // The stream overwrites x and its scales behind each call.
      cudaMemcpyAsync(x.data, garbage.data, rows * x.stride, cudaMemcpyDefault, nullptr);
      cudaMemcpyAsync(x_scales.data, garbage.data, 4, cudaMemcpyDefault, nullptr);
    }
  }
  cudaDeviceSynchronize();
  region.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    for (int rank = 0; rank < world_size; ++rank) {
      for (int i = 0; i < num_weights; ++i) {
        const Product& own = i > 0 ? others[rank] : products[rank];
        Sums expected;
        for (const Product& each : products)
          append(expected, multiply(each.xs[call], each.x_scales[call], own.weight, own.weight_scales));
        add(expected, products[rank].bias.values);
        const size_t index = call * num_weights + i;
        if (wide) {
          expect(wides[rank][index], expected, name_of(call, rank, "out"));
        } else {
          expect(outs[rank][index], expected, problem.dtype, name_of(call, rank, "out"));
        }
      }
      if (!collects) continue;
      Sums factors(scale_columns * scale_rows);
      for (int row = 0; row < m; ++row) {
        const Product& source = products[row / rows];
        const Fp8Values& all = gathered[rank][call];
        for (int column = 0; column < k; ++column) {
          const int value = source.xs[call].at(row % rows, column);
          if (all.data[static_cast<int64_t>(row) * all.stride + column] == fp8_of(value, problem.x_dtype))
            continue;
          wrong("gathered row ", row, " on rank ", rank);
        }
        for (int column = 0; column < scale_columns; ++column) {
          const float scale = scales[rank][call].data[column * scale_rows + row];
          if (scale == std::ldexp(1.0f, source.x_scales[call].exponent(row % rows, column))) continue;
          wrong("gathered scale ", row, ", ", column, " on rank ", rank, " is ", scale);
        }
      }
    }
  }
}

}  // namespace

const std::vector<NamedCase> kCases = {{"fp8_gemm_rs", gemm_rs}, {"fp8_ag_gemm", ag_gemm}};

}  // namespace cases
