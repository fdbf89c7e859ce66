// The plain GEMM of fp8 operands: ordinary tiles, split K, swap-AB; and that sums are promoted. Quantisation.
#include "cuda_runtime_api.h"
#include "fp8.h"

namespace cases {
namespace {

using flux::gemm::TileConfig;

struct Shape {
  int m, n, k;
};

// Two calls behind each other on one stream, with other rows of x and their scales.
void run(uint64_t seed, Random& random, Shape shape, int config, bool promotes, int num_sms, int resident,
         const std::string& name) {
  sim::reset_machine(machine_of(seed, resident));
  const ScaleKinds kinds = draw_kinds(random, promotes && random.below(3) > 0);
  if (kinds.blocks()) shape.k = ceil_div(shape.k, kScaleBlock) * kScaleBlock;
  const DType x_dtype = promotes && random.below(3) == 0 ? DType::kE5M2 : DType::kE4M3;
  const DType drawn = random.below(3) == 0   ? DType::kFloat16
                      : random.below(3) == 0 ? DType::kFloat32
                                             : DType::kBFloat16;
  const DType dtype = seed % 4 == 2 ? DType::kFloat32 : drawn;
  const bool with_bias = random.below(2) == 0, fast = !promotes || (!kinds.blocks() && random.below(2) == 0);
  describe(name, ", ", shape.m, " x ", shape.n, " x ", shape.k, ", ", kinds.name(),
           x_dtype == DType::kE5M2 ? "x of e5m2" : "x of e4m3", name_of(dtype), with_bias ? ", bias" : "",
           fast ? ", fast, " : ", ", num_sms, " SMs, ", resident, " resident");

  const auto weight =
      Fp8Values(0, "weight", shape.n, shape.k, random.below(2) * 16).fill(random, DType::kE4M3);
  const ScaleValues weight_scales(random, 0, "weight's scales", kinds.weight, shape.n, shape.k, true, 2);
  Values bias(0, "bias", 1, shape.n);
  Floats wide_bias(0, "bias", 1, shape.n);
  bias.fill(random, dtype == DType::kFloat32 ? DType::kBFloat16 : dtype);
  wide_bias.fill(bias);
  const void* const bias_data = dtype == DType::kFloat32 ? static_cast<void*>(wide_bias.data) : bias.data;
  std::vector<Fp8Values> xs;
  std::vector<ScaleValues> x_scales;
  std::vector<Values> outs;
  std::vector<Floats> sums;
  for (int call = 0; call < 2; ++call) {
    xs.push_back(Fp8Values(0, "x", shape.m, shape.k, random.below(2) * 16).fill(random, x_dtype));
    x_scales.emplace_back(random, 0, "x's scales", kinds.x, shape.m, shape.k, false, 1);
    const int padding = random.below(2) * 8;
    outs.emplace_back(0, "out", shape.m, shape.n, padding);
    // Offsets of the last rows in fp32 need 64 bits.
    const bool far = dtype == DType::kFloat32 && shape.m > 2;
    sums.emplace_back(0, "out", shape.m, shape.n, far ? (1 << 30) / (shape.m - 1) / 4 * 8 + 8 : padding);
    flux::gemm::gemm({xs.back().matrix(), weight.matrix(), /*transpose_weight=*/false,
                      dtype == DType::kFloat32 ? sums.back().matrix() : outs.back().matrix(),
                      with_bias ? bias_data : nullptr, dtype, config, num_sms,
                      scales_of(x_scales.back(), weight_scales, x_dtype, fast)},
                     nullptr);
  }
  cudaDeviceSynchronize();
  for (size_t call = 0; call < 2; ++call) {
    Sums expected = multiply(xs[call], x_scales[call], weight, weight_scales);
    if (with_bias) add(expected, bias.values);
    const char* const what = call == 0 ? "out" : "second out";
    if (dtype == DType::kFloat32) {
      expect(sums[call], expected, what);
    } else {
      expect(outs[call], expected, dtype, what);
    }
  }
}

// A number that is often a multiple of `tile`, or some steps beside it.
int extent(Random& random, int tile, int most_tiles, int step) {
  const int whole = tile * random.between(1, most_tiles);
  return std::max(step, random.below(2) == 0 ? whole : whole - step * random.below(tile / step));
}

void ordinary(uint64_t seed) {
  Random random(seed);
  const int config = draw_fp8_tile(random, flux::gemm::supports_keeping);
  const TileConfig& tile = flux::gemm::kTileConfigs[config];
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM, Cluster::kPairN});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  Shape shape = {std::max(1, extent(random, 128, 3, 8) - random.below(8)), extent(random, tile.block_n, 2, 8),
                 extent(random, 128, 4, 16)};
  const int num_sms = random.one_of({2, 3, 4, 8}), resident = std::max(size, random.one_of({1, 2, 3, 8}));
  const int packed = pack(config, cluster, random.between(1, 3));
  // Math warps hold scales of 32 k-blocks of the weight.
  if (random.below(6) == 0)
    shape = {random.between(1, 8), 8 * random.between(1, 4), 128 * random.between(33, 36)};
  run(seed, random, shape, packed, tile.promotes(), num_sms, resident,
      flux::gemm::config_name(config, cluster));
}

