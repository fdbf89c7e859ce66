// The tensor core: 64 x N steps of a warpgroup over 32 bytes of K, operands by shared-memory descriptors. Nothing but the program
// keeps the four warps together. So each warp's 16 rows are an operation of their own: from the moment that its lanes
// have issued it, in the order of issue, with operands as they are when it runs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "machine.h"

namespace sim {
namespace {

constexpr int kM = 16, kMaxK = 32;  // of a warp
constexpr int kMaxN = 256;

int bytes_of(Element element) { return element == Element::kE4M3 || element == Element::kE5M2 ? 1 : 2; }
int steps_of(Element element) { return 32 / bytes_of(element); }

// The values of a sign, exponent_bits and mantissa_bits, as if all were finite.
std::vector<float> finite_values(int exponent_bits, int mantissa_bits) {
  const int ones = 1 << mantissa_bits, exponents = 1 << exponent_bits,
            lowest = 2 - exponents / 2 - mantissa_bits;
  std::vector<float> values;
  for (const float sign : {1.0f, -1.0f}) {
    for (int i = 0; i < exponents * ones; ++i) {
      const int exponent = i / ones, mantissa = i % ones;
      values.push_back(sign * (exponent == 0
                                   ? std::ldexp(static_cast<float>(mantissa), lowest)
                                   : std::ldexp(static_cast<float>(mantissa + ones), lowest + exponent - 1)));
    }
  }
  return values;
}

float widen_half(uint16_t bits) {
  static const auto table = [] {
    std::vector<float> values = finite_values(5, 10);
    for (size_t i = 0x7C00; i < 0x8000; ++i) {
      values[i] = i == 0x7C00 ? INFINITY : NAN;
      values[i | 0x8000] = -values[i];
    }
    return values;
  }();
  return table[bits];
}

float widen_e4m3(uint8_t bits) {
  static const auto table = [] {
    std::vector<float> values = finite_values(4, 3);
    values[0x7F] = values[0xFF] = NAN;
    return values;
  }();
  return table[bits];
}

// The element at `bytes`. An e5m2 is the upper half of an fp16.
float widen(const uint8_t* bytes, Element element) {
  if (element == Element::kE4M3) return widen_e4m3(*bytes);
  if (element == Element::kE5M2) return widen_half(static_cast<uint16_t>(*bytes << 8));
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return element == Element::kBFloat16 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
                                       : widen_half(bits);
}

// An operand with the 128-byte swizzle. K-major: rows of 128 bytes along K, eight of them in 1 KB. MN-major, of 16-bit
// elements only: rows of 128 bytes along M or N, one for each k, eight of them in 1 KB.
struct Operand {
  uint32_t start, leading, stride;
  Element element;
  bool mn_major;

  Operand(uint64_t descriptor, Element element, bool mn_major)
      : start(static_cast<uint32_t>(descriptor & 0x3FFF) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4),
        element(element),
        mn_major(mn_major) {}

