// AllGather alone and in front of a GEMM: rows pushed by CTAs or by copy engines.
#include <algorithm>

#include "cuda_runtime_api.h"
#include "ranks.h"

namespace cases {
namespace {

using flux::ag_gemm::Rows;
using flux::ag_gemm::Transport;

constexpr int kCalls = 3;  // each of the two buffers is used again

// By CTAs, or by copy engines with chunks of one or two blocks of rows.
struct Way {
  bool copied;
  int chunk_rows;

  explicit Way(Random& random) : copied(random.below(3) == 0), chunk_rows(128 * random.between(1, 2)) {}
  Transport of_call(int call) const {
    return copied ? Transport{static_cast<uint32_t>(call + 1), chunk_rows} : Transport{0, 0};
  }
  std::string name() const { return copied ? "chunks of " + std::to_string(chunk_rows) + ", " : ""; }
};

Ranks gathering_ranks(const flux::ag_gemm::Layout& layout, uint64_t seed, const Way& way) {
  return {layout.world_size, sizes_of(layout), way.copied ? 0 : epochs_before(seed)};
}

// A rank's operands of all calls. The stream overwrites x behind each call.
struct Rank {
  std::vector<Values> xs, gathered;
  Values garbage;

  Rank(Random& random, int rank, int world_size, int rows, int k, DType dtype)
      : garbage(rank, "garbage", rows, k) {
    for (int call = 0; call < kCalls; ++call) {
      xs.emplace_back(rank, "x", rows, k).fill(random, dtype, 2);
      gathered.emplace_back(rank, "gathered", rows * world_size, k);
    }
  }
  void overwrite(int call) {
    const Values& x = xs[call];
    cudaMemcpyAsync(x.data, garbage.data, x.rows * x.columns * 2, cudaMemcpyDefault, nullptr);
  }
};

std::vector<Rank> make_ranks(Random& random, int world_size, int rows, int k, DType dtype) {
  std::vector<Rank> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(random, rank, world_size, rows, k, dtype);
  return ranks;
}

void expect_gathered(const std::vector<Rank>& ranks, int call, DType dtype) {
  Sums all;
  for (const Rank& each : ranks) append(all, each.xs[call].values);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    expect(ranks[rank].gathered[call], all, dtype, name_of(call, static_cast<int>(rank), "gathered"));
  }
}

void all_gather(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 3, 4, 8});
  const auto dtype = draw_dtype(random);
  // More blocks than CTAs; or blocks of one piece, or of several, of which the last is shorter.
  const bool long_rows = world_size == 2 && random.below(3) != 0;
  const int rows = world_size == 8 && random.below(3) == 0 ? 900 : random.one_of({1, 37, 128, 200, 300});
  const int k = 8 * (rows == 900 ? random.between(1, 3)
                     : long_rows ? random.between(33, 70)
                                 : random.between(1, 16));
  const Way way(random);
  const bool begins =
      way.copied && random.below(2) == 0;  // copies that start before other work of the stream
  start(seed, world_size, random.one_of({1, 3, 8}), random);
  describe(way.name(), begins ? "begun, " : "", words(world_size, rows * world_size, k, 0, dtype));

  const Ranks region =
      gathering_ranks(flux::ag_gemm::make_layout(rows * world_size, k, world_size), seed, way);
  std::vector<Rank> ranks = make_ranks(random, world_size, rows, k, dtype);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    Rank& mine = ranks[rank];
    const auto& symm = region.symm[rank];
    for (int call = 0; call < kCalls; ++call) {
      const auto x = mine.xs[call].matrix();
      if (begins) flux::ag_gemm::begin_all_gather(x, symm, way.of_call(call), nullptr);
      flux::ag_gemm::all_gather(x, mine.gathered[call].matrix(), symm, way.of_call(call),
                                begins ? Rows::kBegun : Rows::kToSend, {}, nullptr);
      mine.overwrite(call);
    }
  }
  cudaDeviceSynchronize();
  region.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) expect_gathered(ranks, call, dtype);
}

// The columns of one weight of a rank: several weights may follow one gather.
struct Columns {
  Values weight, bias;
  std::vector<Values> outs;