void split_k(uint64_t seed) {
  Random random(seed);
  const int config = draw_fp8_tile(random, flux::gemm::supports_split);
  const TileConfig& tile = flux::gemm::kTileConfigs[config];
  const Cluster cluster = random.one_of({Cluster::kSplit2, Cluster::kSplit3});
  const int size = cluster == Cluster::kSplit2 ? 2 : 3;
  const Shape shape = {std::max(1, extent(random, 128, 2, 8) - random.below(8)),
                       extent(random, tile.block_n, 2, 8), 128 * (size - 1) + extent(random, 128, 4, 16)};
  const int resident = std::max(size, random.one_of({2, 3, 4, 8}));
  const int packed = pack(config, cluster, random.between(1, 2));
  run(seed, random, shape, packed, true, 8, resident, flux::gemm::config_name(config, cluster));
}

void swap_ab(uint64_t seed) {
  Random random(seed);
  int config = random.below(flux::gemm::kNumSwapAbConfigs);
  while (!flux::gemm::kSwapAbConfigs[config].is_fp8) config = random.below(flux::gemm::kNumSwapAbConfigs);
  const flux::gemm::SwapAbConfig& tile = flux::gemm::kSwapAbConfigs[config];
  const int sharers = tile.in_pairs && random.below(2) == 0 ? 2 : 1,
            split = sharers == 2 ? 1 : 1 << random.below(4);
  const int stage_k = 128 * tile.k_blocks;
  const Shape shape = {random.between(1, tile.rows * 2), extent(random, 64, 4, 8),
                       stage_k * (split - 1) + extent(random, 128, 4, 16)};
  const int num_sms = std::max(split * sharers, random.one_of({2, 4, 8}));
  const int resident = std::max(split * sharers, random.one_of({1, 2, 8}));
  const int packed = pack(flux::gemm::kFirstSwapAb + config, split, sharers);
  run(seed, random, shape, packed, true, num_sms, resident,
      flux::gemm::swap_ab_name(flux::gemm::kFirstSwapAb + config, split, sharers));
}