  uint32_t address(int mn, int k) const {
    const uint32_t offset =
        mn_major ? static_cast<uint32_t>(mn / 64) * leading + static_cast<uint32_t>(mn % 64 * 2) +
                       static_cast<uint32_t>(k / 8) * stride + static_cast<uint32_t>(k % 8 * 128)
                 : static_cast<uint32_t>(mn / 8) * stride +
                       static_cast<uint32_t>(mn % 8 * 128 + k * bytes_of(element));
    const uint32_t at = start + offset;
    return at ^ (at >> 7 & 7) << 4;
  }
};

// values[k][mn - first], read in pieces of 16 bytes.
void read_operand(Cta& cta, const Operand& operand, int first, int rows, const Access& access,
                  float (*values)[kMaxN]) {
  const int bytes = bytes_of(operand.element), steps = steps_of(operand.element), in_piece = 16 / bytes;
  const int outer = operand.mn_major ? steps : rows, inner = operand.mn_major ? rows : steps;
  for (int i = 0; i < outer; ++i) {
    for (int j = 0; j < inner; j += in_piece) {
      const uint32_t at = operand.mn_major ? operand.address(first + j, i) : operand.address(first + i, j);
      read_shared(cta, at, 16, access, /*written_only=*/false);
      const uint8_t* const piece = checked(cta, at, 16, "wgmma operand", kNowhere);
      for (int e = 0; e < in_piece; ++e) {
        (operand.mn_major ? values[i][j + e] : values[j + e][i]) = widen(piece + e * bytes, operand.element);
      }
    }
  }
}

// For the longest loops of the simulator.
#define VECTORISED __attribute__((optimize("O3"), target_clones("avx2", "default")))

VECTORISED void multiply(const float (*a)[kMaxN], const float (*b)[kMaxN], int n, int steps,
                         float (*sums)[kMaxN]) {
  for (int m = 0; m < kM; ++m) {
    float* const row = sums[m];
    for (int k = 0; k < steps; ++k) {
      const float factor = a[k][m];
      const float* const other = b[k];
      for (int i = 0; i < n; ++i) row[i] += factor * other[i];
    }
  }
}

// Hopper's sum of 8-bit products: the products of a step and the accumulator are shifted to the largest exponent among
// them, and truncated to 13 bits below its leading one, before they are added (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
constexpr int kFp8Bits = 13;
VECTORISED void multiply_fp8(const float (*a)[kMaxN], const float (*b)[kMaxN], int n, float (*sums)[kMaxN]) {
  static float largest[kMaxN], plain[kMaxN], to_units[kMaxN];
  static int32_t units[kMaxN];
  constexpr int kBias = 127, kMantissa = 23;
  for (int m = 0; m < kM; ++m) {
    float* const row = sums[m];
    for (int i = 0; i < n; ++i) {
      plain[i] = row[i];
      largest[i] = std::fabs(row[i]);
    }
    for (int k = 0; k < kMaxK; ++k) {
      const float factor = a[k][m];
      const float* const other = b[k];
      for (int i = 0; i < n; ++i) {
        const float product = factor * other[i], size = std::fabs(product);
        plain[i] += product;
        largest[i] = largest[i] > size ? largest[i] : size;
      }
    }
    for (int i = 0; i < n; ++i) {
      const int exponent = static_cast<int>(std::bit_cast<uint32_t>(largest[i]) >> kMantissa);
      const int scale = std::clamp(2 * kBias + kFp8Bits - exponent, 1, 2 * kBias);
      to_units[i] = std::bit_cast<float>(scale << kMantissa);
      units[i] = static_cast<int32_t>(std::isfinite(plain[i]) ? row[i] * to_units[i] : 0.0f);
    }
    for (int k = 0; k < kMaxK; ++k) {
      const float factor = a[k][m];
      const float* const other = b[k];
      for (int i = 0; i < n; ++i) units[i] += static_cast<int32_t>(factor * other[i] * to_units[i]);
    }
    for (int i = 0; i < n; ++i) {
      row[i] = std::isfinite(plain[i]) ? static_cast<float>(units[i]) / to_units[i] : plain[i];
    }
  }
}

void run(Cta& cta, int number, WgmmaOp& op) {
  static float a[kMaxK][kMaxN], b[kMaxK][kMaxN], sums[kM][kMaxN];
  // Stale rows beyond an edge may be read. No fence is asked for behind cp.async, as in all kernels that feed wgmma
  // with it; the barrier that counts the copies is.
  const Epoch epoch = Epoch::of(op.past.actor, op.past.thread, op.past.now);
  const Access access = {"wgmma",        epoch, 0, op.past, nullptr, /*async=*/true, /*sees_copies=*/true,
                         /*noted=*/false};
  const int n = op.shape.n;
  read_operand(cta, Operand(op.a, op.shape.a, op.shape.a_mn_major), number % 4 * kM, kM, access, a);
  read_operand(cta, Operand(op.b, op.shape.b, op.shape.b_mn_major), 0, n, access, b);
  // Lane t has, in each block of eight columns, two neighbours of row t / 4, and of the row eight below.
  const auto for_each = [&](auto use) {
    for (int t = 0; t < 32; ++t) {
      for (int i = 0; i < n / 2; ++i) {
        const int row = t / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
        use(op.accumulators[t][i], sums[row][column]);
      }
    }
  };
  for_each([&](const float& mine, float& sum) { sum = op.accumulate ? mine : 0.0f; });
  const int steps = steps_of(op.shape.a);
  if (steps == kMaxK) {
    multiply_fp8(a, b, n, sums);
  } else {
    multiply(a, b, n, steps, sums);
  }
  for_each([](float& mine, const float& sum) { mine = sum; });
}

// Gives the first operation of the warp to the adversary, if all lanes have issued it.
void queue_next(Cta& cta, int number) {
  TensorWarp& warp = cta.tensor_warps[static_cast<size_t>(number)];
  if (warp.queued || warp.ops.empty() || warp.ops.front().arrived < 32) return;
  warp.queued = true;
  ++cta.in_flight;
  issue(true, [&cta, &warp, number] {
    run(cta, number, warp.ops.front());
    --cta.in_flight;
    warp.ops.pop_front();
    ++warp.done;
    warp.queued = false;
    warp.queue.wake_all();
    queue_next(cta, number);
  });
}

}  // namespace

void wgmma_fence() { self().wgmma_fenced = true; }

void wgmma(const WgmmaShape& shape, uint64_t a, uint64_t b, float* accumulators, bool accumulate) {
  Fiber& fiber = self();
  Cta& cta = here();
  if (!fiber.wgmma_fenced)
    report("wgmma without warpgroup_arrive after the accumulators were free to be used");
  const int number = fiber.thread / 32;
  TensorWarp& warp = cta.tensor_warps[static_cast<size_t>(number)];
  const auto at = static_cast<size_t>(fiber.wgmmas++ - warp.done);
  while (warp.ops.size() <= at) warp.ops.push_back({shape, a, b, {}, accumulate, fiber.clock});
  WgmmaOp& op = warp.ops[at];
  if (op.a != a || op.b != b || op.accumulate != accumulate || op.shape.n != shape.n) {
    report("lanes of a warp issue different wgmmas");
  }
  op.accumulators[fiber.thread % 32] = accumulators;
  if (++op.arrived == 32) queue_next(cta, number);
}

void wgmma_commit() {
  Fiber& fiber = self();
  fiber.wgmma_groups.push_back(fiber.wgmmas);
}

void wgmma_wait(int pending) {
  maybe_preempt();
  Fiber& fiber = self();
  TensorWarp& warp = here().tensor_warps[fiber.thread / 32];
  const auto groups = static_cast<int>(fiber.wgmma_groups.size());
  const int64_t needed = groups > pending ? fiber.wgmma_groups[groups - pending - 1] : 0;
  while (warp.done < needed) {
    wait_on(warp.queue, kNowhere, [&warp] {
      const int there = warp.ops.empty() ? 0 : warp.ops.front().arrived;
      return text("a wgmma that ", there, " of 32 lanes have issued");
    });
  }
  if (groups > pending)
    fiber.wgmma_groups.erase(fiber.wgmma_groups.begin(), fiber.wgmma_groups.end() - pending);
  fiber.wgmma_fenced = false;
}

}  // namespace sim
