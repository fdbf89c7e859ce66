// GEMM+ReduceScatter, GEMM+AllReduce, AllReduce and ReduceScatter on two to eight ranks.
#include "ranks.h"

#include <algorithm>
#include <cmath>

#include "cuda_runtime_api.h"
#include "fp8.h"
#include "gemm/finish.cuh"

namespace cases {
namespace {

using Mode = flux::runtime::Exchange::Mode;

constexpr int kCalls = 3;  // each of the two buffers is used again

// What each rank multiplies. With elements of x up to 1, partial sums are exact in 16 bits.
struct Product {
  Values weight, bias;
  std::vector<Values> xs;  // of each call

  Product(Random& random, int rank, int m, int n, int k, bool transposed, DType dtype, int largest = 1)
      : weight(rank, "weight", transposed ? k : n, transposed ? n : k), bias(rank, "bias", 1, n) {
    weight.fill(random, dtype, 1);
    bias.fill(random, dtype);
    for (int call = 0; call < kCalls; ++call) {
      xs.emplace_back(rank, "x", m, k).fill(random, dtype, largest);
    }
  }
};

Sums summed(const std::vector<Product>& ranks, int call, bool transposed) {
  Sums sum;
  for (const Product& each : ranks) {
    const Sums part = multiply(each.xs[call], each.weight, transposed);
    sum.resize(part.size());
    add(sum, part);
  }
  return sum;
}

// `freezes`: a rank stands still, in some call, until the others have run into their deadlines and finished.
void gemm_rs(uint64_t seed, bool freezes) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 2, 3, 3, 4, 8});
  const bool many = world_size > 4;  // ranks: everything else is small
  const auto dtype = draw_dtype(random);
  const int config = draw_16bit_tile(random, flux::gemm::supports_sending);
  const flux::gemm::TileConfig& tile = flux::gemm::kTileConfigs[config];
  const bool transposed = supports_transposed_weight(tile) && random.below(2) == 0;
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  const int rows = many ? 8 : random.one_of({8, 100, 128, 136, 256}), m = rows * world_size;
  const int n = std::max(8, tile.block_n * (many ? 1 : random.between(1, 2)) - 8 * random.below(8));
  const int k = 8 * random.between(1, many ? 8 : 24);
  const int num_sms = many ? 2 : random.one_of({2, 4, 8});
  // Copy engines wait for the whole launch of no rank, but their chunks are sent in order.
  const bool copied = freezes ? random.below(4) != 0 : random.below(3) == 0;
  start(seed, world_size, std::max(size, random.one_of({1, 2, 3, 8})), random, size, /*late_rank=*/-1,
        freezes);
  const bool rounds_own = random.below(2) == 0;
  describe(flux::gemm::config_name(config, cluster), copied ? ", copied, " : ", ",
           rounds_own ? "own rounded, " : "", words(world_size, m, n, k, dtype));

  const auto layout = flux::gemm_rs::make_layout(m, n, world_size, tile);
  const Ranks ranks(world_size, sizes_of(layout), copied ? 0 : epochs_before(seed));
  std::vector<Product> products;
  std::vector<std::vector<Values>> outs(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    products.emplace_back(random, rank, m, n, k, transposed, dtype, /*largest=*/60);
    for (int call = 0; call < kCalls; ++call) outs[rank].emplace_back(rank, "out", rows, n);
  }
  const int chunks = std::min(layout.tiles_per_slot(), random.between(1, 3));
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    Product& product = products[rank];
    for (int call = 0; call < kCalls; ++call) {
      const auto transport = transport_of(layout, rank, copied ? call + 1 : 0, chunks);
      const flux::gemm::GemmArgs args = {product.xs[call].matrix(),
                                         product.weight.matrix(),
                                         transposed,
                                         outs[rank][call].matrix(),
                                         product.bias.data,
                                         dtype,
                                         pack(config, cluster, 1),
                                         num_sms};
      flux::gemm_rs::gemm_rs(args, ranks.symm[rank], transport, rounds_own, nullptr);
    }
  }
  cudaDeviceSynchronize();
  if (!freezes) ranks.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    std::vector<Sums> parts;
    for (const Product& each : products) parts.push_back(multiply(each.xs[call], each.weight, transposed));
    for (int rank = 0; rank < world_size; ++rank) {
      const bool failed = ranks.symm[rank].error->code != 0;
      // What storers send is exact or absent. What copy engines send may be overwritten, but then the rank knows.
      if (failed && copied) continue;
      expect(outs[rank][call], scattered(parts, rank, rounds_own, dtype, products[rank].bias), dtype,
             name_of(call, rank, "out"), failed);
    }
  }
}

