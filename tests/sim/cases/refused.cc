// What host functions must refuse: results or operands in fp32 for kernels that write 16 bits, and a choice of a tile
// that is not possible.
#include "cuda_runtime_api.h"
#include "fp8.h"
#include "moe/moe.h"
#include "ranks.h"

namespace cases {
namespace {

using Mode = flux::runtime::Exchange::Mode;

constexpr int kM = 16, kN = 64, kK = 512, kRanks = 2, kTile = 11;

struct Operands {
  Fp8Values x{0, "x", kM, kK}, weight{0, "weight", kN, kK};
  ScaleValues x_scales, weight_scales;
  Floats out{0, "out", kM, kN};

  explicit Operands(Random& random)
      : x_scales(random, 0, "x's scales", ScaleValues::Kind::kTensor, kM, kK, false, 1),
        weight_scales(random, 0, "weight's scales", ScaleValues::Kind::kTensor, kN, kK, true, 1) {
    x.fill(random, DType::kE4M3);
    weight.fill(random, DType::kE4M3);
  }
  flux::gemm::Scales scales() const { return scales_of(x_scales, weight_scales, DType::kE4M3, false); }
  flux::gemm::GemmArgs args(int config) const {
    return {x.matrix(), weight.matrix(), false, out.matrix(), nullptr, DType::kFloat32, config, 8, scales()};
  }
};

struct Refusal {
  const char* name;
  void (*call)(const Operands&, const Ranks&);
};

const Refusal kRefusals[] = {
    {"gemm_rs",
     [](const Operands& operands, const Ranks& ranks) {
       flux::gemm_rs::gemm_rs(operands.args(kTile), ranks.symm[0], {}, false, nullptr);
     }},
    {"gemm_ar",
     [](const Operands& operands, const Ranks& ranks) {
       const int config = pack(flux::gemm::kFirstSwapAb + 8, 1, 1);
       flux::gemm_ar::gemm_ar(operands.args(config), {}, ranks.symm[0], Mode::kOneShot, nullptr);
     }},
    {"gemm_ar of 16 bits",
     [](const Operands& operands, const Ranks& ranks) {
       flux::gemm::GemmArgs args = operands.args(pack(flux::gemm::kFirstSwapAb + 2, 1, 1));
       args.scales = {};
       flux::gemm_ar::gemm_ar(args, {}, ranks.symm[0], Mode::kOneShot, nullptr);
     }},
    {"all_reduce",
     [](const Operands& operands, const Ranks& ranks) {
       flux::gemm_ar::all_reduce(operands.out.matrix(), operands.out.matrix(), DType::kFloat32, {},
                                 ranks.symm[0], 8, Mode::kOneShot, nullptr);
     }},
    {"grouped_gemm",
     [](const Operands& operands, const Ranks&) {
       flux::moe::GroupedGemmArgs args = {};
       args.x = operands.x.matrix();
       args.weight = shards_of(operands.weight.matrix(), 1);
       args.num_rows = kM;
       args.out = operands.out.data;
       args.dtype = DType::kFloat32;
       args.config = kTile;
       args.scales = operands.scales();
       flux::moe::grouped_gemm(args, nullptr);
     }},
    {"combine",
     [](const Operands& operands, const Ranks&) {
       flux::moe::combine(operands.out.matrix(), DType::kFloat32, nullptr, nullptr, 1, 1, operands.out.data,
                          nullptr);
     }},
    {"gather_rows",
     [](const Operands& operands, const Ranks&) {
       flux::moe::gather_rows({nullptr, 1, 8, DType::kFloat32}, nullptr, nullptr, nullptr, operands.out.data,
                              nullptr);
     }},
    {"quantize",
     [](const Operands& operands, const Ranks&) {
       flux::gemm::quantize(operands.out.matrix(), DType::kFloat32, kM, {}, nullptr);
     }},
    {"add_norm",
     [](const Operands& operands, const Ranks&) {
       void* const out = operands.out.data;
       flux::gemm::add_norm({out, out, out, out, 1, 8, 0.0f}, DType::kFloat32, nullptr);
     }},
    {"gemm_rs, a pair of CTAs on one SM",
     [](const Operands& operands, const Ranks& ranks) {
       auto args = operands.args(pack(kTile, Cluster::kPairM, 0));
       args.dtype = DType::kFloat16;
       args.num_sms = 1;
       flux::gemm_rs::gemm_rs(args, ranks.symm[0], {}, false, nullptr);
     }},
};

void refused(uint64_t seed) {
  Random random(seed);
  const Refusal& refusal = kRefusals[seed % std::size(kRefusals)];
  start(seed, kRanks, 8, random);
  describe(refusal.name);
  const auto layout = flux::gemm_rs::make_layout(kM, kN, kRanks, flux::gemm::kTileConfigs[kTile]);
  const Ranks ranks(kRanks, {layout.num_signals() * 4, layout.slot_bytes(),
                             exchange_sizes(kM, kN, kRanks, Mode::kOneShot).exchange_bytes});
  const Operands operands(random);
  try {
    refusal.call(operands, ranks);
  } catch (const flux::runtime::Error&) {
    return;
  }
  wrong("was not refused");
}

}  // namespace

const std::vector<NamedCase> kCases = {{"refused", refused}};

}  // namespace cases
