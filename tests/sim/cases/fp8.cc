#include "fp8.h"

namespace cases {

std::vector<int> multiply(const Fp8Values& x, const ScaleValues& x_scales, const Fp8Values& weight,
                          const ScaleValues& weight_scales) {
  const int n = weight.rows, k = x.columns;
  const bool blocks = x_scales.kind == ScaleValues::Kind::kBlocks;
  std::vector<int> product(static_cast<size_t>(x.rows) * static_cast<size_t>(n));
  for (int row = 0; row < x.rows; ++row) {
    for (int column = 0; column < n; ++column) {
      const int* const a = &x.values[static_cast<size_t>(row) * static_cast<size_t>(k)];
      const int* const b = &weight.values[static_cast<size_t>(column) * static_cast<size_t>(k)];
      int sum = 0;
      for (int first = 0; first < k; first += kScaleBlock) {
        int part = 0;
        for (int i = first; i < std::min(k, first + kScaleBlock); ++i) part += a[i] * b[i];
        const int k_block = first / kScaleBlock;
        sum += part << (x_scales.exponent(row, k_block) +
                        weight_scales.exponent(blocks ? column / kScaleBlock : column, k_block));
      }
      product[static_cast<size_t>(row) * static_cast<size_t>(n) + static_cast<size_t>(column)] = sum;
    }
  }
  return product;
}

void expect(const Floats& out, const std::vector<int>& expected, const char* name) {
  for (int row = 0; row < out.rows; ++row) {
    for (int column = 0; column < out.stride; ++column) {
      const float found = out.data[static_cast<int64_t>(row) * out.stride + column];
      const bool inside = column < out.columns;
      const float right =
          inside ? static_cast<float>(expected[static_cast<size_t>(row) * static_cast<size_t>(out.columns) +
                                               static_cast<size_t>(column)])
                 : Floats::kUntouched;
      if (found == right) continue;
      sim::report(std::string(name) + "[" + std::to_string(row) + "][" + std::to_string(column) + "] is " +
                      std::to_string(found) + ", and not " + (inside ? std::to_string(right) : "left alone"),
                  nullptr);
    }
  }
}

}  // namespace cases