void gemm_rs(uint64_t seed) { gemm_rs(seed, /*freezes=*/false); }
void gemm_rs_frozen(uint64_t seed) { gemm_rs(seed, /*freezes=*/true); }

// Two launches of each rank that nothing orders, on one workspace: they happen to follow each other, or a rank says that
// they have not. Both sum the same, so it does not matter which of a rank's launches is the first.
void overlap(uint64_t seed) {
  Random random(seed);
  const int world_size = random.between(2, 3), m = random.between(1, 3), n = 8 * random.between(1, 100);
  const Mode mode = random.one_of({Mode::kOneShot, Mode::kTwoShot});
  const auto dtype = DType::kBFloat16;
  const int num_sms = random.between(1, 4);
  start(seed, world_size, random.one_of({1, 2, 3, 8}), random, /*cluster=*/1);
  sim::machine.config.reports_races = false;
  describe(words(world_size, m, n, 0, dtype));
  const Ranks ranks(world_size, exchange_sizes(m, n, world_size, mode));
  std::vector<Values> xs, outs;
  Sums sum(m * n);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    xs.emplace_back(rank, "x", m, n).fill(random, dtype, 8);
    add(sum, xs.back().values);
    for (int launch = 0; launch < 2; ++launch) {
      cudaStream_t stream = nullptr;
      if (launch > 0) cudaStreamCreateWithFlags(&stream, 0);
      outs.emplace_back(rank, "out", m, n);
      flux::gemm_ar::all_reduce(xs.back().matrix(), outs.back().matrix(), dtype, /*extras=*/{},
                                ranks.symm[rank], num_sms, mode, stream);
    }
  }
  cudaDeviceSynchronize();
  const auto failed = [](const auto& each) { return each.error->code != 0; };
  if (std::ranges::any_of(ranks.symm, failed)) return;
  ranks.expect_rest(2);
  for (const Values& out : outs) expect(out, sum, dtype, "out");
}

