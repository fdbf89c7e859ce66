// The plain GEMM through its host function: ordinary tiles, pairs, split K, swap-AB.
#include "cuda_runtime_api.h"
#include "experts.h"

namespace cases {
namespace {

struct Shape {
  int m, n, k;
  int least_k;
};

// Runs two calls behind each other on one stream, and compares both. The second multiplies other rows, or the result of
// the first.
void run(uint64_t seed, Random& random, Shape shape, bool transposed, int config, int num_sms, int resident,
         const std::string& name, bool swiglu = false) {
  const auto dtype = draw_dtype(random);
  const bool with_bias = random.below(2) == 0 && !swiglu;
  sim::reset_machine(machine_of(seed, resident));
  const bool chained = random.below(3) == 0 && shape.n >= shape.least_k && !swiglu;
  const bool weight_is_constant = random.below(2) == 0;
  if (chained) shape.k = shape.n;
  describe(name, chained ? ", chained, " : ", ", shape.m, " x ", shape.n, " x ", shape.k,
           transposed ? ", [K, N]" : ", [N, K]", name_of(dtype), with_bias ? ", bias" : "",
           swiglu ? ", SwiGLU" : "", weight_is_constant ? ", constant weight, " : ", ", num_sms, " SMs, ",
           resident, " resident");

  Values weight(0, "weight", transposed ? shape.k : shape.n, transposed ? shape.n : shape.k,
                random.below(2) * 8);
  weight.fill(random, dtype);
  Values bias(0, "bias", 1, shape.n);
  bias.fill(random, dtype);
  std::vector<Values> xs, outs;
  flux::runtime::KeptTensorMaps maps;
  for (int call = 0; call < 2; ++call) {
    if (chained && call == 1) {
      xs.push_back(outs.back());
    } else {
      xs.emplace_back(0, "x", shape.m, shape.k, random.below(2) * 8).fill(random, dtype);
    }
    outs.emplace_back(0, "out", shape.m, swiglu ? shape.n / 2 : shape.n, swiglu ? 0 : random.below(2) * 8);
    const void* const bias_data = with_bias ? bias.data : nullptr;
    flux::gemm::GemmArgs args = {xs.back().matrix(), weight.matrix(), transposed, outs.back().matrix(),
                                 bias_data,          dtype,           config,     num_sms};
    args.weight_is_constant = weight_is_constant;
    args.swiglu = swiglu;
    // As calls that are repeated: the second one takes the tensor maps of the first, with other addresses.
    const flux::runtime::KeptTensorMaps::Scope scope(maps);
    flux::gemm::gemm(args, nullptr);
  }
  cudaDeviceSynchronize();
  for (int call = 0; call < 2; ++call) {
    Sums expected = multiply(xs[call], weight, transposed);
    if (with_bias) add(expected, bias.values);
    const std::string out_name = call == 0 ? "out" : "second out";
    if (swiglu) {  // of rounded products, as behind a GEMM
      expect(outs[call], activated(rounded(expected, dtype), shape.n, Activation::kSwiglu), dtype, out_name);
      continue;
    }
    expect(outs[call], expected, dtype, out_name);
    if (!chained || call > 0) continue;
    xs[1].values = rounded(expected, dtype);
  }
}

// A number that is often a multiple of `tile`, or one vector beside it.
int extent(Random& random, int tile, int most_tiles) {
  const int whole = tile * random.between(1, most_tiles);
  return std::max(8, random.below(3) == 0 ? whole : whole - 8 * random.below(tile / 8));
}

void ordinary(uint64_t seed) {
  Random random(seed);
  const int config = draw_16bit_tile(random, flux::gemm::supports_keeping);
  const flux::gemm::TileConfig& tile = flux::gemm::kTileConfigs[config];
  const bool transposed = supports_transposed_weight(tile) && random.below(2) == 0;
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM, Cluster::kPairN});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  const Shape shape = {std::max(1, extent(random, 128, 3) - random.below(8)), extent(random, tile.block_n, 2),
                       extent(random, 64, 6), 8};
  const int num_sms = random.one_of({2, 3, 4, 8});
  const int resident = std::max(size, random.one_of({1, 2, 3, 8}));
  const int packed = pack(config, cluster, random.between(1, 3));
  run(seed, random, shape, transposed, packed, num_sms, resident, flux::gemm::config_name(config, cluster));
}

void split_k(uint64_t seed) {
  Random random(seed);
  const int config = draw_16bit_tile(random, flux::gemm::supports_split);
  const flux::gemm::TileConfig& tile = flux::gemm::kTileConfigs[config];
  const bool transposed = supports_transposed_weight(tile) && random.below(2) == 0;
  const Cluster cluster = random.one_of({Cluster::kSplit2, Cluster::kSplit3});
  const int size = cluster == Cluster::kSplit2 ? 2 : 3;
  const Shape shape = {std::max(1, extent(random, 128, 2) - random.below(8)), extent(random, tile.block_n, 2),
                       64 * (size - 1) + extent(random, 64, 6), 64 * (size - 1) + 8};
  const int resident = std::max(size, random.one_of({2, 3, 4, 8}));
  const int packed = pack(config, cluster, random.between(1, 2));
  run(seed, random, shape, transposed, packed, 8, resident, flux::gemm::config_name(config, cluster));
}

void swap_ab(uint64_t seed) {
  Random random(seed);
  const int config = random.below(k16BitSwapAbTiles);
  const flux::gemm::SwapAbConfig& tile = flux::gemm::kSwapAbConfigs[config];
  const int sharers = tile.in_pairs && random.below(2) == 0 ? 2 : 1,
            split = sharers == 2 ? 1 : 1 << random.below(4);
  const bool swiglu = split == 1 && random.below(2) == 0;
  const bool transposed = !swiglu && random.below(2) == 0;
  const int stage_k = 64 * tile.k_blocks;
  const int n = extent(random, 64, 3);
  const Shape shape = {random.between(1, tile.rows * 2), swiglu ? std::max(16, n / 16 * 16) : n,
                       stage_k * (split - 1) + extent(random, stage_k, 4), stage_k * (split - 1) + 8};
  const int num_sms = std::max(split * sharers, random.one_of({2, 4, 8}));
  const int resident = std::max(split * sharers, random.one_of({1, 2, 8}));
  const int packed = pack(flux::gemm::kFirstSwapAb + config, split, sharers);
  run(seed, random, shape, transposed, packed, num_sms, resident,
      flux::gemm::swap_ab_name(flux::gemm::kFirstSwapAb + config, split, sharers), swiglu);
}

}  // namespace

const std::vector<NamedCase> kCases = {{"ordinary", ordinary}, {"split_k", split_k}, {"swap_ab", swap_ab}};

}  // namespace cases
