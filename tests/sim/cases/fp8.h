// Matrices of small integers in fp8, powers of two as their scales, and the integers that follow. A scale that is left
// out, doubled or of another row, column or k-block doubles or halves what it belongs to.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "case.h"

namespace cases {

using flux::gemm::ceil_div;
using flux::gemm::kScaleBlock;

inline int draw_fp8_tile(Random& random, bool (*wanted)(const flux::gemm::TileConfig&)) {
  for (;;) {
    const int config = random.below(flux::gemm::kNumTileConfigs);
    const flux::gemm::TileConfig& tile = flux::gemm::kTileConfigs[config];
    if (tile.is_fp8() && wanted(tile)) return config;
  }
}
inline int draw_k(Random& random, int most_blocks) {
  const int whole = 128 * random.between(1, most_blocks);
  return random.below(3) == 0 ? whole - 16 * random.below(8) : whole;
}

// Of an integer that the type holds exactly.
inline uint8_t fp8_of(int value, DType dtype) {
  if (dtype == DType::kE5M2)
    return static_cast<uint8_t>(__float2half_rn(static_cast<float>(value)).bits >> 8);
  if (value == 0) return 0;
  const int exponent = std::ilogb(static_cast<float>(value)), size = std::abs(value);
  const int eighths = exponent >= 3 ? size >> (exponent - 3) : size << (3 - exponent);
  return static_cast<uint8_t>((value < 0 ? 0x80 : 0) | (exponent + 7) << 3 | (eighths - 8));
}

// As Values, in fp8.
struct Fp8Values {
  int rows, columns, stride;
  uint8_t* data;
  Sums values;

  Fp8Values(int device, const char* name, int rows, int columns, int padding = 0)
      : rows(rows), columns(columns), stride((columns + 15) / 16 * 16 + padding) {
    data = allocate<uint8_t>(int64_t{rows} * stride, device, name);
    std::fill_n(data, static_cast<int64_t>(rows) * stride, uint8_t{0x7F});  // NaN
    values.resize(rows * columns);
  }
  void set(int row, int column, int value, DType dtype) {
    values[row * columns + column] = value;
    data[static_cast<int64_t>(row) * stride + column] = fp8_of(value, dtype);
    sim::mark_written(&data[static_cast<int64_t>(row) * stride + column], 1);
  }
  Fp8Values& fill(Random& random, DType dtype, int most = 2) {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        set(row, column, random.between(-most, most), dtype);
      }
    }
    return *this;
  }
  int at(int row, int column) const { return values[row * columns + column]; }
  Matrix matrix() const { return {data, rows, columns, stride}; }
};

// The scales of one operand: of everything, of each row, or of blocks of K. A row is one of x, or for the weight a column
// of the result; blocks of the weight have kScaleBlock of them.
struct ScaleValues {
  enum class Kind { kTensor, kRows, kBlocks };
  Kind kind;
  int rows, blocks;      // vectors: of each row, of each k-block
  int row_step, k_step;  // floats from one to the next
  float* data;
  Sums exponents;  // [row][block]

  ScaleValues(Random& random, int device, const char* name, Kind kind, int count, int k, bool is_weight,
              int most)
      : kind(kind),
        rows(kind == Kind::kTensor                ? 1
             : is_weight && kind == Kind::kBlocks ? ceil_div(count, kScaleBlock)
                                                  : count),
        blocks(kind == Kind::kBlocks ? k / kScaleBlock : 1),
        row_step(is_weight && kind == Kind::kBlocks ? blocks : 1),
        k_step(is_weight ? 1 : ceil_div(rows, 4) * 4) {
    const int64_t floats =
        is_weight ? static_cast<int64_t>(rows) * blocks : static_cast<int64_t>(blocks) * k_step;
    data = allocate<float>(floats, device, name);
    std::fill_n(data, floats, std::bit_cast<float>(0x7FA50000));
    for (int row = 0; row < rows; ++row) {
      for (int block = 0; block < blocks; ++block) {
        exponents.push_back(random.between(0, most));
        float& scale = data[static_cast<int64_t>(row) * row_step + static_cast<int64_t>(block) * k_step];
        scale = std::ldexp(1.0f, exponents.back());
        sim::mark_written(&scale, sizeof(scale));
      }
    }
  }
  int exponent(int row, int k_block) const {
    if (kind == Kind::kTensor) return exponents[0];
    if (kind == Kind::kRows) return exponents[row];
    return exponents[row * blocks + k_block];
  }
};