void all_reduce(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 3, 4, 8});
  const auto dtype = draw_dtype(random);
  const Mode mode = random.one_of({Mode::kOneShot, Mode::kTwoShot, Mode::kScatter});
  const bool scatters = mode == Mode::kScatter;
  // Rows for which shared memory has no room, or not for the norm's weight too.
  const bool wide = world_size < 4 && !scatters && random.below(6) == 0;
  const int rows = wide ? 1 : random.between(1, 5), m = scatters ? rows * world_size : rows;
  // Also more vectors than a CTA has threads, and rows that CTAs share.
  const int vectors = random.below(4) == 0 ? random.between(520, 760) : random.between(1, 100);
  const int n = 8 * (wide ? random.one_of({1600, 3100}) : vectors);
  const int num_sms = random.one_of({1, 2, 3, 4, 8});  // 8: all, so that launches start early
  const bool adds = !scatters && random.below(2), norms = wide || (!scatters && random.below(2));
  const bool chained = !scatters && !norms && random.below(3) == 0;  // x is the result of the call before
  const bool in_place = !scatters && !norms && !chained && random.below(3) == 0;
  Random ends(seed);  // of the quantisation
  const bool quantises = norms && ends.below(2) == 0;
  start(seed, world_size, random.one_of({1, 2, 3, 8}), random, /*cluster=*/1);
  const char* const names[] = {"one-shot, ", "two-shot, ", "scatter, "};
  describe(names[static_cast<int>(mode)], norms ? "norm, " : "", quantises ? "quantised, " : "",
           adds ? "residual, " : "", chained ? "chained, " : "", in_place ? "in place, " : "",
           words(world_size, m, n, 0, dtype));

  const Ranks ranks(world_size, exchange_sizes(m, n, world_size, mode));
  std::vector<std::vector<Values>> xs(world_size), outs(world_size), normed(world_size);
  std::vector<QuantizedValues> quantised;
  Values residual(0, "residual", m, n), weight(0, "norm weight", 1, n);  // the same for all ranks
  residual.fill(random, dtype, 8);
  weight.fill(random, dtype, 3);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    for (int call = 0; call < kCalls; ++call) {
      std::vector<Values>&x_of = xs[rank], &out_of = outs[rank];
      Values& x = x_of.emplace_back(rank, "x", m, n).fill(random, dtype, 8);
      if (chained && call > 0) x.data = out_of.back().data;
      Values& out = out_of.emplace_back(in_place ? x : Values(rank, "out", scatters ? rows : m, n));
      Values& norm = normed[rank].emplace_back(rank, "norm", m, n);
      flux::gemm_ar::Extras extras = {adds ? residual.data : nullptr, norms ? weight.data : nullptr, kEps,
                                      norms ? out.data : nullptr};
      if (quantises) extras.quantized = quantised.emplace_back(ends, rank, m, n, m, /*end=*/true).to;
      flux::gemm_ar::all_reduce(x.matrix(), norms ? norm.matrix() : out.matrix(), dtype, extras,
                                ranks.symm[rank], num_sms, mode, nullptr);
    }
  }
  cudaDeviceSynchronize();
  ranks.expect_done(kCalls);
  Sums before;
  for (int call = 0; call < kCalls; ++call) {
    Sums sum(m * n);
    for (const auto& each : xs) add(sum, chained && call > 0 ? before : each[call].values);
    if (adds) add(sum, residual.values);
    before = rounded(sum, dtype);
    for (int rank = 0; rank < world_size; ++rank) {
      const Values& out = outs[rank][call];
      const auto first = sum.begin() + (scatters ? rank * rows * n : 0);
      const Sums expected(first, first + out.rows * n);
      expect(out, expected, dtype, name_of(call, rank, "out"));
      const Values& norm = normed[rank][call];
      if (norms) expect_norm(norm, expected, weight, dtype);
      if (quantises) quantised[rank * kCalls + call].expect_of(norm, dtype);
    }
  }
}

