// ReduceScatter whose contributions travel as int8, on two to eight ranks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda_runtime_api.h"
#include "operators.h"
#include "ranks.h"

namespace cases {
namespace {

using flux::runtime::Int8Scatter;

constexpr int kCalls = 3;  // each of the two buffers is used again

// Rows of elements of any of the three types on a rank.
struct Rows {
  DType dtype;
  int count, n;
  char* data;

  Rows(int rank, const char* name, DType dtype, int count, int n) : dtype(dtype), count(count), n(n) {
    data = static_cast<char*>(sim::allocate(bytes(), rank, name));
    std::memset(data, 0xFF, bytes());  // NaN
  }
  int64_t bytes() const { return int64_t{count} * n * flux::runtime::element_bytes(dtype); }
  char* at(int row, int column) const {
    return data + (int64_t{row} * n + column) * flux::runtime::element_bytes(dtype);
  }
  float get(int row, int column) const {
    if (dtype == DType::kFloat32) return *reinterpret_cast<const float*>(at(row, column));
    return widened(*reinterpret_cast<const uint16_t*>(at(row, column)), dtype);
  }
  void set(int row, int column, float value) const {
    if (dtype == DType::kFloat32) {
      *reinterpret_cast<float*>(at(row, column)) = value;
    } else {
      *reinterpret_cast<uint16_t*>(at(row, column)) = rounded(value, dtype);
    }
  }
  int groups() const { return (n + Int8Scatter::kGroup - 1) / Int8Scatter::kGroup; }
  int end_of(int group) const { return std::min(n, (group + 1) * Int8Scatter::kGroup); }
};

// Integers up to 127 times a power of two of each group, one of them 127: they travel as they are. Or anything.
void fill(const Rows& x, Random& random, bool exact) {
  for (int row = 0; row < x.count; ++row) {
    for (int group = 0; group < x.groups(); ++group) {
      const int first = group * Int8Scatter::kGroup, end = x.end_of(group);
      const float size = std::ldexp(1.0f, random.between(0, 3));
      const bool all_zero = !exact && random.below(8) == 0;
      for (int column = first; column < end; ++column) {
        const float value = exact ? static_cast<float>(random.between(-127, 127))
                                  : static_cast<float>(random.between(-9999, 9999)) / 777.0f;
        x.set(row, column, all_zero ? 0.0f : value * size);
      }
      if (exact) x.set(row, random.between(first, end - 1), random.below(2) == 0 ? 127 * size : -127 * size);
      if (!exact && random.below(16) == 0) {
        x.set(row, random.between(first, end - 1), random.below(2) == 0 ? INFINITY : NAN);
      }
    }
  }
  sim::mark_written(x.data, x.bytes());
}

// What a group stands for after it has been rounded: the definition.
std::vector<float> travelled(const Rows& x, int row, int group) {
  std::vector<float> values;
  float largest = 1e-10f;
  for (int column = group * Int8Scatter::kGroup; column < x.end_of(group); ++column) {
    values.push_back(x.get(row, column));
    if (!(std::fabs(values.back()) <= largest)) {
      largest = std::isnan(largest) ? largest : std::fabs(values.back());
    }
  }
  const float scale = largest / 127.0f, inverse = 1.0f / scale;
  for (float& value : values) {
    const float q = std::nearbyint(value * inverse);
    value = (std::isnan(q) ? 0.0f : q) * scale;
  }
  return values;
}

void int8_sum(uint64_t seed, bool freezes) {
  Random random(seed);
  const int world_size = random.one_of({2, 2, 3, 4, 8});
  const auto dtype = random.one_of({DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  // Rows of a part of a group, of several groups, and of more units than a CTA has warps.
  const int rows = random.between(1, 5), padding = random.below(3);
  const int n = 8 * random.one_of({random.between(1, 15), random.between(16, 100), random.between(200, 400)});
  const int num_sms = random.one_of({1, 2, 3, 4, 8});  // 8: all, so that launches start early
  const bool exact = random.below(2) == 0, rounds_own = random.below(3) == 0;
  start(seed, world_size, random.one_of({1, 2, 3, 8}), random, /*cluster=*/1, /*late_rank=*/-1, freezes);
  describe(exact ? "exact, " : "", rounds_own ? "own rounded, " : "",
           dtype == DType::kFloat32 ? "fp32, " : "", words(world_size, rows, n, 0, dtype));

  const Int8Scatter scatter = {rows, n, world_size};
  const Ranks ranks(world_size, {0, 0, scatter.bytes()});
  std::vector<std::vector<Rows>> xs(kCalls), outs(kCalls);
  for (int rank = 0; rank < world_size; ++rank) {
    cudaSetDevice(rank);
    for (size_t call = 0; call < kCalls; ++call) {
      const Rows& x = xs[call].emplace_back(rank, "x", dtype, world_size * (rows + padding), n);
      const Rows& out = outs[call].emplace_back(rank, "out", dtype, rows, n);
      fill(x, random, exact);
      flux::gemm_ar::reduce_scatter_int8(x.data, int64_t{rows + padding} * n, {out.data, rows, n, n}, dtype,
                                         ranks.symm[rank], num_sms, rounds_own, nullptr);
    }
  }
  cudaDeviceSynchronize();
  if (!freezes) ranks.expect_done(kCalls);
  for (size_t call = 0; call < kCalls; ++call) {
    for (int rank = 0; rank < world_size; ++rank) {
      const Rows& out = outs[call][rank];
      const bool failed = ranks.symm[rank].error->code != 0;
      for (int row = 0; row < rows; ++row) {
        const int in_x = rank * (rows + padding) + row;
        for (int group = 0; group < out.groups(); ++group) {
          std::vector<float> total(Int8Scatter::kGroup), plain(Int8Scatter::kGroup);
          for (int source = 0; source < world_size; ++source) {
            const Rows& x = xs[call][source];
            const std::vector<float> sent = travelled(x, in_x, group);
            for (size_t i = 0; i < sent.size(); ++i) {
              const float whole = x.get(in_x, group * Int8Scatter::kGroup + static_cast<int>(i));
              total[i] += source == rank && !rounds_own ? whole : sent[i];
              plain[i] += whole;
            }
          }
          for (int column = group * Int8Scatter::kGroup; column < out.end_of(group); ++column) {
            const auto i = (column % Int8Scatter::kGroup);
            const float found = out.get(row, column);
            float right = exact ? plain[i] : total[i];
            if (dtype != DType::kFloat32) right = rounded_to(right, dtype);
            if (found == right || (std::isnan(found) && (failed || std::isnan(right)))) continue;
            wrong("call ", call, ", rank ", rank, ": out[", row, "][", column, "] is ", found, ", and not ",
                  right);
          }
        }
      }
    }
  }
}

void int8_sum(uint64_t seed) { int8_sum(seed, /*freezes=*/false); }
void int8_sum_frozen(uint64_t seed) { int8_sum(seed, /*freezes=*/true); }

}  // namespace

const std::vector<NamedCase> kCases = {{"int8_sum", int8_sum}, {"int8_sum_frozen", int8_sum_frozen}};

}  // namespace cases
