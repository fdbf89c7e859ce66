// Gradients of experts' weights: stored, or added to fp32 matrices.
#include <algorithm>
#include <cmath>

#include "cuda_runtime_api.h"
#include "experts.h"

namespace cases {
namespace {

// Matrices of each expert in one piece of memory, with columns and elements between them that nobody may touch.
struct Gradients {
  int experts, n, k, bytes;
  int64_t stride, step;
  uint8_t* data;
  Sums before;  // what the matrices hold before the first call, if something is added to them

  Gradients(Random& random, int experts, int n, int k, bool adds)
      : experts(experts),
        n(n),
        k(k),
        bytes(adds ? 4 : 2),
        stride(k + 8 * random.below(2)),
        step(n * stride + 8 * random.below(3)) {
    data = static_cast<uint8_t*>(sim::allocate(experts * step * bytes, 0, "gradients"));
    std::fill(data, data + experts * step * bytes, uint8_t{0x7F});
    if (!adds) return;
    for (int expert = 0; expert < experts; ++expert) {
      for (int row = 0; row < n; ++row) {
        for (int column = 0; column < k; ++column) {
          before.push_back(random.between(-50, 50));
          reinterpret_cast<float*>(data)[at(expert, row, column)] = static_cast<float>(before.back());
        }
      }
    }
    sim::mark_written(data, experts * step * bytes);
  }
  int64_t at(int expert, int row, int column) const { return expert * step + row * stride + column; }
  void give(flux::moe::GroupedWgradArgs& args) const { args.out = {{data, n, k, stride}, experts, step}; }

  // Fails unless every expert but `infinite` has these sums, and nothing is written between the matrices.
  void expect(const std::vector<Sums>& sums, int infinite, DType dtype) const {
    std::vector<bool> inside(experts * step);
    for (int expert = 0; expert < experts; ++expert) {
      for (int row = 0; row < n; ++row) {
        for (int column = 0; column < k; ++column) {
          const int64_t i = at(expert, row, column);
          inside[i] = true;
          if (expert == infinite) continue;
          const auto right = static_cast<float>(sums[expert][row * k + column]);
          const float found = bytes == 4 ? reinterpret_cast<float*>(data)[i]
                                         : widened(reinterpret_cast<uint16_t*>(data)[i], dtype);
          const float rounded = bytes == 4 ? right : rounded_to(right, dtype);
          if (found != rounded) {
            wrong("gradient [", expert, "][", row, "][", column, "] is ", found, ", and not ", right);
          }
        }
      }
    }
    for (int64_t i = 0; i < experts * step * bytes; ++i) {
      if (!inside[i / bytes] && data[i] != 0x7F) wrong("written between the gradients");
    }
  }
};

void grouped_wgrad(uint64_t seed) {
  Random random(seed);
  const auto dtype = draw_dtype(random);
  const bool adds = random.below(2) == 0;
  const int config = random.below(2), num_sms = random.one_of({1, 2, 4, 6});
  const int experts = random.one_of({1, 2, 3, 5});
  const int n = 8 * random.one_of({1, 8, random.between(1, 17), random.between(17, 40)});
  const int k = 8 * random.one_of({1, 32, random.between(1, 33), random.between(33, 70)});
  start(seed, 1, random.one_of({2, 4, 8}), random, 2);
  sim::machine.config.late_stores = true;

  std::vector<int32_t> offsets = {0};
  for (int expert = 0; expert < experts; ++expert) {
    offsets.push_back(offsets.back() + random.one_of({0, 1, 40, 63, 64, 65, 128, 250}));
  }
  const int rows = std::max(1, offsets.back()), more = random.below(3) * 40;  // the last are nobody's
  // Rows that are infinite change nobody else's gradients.
  const int infinite = random.below(2) == 0 ? random.below(experts) : -1;
  describe(experts, " experts, ", offsets.back(), " rows, ", n, " x ", k, ", tile ", config,
           adds ? ", adds, " : ", stores, ", num_sms, " SMs, ", sim::machine.config.resident, " resident");
  Values grad(0, "grad", rows + more, n, 8 * random.below(2)), x(0, "x", rows + more, k, 8 * random.below(2));
  for (Values* each : {&grad, &x}) {
    each->fill(random, dtype, 2);
    for (int row = 0; row < rows + more; ++row) {
      const bool is_infinite = infinite >= 0 && row >= offsets[infinite] && row < offsets[infinite + 1];
      uint16_t* const at = each->data + static_cast<int64_t>(row) * each->stride;
      if (row >= offsets.back()) std::fill(at, at + each->columns, Values::kUntouched);
      if (is_infinite) std::fill(at, at + each->columns, rounded(INFINITY, dtype));
    }
  }
  const Gradients out(random, experts, n, k, adds);
  constexpr int kCalls = 2;
  for (int call = 0; call < kCalls; ++call) {
    flux::moe::GroupedWgradArgs args = {};
    args.grad = grad.matrix();
    args.x = x.matrix();
    args.offsets = copied(offsets, 0, "offsets");
    out.give(args);
    args.adds = adds;
    args.dtype = dtype;
    args.choice = config + random.below(2) * flux::moe::kWgradPrefetches;
    args.num_sms = num_sms;
    flux::moe::grouped_wgrad(args, nullptr);
  }
  cudaDeviceSynchronize();

  std::vector<Sums> sums;
  for (int expert = 0; expert < experts; ++expert) {
    Sums sum(n * k);
    for (int row = offsets[expert]; row < offsets[expert + 1]; ++row) {
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < k; ++j) sum[i * k + j] += grad.at(row, i) * x.at(row, j);
      }
    }
    for (size_t i = 0; adds && i < sum.size(); ++i) {
      sum[i] = out.before[expert * sum.size() + i] + kCalls * sum[i];
    }
    sums.push_back(std::move(sum));
  }
  out.expect(sums, infinite, dtype);
}

}  // namespace

const std::vector<NamedCase> kCases = {{"grouped_wgrad", grouped_wgrad}};

}  // namespace cases