void gemm_ar(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 2, 3, 3, 4, 8});
  const bool many = world_size > 4;  // ranks: everything else is small
  const auto dtype = draw_dtype(random);
  const Mode mode = random.one_of({Mode::kOneShot, Mode::kTwoShot});
  const bool transposed = random.below(2) == 0;
  const bool wide = !many && random.below(6) == 0;  // a thread has several vectors of a row
  const bool norms = wide || random.below(2) == 0, adds = random.below(2) == 0;
  Random ends(seed);  // of the quantisation
  // With two shots data alone orders the read of a residual before the store of the sum over it: what a thread reads
  // goes into what another stores. Clocks do not know that.
  const bool quantises = norms && ends.below(2) == 0,
             in_place = adds && !norms && mode == Mode::kOneShot && ends.below(2) == 0;
  int n = 64 * random.between(1, many ? 1 : 3) - 8 * random.below(3);
  int k = 64 * random.between(1, many ? 2 : 4) - 8 * random.below(4);
  int m = random.between(1, many ? 8 : 40);
  // Rows of several warps, and several rows for each CTA.
  if (norms && !wide && !many && random.below(3) == 0)
    n = 8 * random.between(33, 80), k = 8 * random.between(1, 8);
  if (wide) n = 8 * random.between(260, 520), k = 8, m = random.between(1, 3);
  const int id = random.one_of({2, 2, 3, 4});
  const flux::gemm::SwapAbConfig& tile = flux::gemm::kSwapAbConfigs[id];
  if (!wide && !many) m = random.one_of({m, tile.rows + m, 2 * tile.rows});
  const int stages = flux::gemm::swap_ab_stage_blocks(tile, k);
  // Of CTAs that share tiles of the weight.
  const bool pairs = !many && tile.in_pairs && random.below(2) == 0;
  const int split = pairs || stages < 2 ? 1 : many || stages < 4 ? 2 : random.one_of({2, 4});
  const int size = pairs ? 2 : split;
  const int config = pack(flux::gemm::kFirstSwapAb + id, split, pairs ? 2 : 1);
  const int num_sms = many ? 2 : random.one_of({4, 8});
  start(seed, world_size, std::max(size, random.one_of({1, 2, 3, 8})), random, size);
  describe("swap-AB ", config & 0xFF, mode == Mode::kOneShot ? ", one-shot" : ", two-shot",
           norms ? ", norm, " : ", ", quantises ? "quantised, " : "", adds ? "residual, " : "",
           in_place ? "in place, " : "", config >> 8, ", ", num_sms, " SMs, ",
           words(world_size, m, n, k, dtype));

  const Ranks ranks(world_size, exchange_sizes(m, n, world_size, mode));
  std::vector<Product> products;
  for (int rank = 0; rank < world_size; ++rank)
    products.emplace_back(random, rank, m, n, k, transposed, dtype);
  std::vector<std::vector<Values>> outs(world_size), sums(world_size);
  std::vector<QuantizedValues> quantised;
  Values residual(0, "residual", m, n), weight(0, "norm weight", 1, n), bias(0, "bias", 1, n);
  residual.fill(random, dtype, 8);
  weight.fill(random, dtype);
  bias.fill(random, dtype);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    Product& product = products[rank];
    for (int call = 0; call < kCalls; ++call) {
      Values& out = outs[rank].emplace_back(rank, "out", m, n);
      Values& sum = sums[rank].emplace_back(rank, "sum", m, n);
      flux::gemm::GemmArgs args = {product.xs[call].matrix(),
                                   product.weight.matrix(),
                                   transposed,
                                   out.matrix(),
                                   bias.data,
                                   dtype,
                                   config,
                                   num_sms};
      args.weight_is_constant = ends.below(2) == 0;
      if (in_place) {
        std::copy(residual.data, residual.data + int64_t{m} * n, out.data);
        sim::mark_written(out.data, int64_t{m} * n * 2);
      }
      flux::gemm_ar::Extras extras = {in_place ? out.data
                                      : adds   ? residual.data
                                               : nullptr,
                                      norms ? weight.data : nullptr, kEps, norms ? sum.data : nullptr};
      if (quantises) extras.quantized = quantised.emplace_back(ends, rank, m, n, m, /*end=*/true).to;
      flux::gemm_ar::gemm_ar(args, extras, ranks.symm[rank], mode, nullptr);
    }
  }
  cudaDeviceSynchronize();
  ranks.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    Sums expected = summed(products, call, transposed);
    add(expected, bias.values);
    if (adds) add(expected, residual.values);
    for (int rank = 0; rank < world_size; ++rank) {
      const Values& out = outs[rank][call];
      expect(norms ? sums[rank][call] : out, expected, dtype, name_of(call, rank, "out"));
      if (norms) expect_norm(out, expected, weight, dtype);
      if (quantises) quantised[rank * kCalls + call].expect_of(out, dtype);
    }
  }
}

// A residual that is added to a sum, and the norm of both. The second call adds to the result of the first.
void add_norm(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const bool tall = random.below(3) == 0;  // more rows than a GPU has CTAs
  const int m = tall ? random.between(17, 40) : random.between(1, 12);
  // Also more vectors than a CTA has threads; with the weight, or alone, more than its memory holds.
  const int few = random.between(1, 100);
  const int many =
      random.one_of({random.between(520, 760), random.between(1535, 1600), random.between(3069, 3100)});
  const int n = 8 * (random.below(3) == 0 ? many : few);
  start(seed, 1, random.one_of({1, 2, 8}), random, /*cluster=*/1);
  describe(words(1, m, n, 0, dtype));
  Values total(0, "total", m, n), weight(0, "norm weight", 1, n);
  total.fill(random, dtype);
  weight.fill(random, dtype);
  Sums expected = total.values;
  std::vector<Values> residuals, outs;
  std::vector<Sums> sums;
  for (int call = 0; call < 2; ++call) {
    const Values& residual = residuals.emplace_back(0, "residual", m, n).fill(random, dtype);
    add(expected, residual.values);
    sums.push_back(expected);
    Values& out = outs.emplace_back(0, "norm", m, n);
    flux::gemm::add_norm({total.data, residual.data, weight.data, out.data, m, n, kEps}, dtype, nullptr);
  }
  cudaDeviceSynchronize();
  expect(total, expected, dtype, "total");
  for (size_t call = 0; call < 2; ++call) expect_norm(outs[call], sums[call], weight, dtype);
}

