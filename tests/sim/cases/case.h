// What cases share: matrices of small integers on a rank, exact comparison, and the command line.
#pragma once

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "gemm/swap_ab.h"
#include "machine.h"
#include "operators.h"

namespace cases {

using flux::gemm::Cluster;
using flux::runtime::DType;
using flux::runtime::Matrix;
using sim::text;

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

// Of one that may be changed before the machine is reset.
inline sim::MachineConfig machine_of(uint64_t seed, int resident, int devices = 1) {
  sim::MachineConfig machine;
  machine.devices = devices;
  machine.resident = resident;
  machine.policy = sim::policy_of(seed);
  return machine;
}

// Tiles for 16-bit operands come before those for fp8.
constexpr int k16BitTiles =
    std::ranges::count_if(flux::gemm::kTileConfigs, [](const auto& tile) { return !tile.is_fp8(); });
inline int draw_16bit_tile(Random& random, bool (*wanted)(const flux::gemm::TileConfig&)) {
  for (;;) {
    const int config = random.below(k16BitTiles);
    if (wanted(flux::gemm::kTileConfigs[config])) return config;
  }
}
// A choice of the cost model: of ordinary tiles, or of swap-AB tiles.
inline int pack(int config, Cluster cluster, int raster) {
  return flux::gemm::pack_choice(config, static_cast<int>(cluster), raster);
}
inline int pack(int config, int split, int sharers) {
  return flux::gemm::pack_choice(config, split, sharers);
}
constexpr int k16BitSwapAbTiles =
    std::ranges::count_if(flux::gemm::kSwapAbConfigs, [](const auto& tile) { return !tile.is_fp8; });

inline uint16_t rounded(float value, DType dtype) {
  return dtype == DType::kBFloat16 ? __float2bfloat16_rn(value).bits : __float2half_rn(value).bits;
}
inline float widened(uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? static_cast<float>(__nv_bfloat16{bits})
                                   : static_cast<float>(__half{bits});
}
// A number as a kernel stores it.
inline float rounded_to(float value, DType dtype) { return widened(rounded(value, dtype), dtype); }

inline const char* name_of(DType dtype) {
  return dtype == DType::kBFloat16 ? ", bf16" : dtype == DType::kFloat16 ? ", fp16" : ", fp32";
}
inline std::string name_of(int call, int rank, const char* what) {
  return text("call ", call, ", rank ", rank, ": ", what);
}
// Tells what is about to run, for reports.
void describe_case(const std::string& what);
template <class... Parts>
void describe(const Parts&... parts) {
  describe_case(text(parts...));
}
// Ends the case as one that is wrong.
template <class... Parts>
[[noreturn]] void wrong(const Parts&... parts) {
  sim::report(text(parts...), nullptr);
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

  Values& fill(Random& random, DType dtype, int most = 2) {
    values.resize(rows * columns);
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        const int value = random.between(-most, most);
        values[row * columns + column] = value;
        data[static_cast<int64_t>(row) * stride + column] = rounded(value, dtype);
      }
      sim::mark_written(&data[static_cast<int64_t>(row) * stride], columns * int64_t{2});
    }
    return *this;
  }
  int at(int row, int column) const { return values[row * columns + column]; }
  Matrix matrix() const {
    return {data - static_cast<int64_t>(before) * stride, before + rows, columns, stride};
  }
};

inline DType draw_dtype(Random& random) { return static_cast<DType>(random.below(2)); }

// Memory of a rank that nobody has written; room for one element at least.
template <class T>
T* allocate(int64_t count, int device, const char* name) {
  return static_cast<T*>(sim::allocate(std::max<int64_t>(1, count) * sizeof(T), device, name));
}
// Memory of a rank with these elements.
template <class T>
T* copied(const std::vector<T>& values, int device, const char* name) {
  T* const there = allocate<T>(values.size(), device, name);
  std::copy(values.begin(), values.end(), there);
  sim::mark_written(there, values.size() * sizeof(T));
  return there;
}

// For every other seed: how many rows to leave in front, so that offsets of rows of so many units need 64 bits.
inline int far_rows(uint64_t seed, int64_t units) {
  return seed % 2 == 0 || units < 2 ? 0 : static_cast<int>((int64_t{1} << 31) / units + 1);
}

using Sums = std::vector<int>;
// Adds numbers to those at the same places, or a row to every row.
inline void add(Sums& sum, const Sums& part) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i % part.size()];
}
inline void append(Sums& all, const Sums& part) { all.insert(all.end(), part.begin(), part.end()); }
inline Sums rounded(Sums sums, DType dtype) {
  for (int& value : sums) value = static_cast<int>(rounded_to(value, dtype));
  return sums;
}

// product[m][n] of x [m, k] and a weight [n, k], or [k, n].
Sums multiply(const Values& x, const Values& weight, bool transposed);

// Fails with the place of the first element that is not the expected number, rounded once. Rows behind those that are
// expected, and what lies beside rows, must have been left alone. `may_fail`: nor NaN.
template <class Number>
void expect(const Values& out, const std::vector<Number>& expected, DType dtype, const std::string& name,
            bool may_fail = false) {
  for (int row = 0; row < out.rows; ++row) {
    for (int column = 0; column < out.stride; ++column) {
      const uint16_t found = out.data[static_cast<int64_t>(row) * out.stride + column];
      const size_t at = static_cast<size_t>(row) * out.columns + column;
      const bool inside = column < out.columns && at < expected.size(), alone = found == Values::kUntouched;
      const uint16_t right = inside ? rounded(static_cast<float>(expected[at]), dtype) : Values::kUntouched;
      const float value = widened(found, dtype);
      // Both zeros are right.
      if (found == right || (inside && value == widened(right, dtype))) continue;
      if (may_fail && inside && value != value && !alone) continue;
      wrong(name, "[", row, "][", column, "] is ", alone ? "left alone" : std::to_string(value), ", and not ",
            inside ? std::to_string(expected[at]) : "left alone", may_fail ? " or NaN" : "");
    }
  }
}

// Draws and runs one case.
struct NamedCase {
  const char* name;
  void (*run)(uint64_t seed);
};
extern const std::vector<NamedCase> kCases;  // of the program

}  // namespace cases
