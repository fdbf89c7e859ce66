#include "fp8.h"

#include <cstring>
#include <map>

namespace cases {

Sums multiply(const Fp8Values& x, const ScaleValues& x_scales, const Fp8Values& weight,
              const ScaleValues& weight_scales) {
  const int n = weight.rows, k = x.columns;
  const bool blocks = x_scales.kind == ScaleValues::Kind::kBlocks;
  Sums product(x.rows * n);
  for (int row = 0; row < x.rows; ++row) {
    for (int column = 0; column < n; ++column) {
      const int* const a = &x.values[row * k];
      const int* const b = &weight.values[column * k];
      int sum = 0;
      for (int first = 0; first < k; first += kScaleBlock) {
        int part = 0;
        for (int i = first; i < std::min(k, first + kScaleBlock); ++i) part += a[i] * b[i];
        const int k_block = first / kScaleBlock;
        sum += part << (x_scales.exponent(row, k_block) +
                        weight_scales.exponent(blocks ? column / kScaleBlock : column, k_block));
      }
      product[row * n + column] = sum;
    }
  }
  return product;
}

void expect(const Floats& out, const Sums& expected, const std::string& name) {
  for (int row = 0; row < out.rows; ++row) {
    for (int column = 0; column < out.checked(); ++column) {
      const float found = out.data[static_cast<int64_t>(row) * out.stride + column];
      const bool inside = column < out.columns;
      const float right =
          inside ? static_cast<float>(expected[row * out.columns + column]) : Floats::kUntouched;
      if (found == right) continue;
      wrong(name, "[", row, "][", column, "] is ", found, ", and not ",
            inside ? std::to_string(right) : "left alone");
    }
  }
}

namespace {

constexpr uint8_t kNoByte = 0xA5;

float largest_of(bool e5m2) { return e5m2 ? 57344.0f : 448.0f; }

// The finite numbers of the type that are not negative, in order; the index of each is its byte.
std::vector<float> numbers(bool e5m2) {
  std::vector<float> found;
  const int mantissa_bits = e5m2 ? 2 : 3, steps = 1 << mantissa_bits, bias = e5m2 ? 15 : 7;
  for (int byte = 0; found.empty() || found.back() < largest_of(e5m2); ++byte) {
    const int exponent = byte / steps, mantissa = byte % steps;
    found.push_back(std::ldexp(static_cast<float>(mantissa + (exponent > 0 ? steps : 0)),
                               std::max(exponent, 1) - bias - mantissa_bits));
  }
  return found;
}

// The byte of the nearest number, the even one of two.
uint8_t nearest(float value, bool e5m2) {
  static const std::vector<float> tables[] = {numbers(false), numbers(true)};
  const std::vector<float>& table = tables[e5m2];
  if (std::isnan(value)) return 0x7F;
  const float size = std::min(std::fabs(value), table.back());
  const auto above = std::lower_bound(table.begin(), table.end(), size);
  auto byte = static_cast<int>(above - table.begin());
  if (byte > 0) {
    const double down = static_cast<double>(size) - static_cast<double>(table[byte - 1]);
    const double up = static_cast<double>(table[byte]) - static_cast<double>(size);
    if (down < up || (down == up && byte % 2 != 0)) --byte;
  }
  return static_cast<uint8_t>(byte | (std::signbit(value) ? 0x80 : 0));
}

bool equal_bits(float a, float b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

}  // namespace

QuantizedValues::QuantizedValues(Random& random, int device, int rows, int columns, int height, bool end)
    : rows(rows), columns(columns), height(height) {
  to.granularity = static_cast<Granularity>(random.below(end ? 3 : 4));
  to.e5m2 = !end && random.below(3) == 0;
  to.ue8m0 = random.below(3) == 0;
  to.q = sim::allocate(static_cast<int64_t>(rows) * columns, device, "q");
  std::memset(to.q, kNoByte, rows * columns);
  to.scale_stride = ceil_div(rows, 4) * 4;
  const int64_t count[] = {1, rows, to.scale_stride * groups(),
                           static_cast<int64_t>(rows / height) * ceil_div(height, kScaleBlock) * groups()};
  const auto scales = (count[static_cast<int>(to.granularity)]);
  to.scales = allocate<float>(scales, device, "scales");
  untouched.assign(scales, -0.125f);
  std::copy(untouched.begin(), untouched.end(), to.scales);
  to.parts = allocate<float>(flux::gemm::kPartsFloats, device, "parts");
  std::fill_n(to.parts, flux::gemm::kPartsFloats, 1e30f);
  if (to.granularity == Granularity::kTensor && random.below(2) == 0) {
    to.scales[0] = std::ldexp(static_cast<float>(random.between(1, 30)), -random.between(0, 8));
    sim::mark_written(to.scales, sizeof(float));
    to.given = to.scales;
    to.ue8m0 = false;
    untouched[0] = to.scales[0];
  }
}

std::string QuantizedValues::name() const {
  const char* const names[] = {"per tensor", "per token", "per 128", "per block"};
  return std::string(to.given != nullptr ? "static" : names[static_cast<int>(to.granularity)]) +
         (to.e5m2 ? " e5m2, " : ", ") + (to.ue8m0 ? "powers of two, " : "");
}

int64_t QuantizedValues::scale_at(int row, int column) const {
  const int group = column / kScaleBlock;
  if (to.granularity == Granularity::kTensor) return 0;
  if (to.granularity == Granularity::kToken) return row;
  if (to.granularity == Granularity::kGroup) return group * to.scale_stride + row;
  const int down = ceil_div(height, kScaleBlock);
  return static_cast<int64_t>(row / height * down + row % height / kScaleBlock) * groups() + group;
}

void QuantizedValues::expect_of(const Values& x, DType dtype) const {
  const auto element = [&](int row, int column) {
    return widened(x.data[static_cast<int64_t>(row) * x.stride + column], dtype);
  };
  std::map<int64_t, float> scales;
  if (to.given != nullptr) {
    scales[0] = untouched[0];
  } else {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        float& most = scales.emplace(scale_at(row, column), 1e-10f).first->second;
        const float size = std::fabs(element(row, column));
        if (!std::isnan(most)) most = std::isnan(size) ? size : std::max(most, size);
      }
    }
    for (auto& [at, scale] : scales) {
      scale /= largest_of(to.e5m2);
      int exponent;
      if (to.ue8m0 && std::isfinite(scale) && std::frexp(scale, &exponent) > 0.5f)
        scale = std::ldexp(1.0f, exponent);
    }
  }
  for (size_t at = 0; at < untouched.size(); ++at) {
    const auto scale = scales.find(static_cast<int64_t>(at));
    const float right = scale == scales.end() ? untouched[at] : scale->second;
    if (equal_bits(to.scales[at], right)) continue;
    wrong(name(), "scale ", at, " is ", to.scales[at], ", and not ", right);
  }
  const auto* q = static_cast<const uint8_t*>(to.q);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column, ++q) {
      const float inverse = 1.0f / scales[scale_at(row, column)];
      const uint8_t right = nearest(element(row, column) * inverse, to.e5m2);
      if (*q == right) continue;
      wrong(name(), "q[", row, "][", column, "] is ", *q, ", and not ", right);
    }
  }
}

}  // namespace cases