// The bits of a norm depend on its row only: not on the rows beside it, on the CTA that has it, nor on how many clusters a
// rank's GPU holds. Behind a product they may be others than alone. All rows are equal, and eps nearly cancels the mean of
// their squares, so another order of these shows in the result.
void norm_bits(uint64_t seed) {
  Random random(seed);
  const int world_size = 2, n = 64 * random.between(33, 40), k = 128;
  const int calls_rows[kCalls] = {random.between(1, 4), random.between(1, 4), random.between(1, 4)};
  const int most = *std::max_element(std::begin(calls_rows), std::end(calls_rows));
  const auto dtype = draw_dtype(random);
  const auto mode = random.below(2) == 0 ? Mode::kOneShot : Mode::kTwoShot;
  start(seed, world_size, /*resident=*/2, random);
  describe(mode == Mode::kOneShot ? "one-shot, " : "two-shot, ", words(world_size, most, n, k, dtype));
  const Ranks ranks(world_size, exchange_sizes(most, n, world_size, mode));
  Sums row(n);
  std::vector<Values> xs, weights, products, outs, sums;
  Values ones(0, "norm weight", 1, n);
  ones.fill(random, dtype, 0);
  for (int i = 0; i < n; ++i) ones.data[i] = rounded(1, dtype);
  for (int rank = 0; rank < world_size; ++rank) {
    Values& x = xs.emplace_back(rank, "x", most, k).fill(random, dtype, 4);
    for (int i = k; i < most * k; ++i) x.data[i] = x.data[i % k];
    weights.emplace_back(rank, "weight", n, k).fill(random, dtype, 4);
    for (const int m : calls_rows) {
      outs.emplace_back(rank, "out", m, n);
      sums.emplace_back(rank, "sum", m, n);
    }
    const Sums part = multiply(x, weights.back(), false);
    add(row, Sums(part.begin(), part.begin() + n));
    const Values& product = products.emplace_back(rank, "product", most, n);
    for (int i = 0; i < most * n; ++i) product.data[i] = rounded(static_cast<float>(part[i % n]), dtype);
    sim::mark_written(product.data, int64_t{2} * most * n);
  }
  double squares = 0;
  for (const int value : row) {
    const double rounded = rounded_to(value, dtype);
    squares += rounded * rounded;
  }
  int tiles[kCalls];
  const bool alone = random.below(3) == 0;
  for (int& tile : tiles) {
    tile = random.below(2) == 0 ? pack(flux::gemm::kFirstSwapAb + 3, 2, 1)
                                : pack(flux::gemm::kFirstSwapAb + 2, 1, 1);
  }
  const auto eps = static_cast<float>(-squares / n * (1 - 1e-6));
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    for (int call = 0; call < kCalls; ++call) {
      const auto at = rank, result = at * kCalls + call;
      flux::runtime::Matrix x = (alone ? products : xs)[at].matrix();
      x.rows = calls_rows[call];
      const flux::gemm_ar::Extras extras = {nullptr, ones.data, eps, sums[result].data};
      if (alone) {
        flux::gemm_ar::all_reduce(x, outs[result].matrix(), dtype, extras, ranks.symm[at], /*num_sms=*/8,
                                  mode, nullptr);
        continue;
      }
      const flux::gemm::GemmArgs args = {
          x, weights[at].matrix(), false, outs[result].matrix(), nullptr, dtype, tiles[call], /*num_sms=*/8};
      flux::gemm_ar::gemm_ar(args, extras, ranks.symm[at], mode, nullptr);
    }
  }
  cudaDeviceSynchronize();
  ranks.expect_done(kCalls);
  for (const Values& out : outs) {
    for (int i = 0; i < out.rows * n; ++i) {
      const uint16_t first = outs[0].data[i % n];
      if (out.data[i] == first) continue;
      wrong("element ", i % n, " of the norm is ", widened(first, dtype), " in one row, ",
            widened(out.data[i], dtype), " in another");
    }
  }
}

}  // namespace

const std::vector<NamedCase> kCases = {{"gemm_rs", gemm_rs},       {"gemm_rs_frozen", gemm_rs_frozen},
                                       {"all_reduce", all_reduce}, {"overlap", overlap},
                                       {"gemm_ar", gemm_ar},       {"add_norm", add_norm},
                                       {"norm_bits", norm_bits}};

}  // namespace cases
