// What cases share: matrices of small integers on a rank, exact comparison, and the command line.
#pragma once

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "gemm/swap_ab.h"
#include "gemm/tile_config.h"
#include "machine.h"
#include "runtime/tensor_map.h"

namespace cases {

using flux::runtime::DType;
using flux::runtime::Matrix;

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  int below(int end) { return static_cast<int>(engine() % static_cast<uint64_t>(end)); }
  int between(int first, int last) { return first + below(last - first + 1); }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
};

// Tiles for 16-bit operands come before those for fp8.
constexpr int k16BitTiles = [] {
  int count = 0;
  for (const auto& tile : flux::gemm::kTileConfigs) count += !tile.is_fp8();
  return count;
}();
inline int draw_16bit_tile(Random& random, bool (*wanted)(const flux::gemm::TileConfig&)) {
  for (;;) {
    const int config = random.below(k16BitTiles);
    if (wanted(flux::gemm::kTileConfigs[config])) return config;
  }
}
constexpr int k16BitSwapAbTiles = [] {
  int count = 0;
  for (const auto& tile : flux::gemm::kSwapAbConfigs) count += !tile.is_fp8;
  return count;
}();

inline uint16_t rounded(float value, DType dtype) {
  return dtype == DType::kBFloat16 ? __float2bfloat16_rn(value).bits : __float2half_rn(value).bits;
}
inline float widened(uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? static_cast<float>(__nv_bfloat16{bits})
                                   : static_cast<float>(__half{bits});
}

// A matrix in a rank's memory, and the integers that it was filled with. `before`: rows in front of these, which have
// addresses and no memory.
struct Values {
  int rows, columns, stride, before;
  uint16_t* data;
  std::vector<int> values;

  Values(int device, const char* name, int rows, int columns, int padding = 0, int before = 0)
      : rows(rows), columns(columns), stride(columns + padding), before(before) {
    const int64_t all = static_cast<int64_t>(before) + rows;
    data = static_cast<uint16_t*>(sim::allocate(all * stride * 2, device, name)) +
           static_cast<int64_t>(before) * stride;
    for (int64_t i = 0; i < static_cast<int64_t>(rows) * stride; ++i) data[i] = kUntouched;
  }
  static constexpr uint16_t kUntouched = 0x7FA5;  // a NaN of both types

  void fill(Random& random, DType dtype, int most = 2) {
    values.resize(static_cast<size_t>(rows) * static_cast<size_t>(columns));
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        const int value = random.between(-most, most);
        values[static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column)] = value;
        data[static_cast<int64_t>(row) * stride + column] = rounded(static_cast<float>(value), dtype);
      }
      sim::mark_written(&data[static_cast<int64_t>(row) * stride], columns * int64_t{2});
    }
  }
  int at(int row, int column) const {
    return values[static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column)];
  }
  Matrix matrix() const {
    return {data - static_cast<int64_t>(before) * stride, before + rows, columns, stride};
  }
};

// For every other seed: how many rows to leave in front, so that offsets of rows of so many units need 64 bits.
inline int far_rows(uint64_t seed, int64_t units) {
  return seed % 2 == 0 || units < 2 ? 0 : static_cast<int>((int64_t{1} << 31) / units + 1);
}

// product[m][n] of x [m, k] and a weight [n, k], or [k, n].
std::vector<int> multiply(const Values& x, const Values& weight, bool transposed);

// Fails with the place of the first element that is not the expected integer, rounded once. `may_fail`: nor NaN.
void expect(const Values& out, const std::vector<int>& expected, DType dtype, const char* name,
            bool may_fail = false);

// Draws and runs one case; returns what it was, in words.
using Case = void (*)(uint64_t seed);
struct NamedCase {
  const char* name;
  Case run;
};
// Tells what is about to run, for reports.
void describe(const std::string& what);
int run_cases(int argc, char** argv, const std::vector<NamedCase>& all);

}  // namespace cases
