// What cases of mixtures of experts share.
#pragma once

#include <algorithm>
#include <cmath>

#include "moe/sm90_grouped_gemm.cuh"
#include "moe/tile_choice.h"
#include "ranks.h"
#include "routing.h"

namespace cases {

using flux::moe::Activation;

inline std::string words(const Choices& choices) {
  const Layout& layout = choices.layout;
  const int late = sim::machine.config.late_rank;
  return std::to_string(layout.world_size) + " ranks, " + std::to_string(layout.ep_size) + " slices, " +
         std::to_string(layout.num_experts) + " experts, top " + std::to_string(layout.top_k) + ", " +
         std::to_string(layout.max_tokens) + " tokens, " + choices.name +
         (late >= 0 ? ", rank " + std::to_string(late) + " late, " : ", ") +
         std::to_string(sim::machine.config.resident) + " resident";
}

inline int divisor(Random& random, int number) {
  int found = random.between(1, number);
  while (number % found != 0) found = random.between(1, number);
  return found;
}

inline std::string name_of(int call, int rank) {
  return "call " + std::to_string(call) + ", rank " + std::to_string(rank);
}

// The activation of exact sums, as kernels compute it in fp32.
inline std::vector<float> activated(const std::vector<int>& sums, int n, Activation activation) {
  const auto silu = [](float x) { return x / (1.0f + std::exp(-x)); };
  std::vector<float> result;
  for (size_t row = 0; row < sums.size() / static_cast<size_t>(n); ++row) {
    const int* const at = &sums[row * static_cast<size_t>(n)];
    for (int i = 0; i < (activation == Activation::kSwiglu ? n / 2 : n); ++i) {
      const auto x = static_cast<float>(at[i]);
      if (activation == Activation::kSilu) {
        result.push_back(silu(x));
      } else if (activation == Activation::kGelu) {
        result.push_back(0.5f * x * (1.0f + erff(x * 0.70710678f)));
      } else if (activation == Activation::kSwiglu) {
        result.push_back(silu(x) * static_cast<float>(at[n / 2 + i]));
      } else {
        result.push_back(x);
      }
    }
  }
  return result;
}

// Fails unless the first rows of `out` are these, rounded once, and all others are untouched.
inline void expect_rows(const Values& out, const std::vector<float>& rows, DType dtype,
                        const std::string& name) {
  for (int64_t i = 0; i < static_cast<int64_t>(out.rows) * out.columns; ++i) {
    const bool inside = i < static_cast<int64_t>(rows.size());
    const uint16_t right = inside ? cases::rounded(rows[static_cast<size_t>(i)], dtype) : Values::kUntouched;
    if (out.data[i] == right ||
        (inside && cases::widened(out.data[i], dtype) == cases::widened(right, dtype)))
      continue;
    sim::report(name + "[" + std::to_string(i / out.columns) + "][" + std::to_string(i % out.columns) +
                    "] is " + std::to_string(cases::widened(out.data[i], dtype)) + ", and not " +
                    (inside ? std::to_string(rows[static_cast<size_t>(i)]) : "left alone"),
                nullptr);
  }
}

// Columns of an expert's weight for about `tiles` tiles.
inline int draw_columns(Random& random, int config, Activation activation, int tiles) {
  const bool swiglu = activation == Activation::kSwiglu;
  const int block_n = flux::gemm::kTileConfigs[config].block_n / (swiglu ? 2 : 1);
  const int n = std::max(8, block_n * random.between(1, tiles) - 8 * random.below(block_n / 8));
  return swiglu ? 2 * n : n;
}

inline int32_t* copied(const std::vector<int32_t>& values, int device, const char* name) {
  auto* const words = static_cast<int32_t*>(
      sim::allocate(std::max<int64_t>(1, static_cast<int64_t>(values.size())) * 4, device, name));
  std::copy(values.begin(), values.end(), words);
  return words;
}

}  // namespace cases