// Kinds of the scales of x and the weight.
struct ScaleKinds {
  ScaleValues::Kind x, weight;
  bool blocks() const { return x == ScaleValues::Kind::kBlocks; }
  const char* name() const {
    using Kind = ScaleValues::Kind;
    if (blocks()) return "block scales, ";
    if (x == Kind::kTensor) return weight == Kind::kTensor ? "tensor scales, " : "column scales, ";
    return weight == Kind::kTensor ? "row scales, " : "row and column scales, ";
  }
};
inline ScaleKinds draw_kinds(Random& random, bool may_be_blocks) {
  using Kind = ScaleValues::Kind;
  if (may_be_blocks && random.below(2) == 0) return {Kind::kBlocks, Kind::kBlocks};
  return {random.one_of({Kind::kTensor, Kind::kRows, Kind::kRows}),
          random.one_of({Kind::kTensor, Kind::kRows, Kind::kRows})};
}

inline flux::gemm::Scales scales_of(const ScaleValues& x, const ScaleValues& weight, DType x_dtype,
                                    bool fast) {
  using Kind = ScaleValues::Kind;
  flux::gemm::Scales scales;
  scales.x = x.data;
  scales.weight = weight.data;
  scales.x_step = x.kind == Kind::kRows ? 1 : 0;
  scales.weight_step = weight.kind == Kind::kRows ? 1 : 0;
  scales.blocks = x.kind == Kind::kBlocks;
  scales.x_stride = x.k_step;
  scales.fast = fast;
  scales.x_dtype = x_dtype;
  return scales;
}

// product[m][n] of x [m, k] and weight [n, k] with their scales.
Sums multiply(const Fp8Values& x, const ScaleValues& x_scales, const Fp8Values& weight,
              const ScaleValues& weight_scales);

// As Values, in fp32.
struct Floats {
  int rows, columns, stride;
  float* data;

  Floats(int device, const char* name, int rows, int columns, int padding = 0)
      : rows(rows), columns(columns), stride(columns + padding) {
    data = allocate<float>(int64_t{rows} * stride, device, name);
    for (int row = 0; row < rows; ++row)
      std::fill_n(data + static_cast<int64_t>(row) * stride, checked(), kUntouched);
  }
  // Columns of `stride` that have memory, if rows lie far apart.
  int checked() const { return std::min(stride, columns + 8); }
  static constexpr float kUntouched = -0.125f;
  void fill(const Values& values) const {
    std::copy(values.values.begin(), values.values.end(), data);
    sim::mark_written(data, columns * int64_t{4});
  }
  Matrix matrix() const { return {data, rows, columns, stride}; }
};
void expect(const Floats& out, const Sums& expected, const std::string& name);

// Memory for the quantisation of a matrix on a rank, and what it must contain.
struct QuantizedValues {
  using Granularity = flux::gemm::Granularity;

  int rows, columns, height;  // height: rows of one of the matrices that x consists of
  flux::gemm::Quantized to;
  std::vector<float> untouched;  // what `scales` held before

  // Draws the options. `end`: those of a fused end.
  QuantizedValues(Random& random, int device, int rows, int columns, int height, bool end);
  std::string name() const;
  // Compares with the definition, group by group.
  void expect_of(const Values& x, DType dtype) const;

 private:
  int groups() const { return ceil_div(columns, kScaleBlock); }
  int64_t scale_at(int row, int column) const;
};

}  // namespace cases