  Columns(Random& random, int rank, int m, int n, int k, bool transposed, DType dtype)
      : weight(rank, "weight", transposed ? k : n, transposed ? n : k), bias(rank, "bias", 1, n) {
    weight.fill(random, dtype, 1);
    bias.fill(random, dtype);
    for (int call = 0; call < kCalls; ++call) outs.emplace_back(rank, "out", m, n, random.below(2) * 8);
  }

  void check(const std::vector<Rank>& ranks, int call, bool transposed, DType dtype, int rank) const {
    Sums expected;
    for (const Rank& each : ranks) append(expected, multiply(each.xs[call], weight, transposed));
    add(expected, bias.values);
    expect(outs[call], expected, dtype, name_of(call, rank, "out"));
  }
};

void ag_gemm(uint64_t seed) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 2, 3, 3, 4, 8});
  const bool many = world_size > 4;  // ranks: everything else is small
  const auto dtype = draw_dtype(random);
  const int config = draw_16bit_tile(random, flux::gemm::supports_gathering);
  const flux::gemm::TileConfig& tile = flux::gemm::kTileConfigs[config];
  const bool transposed = supports_transposed_weight(tile) && random.below(2) == 0;
  const Cluster cluster = random.one_of({Cluster::kNone, Cluster::kPairM, Cluster::kPairN});
  const int size = cluster == Cluster::kNone ? 1 : 2;
  const int rows = many ? random.one_of({1, 8, 40}) : random.one_of({1, 100, 128, 136, 260});
  const int m = rows * world_size;
  const int n = std::max(8, tile.block_n * (many ? 1 : random.between(1, 2)) - 8 * random.below(8));
  const int k = 8 * random.between(1, many ? 8 : 20);
  const int num_sms = many ? 2 : random.one_of({2, 4, 8});
  const int resident = std::max(size, random.one_of({1, 2, 8}));
  const int num_weights =
      !many && random.below(4) == 0 ? 2 : 1;  // the second uses the rows that the first has gathered
  const bool collects = !many && random.below(3) == 0;
  const Way way(random);
  start(seed, world_size, resident, random);
  describe(flux::gemm::config_name(config, cluster), ", ", way.name(), num_weights > 1 ? "two weights, " : "",
           collects ? "collected, " : "", num_sms, " SMs, ", words(world_size, m, n, k, dtype));

  const Ranks region = gathering_ranks(flux::ag_gemm::make_layout(m, k, world_size), seed, way);
  std::vector<Rank> ranks = make_ranks(random, world_size, rows, k, dtype);
  std::vector<std::vector<Columns>> columns(world_size);
  const int packed = pack(config, cluster, random.between(1, 3));
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    const auto& symm = region.symm[rank];
    Rank& mine = ranks[rank];
    for (int i = 0; i < num_weights; ++i) {
      columns[rank].emplace_back(random, rank, m, n, k, transposed, dtype);
    }
    for (int call = 0; call < kCalls; ++call) {
      const auto x = mine.xs[call].matrix();
      bool reuse = false;
      for (const Columns& each : columns[rank]) {
        const auto out = each.outs[call].matrix();
        flux::ag_gemm::ag_gemm(
            {x, each.weight.matrix(), transposed, out, each.bias.data, dtype, packed, num_sms}, symm,
            way.of_call(call), reuse, nullptr);
        reuse = true;
      }
      if (collects) {
        flux::ag_gemm::all_gather(x, mine.gathered[call].matrix(), symm, way.of_call(call), Rows::kHere, {},
                                  nullptr);
      }
      mine.overwrite(call);
    }
  }
  cudaDeviceSynchronize();
  region.expect_done(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    for (int rank = 0; rank < world_size; ++rank) {
      for (const Columns& each : columns[rank]) each.check(ranks, call, transposed, dtype, rank);
    }
    if (collects) expect_gathered(ranks, call, dtype);
  }
}

}  // namespace

const std::vector<NamedCase> kCases = {{"all_gather", all_gather}, {"ag_gemm", ag_gemm}};

}  // namespace cases