// The first k-block is 2^14, each later one adds one, and the last takes 2^14 away again. The tensor core keeps 13 bits, so
// it loses every one that it adds to 2^14 itself: only promoted sums are right. Where pairs of k-blocks are promoted, those
// that may be in a pair with 2^14 are zero.
void promotion(uint64_t seed) {
  Random random(seed);
  constexpr int kLarge = 128;  // its square is 2^14
  const bool swaps = random.below(2) == 0, fast = !swaps && random.below(3) == 0;
  const int config =
      swaps ? flux::gemm::kFirstSwapAb + flux::gemm::kNumSwapAbConfigs - 1 - random.below(4)
            : draw_fp8_tile(
                  random, fast ? [](const TileConfig& c) { return !c.promotes() && supports_keeping(c); }
                               : [](const TileConfig& c) { return c.promotes() && supports_keeping(c); });
  const bool blocks = !fast && random.below(2) == 0;
  const int zeros = !swaps && !blocks && flux::gemm::promotes_pairs(flux::gemm::kTileConfigs[config]) ? 1 : 0;
  const int ones = random.between(1, 4), k_blocks = ones + 2 * zeros + 2, m = random.between(1, 40),
            n = 8 * random.between(1, 20);
  sim::reset_machine(machine_of(seed, 8));
  describe("tile ", config, fast ? ", fast" : "", blocks ? ", block scales, " : ", ", m, " x ", n, ", ", ones,
           " ones");
  const int k = k_blocks * kScaleBlock;
  Fp8Values x(0, "x", m, k), weight(0, "weight", n, k);
  const auto fill = [&](Fp8Values& matrix, bool is_x) {
    for (int row = 0; row < matrix.rows; ++row) {
      for (int column = 0; column < k; ++column) matrix.set(row, column, 0, DType::kE4M3);
      for (int block = 0; block < k_blocks; ++block) {
        const bool last = block == k_blocks - 1;
        const bool one = block > zeros && block < k_blocks - 1 - zeros;
        const int value = last && is_x ? -kLarge : last || block == 0 ? kLarge : one ? 1 : 0;
        matrix.set(row, block * kScaleBlock, value, DType::kE4M3);
      }
    }
  };
  fill(x, true);
  fill(weight, false);
  const auto kind = blocks ? ScaleValues::Kind::kBlocks : ScaleValues::Kind::kTensor;
  const ScaleValues x_scales(random, 0, "x's scales", kind, m, k, false, 0);
  const ScaleValues weight_scales(random, 0, "weight's scales", kind, n, k, true, 0);
  const Floats out(0, "out", m, n);
  const int packed = pack(config, 1, 1);
  flux::gemm::gemm({x.matrix(), weight.matrix(), false, out.matrix(), nullptr, DType::kFloat32, packed, 8,
                    scales_of(x_scales, weight_scales, DType::kE4M3, fast)},
                   nullptr);
  cudaDeviceSynchronize();
  // What is fast must lose them here, or this case could not see that a promoted sum was not.
  expect(out, Sums(m * n, fast ? 0 : ones), "out");
}

// Numbers of all sizes, and some that are none.
uint16_t draw_bits(Random& random, DType dtype) {
  if (random.below(200) == 0) return static_cast<uint16_t>(random.below(65536));
  const float value = std::ldexp(static_cast<float>(random.between(-999, 999)), random.between(-14, 2));
  return rounded(value, dtype);
}

void quantize(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const int matrices = random.between(1, 3),
            height = random.one_of({1, 3, random.between(4, 40), random.between(120, 140)});
  const int rows = matrices * height, columns = 8 * random.between(1, random.below(3) == 0 ? 300 : 40);
  sim::reset_machine(machine_of(seed, random.one_of({1, 2, 8})));
  std::vector<Values> xs;
  std::vector<QuantizedValues> results;
  describe(matrices, " x ", height, " x ", columns);
  for (int call = 0; call < 2; ++call) {
    Values& x = xs.emplace_back(0, "x", rows, columns);
    const bool zero = random.below(10) == 0;
    for (int i = 0; i < rows * columns; ++i) x.data[i] = zero ? 0 : draw_bits(random, dtype);
    sim::mark_written(x.data, rows * columns * int64_t{2});
    flux::gemm::quantize(x.matrix(), dtype, height,
                         results.emplace_back(random, 0, rows, columns, height, false).to, nullptr);
  }
  cudaDeviceSynchronize();
  for (size_t call = 0; call < 2; ++call) results[call].expect_of(xs[call], dtype);
}

}  // namespace

const std::vector<NamedCase> kCases = {{"fp8_ordinary", ordinary},
                                       {"fp8_split_k", split_k},
                                       {"fp8_swap_ab", swap_ab},
                                       {"fp8_promotion", promotion},
                                       {"quantize", quantize}};

}  // namespace cases
