// The operands of GEMM kernels, and the loop over K of a math warpgroup: it waits for stages, multiplies them with wgmma,
// and releases them to be loaded again. Then the scales of fp8 operands. All GEMM kernels share it.
#pragma once

#include <type_traits>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/arch/mma_sm90_gmma_ext.hpp"
#include "gemm/sm90/smem.cuh"

namespace flux::gemm {

// --- wgmma of 64 x kN over 32 bytes of K: CUTLASS's atoms, with both operands in shared memory ---

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// Pairs of fp8 operands: A and B. Both lie along K.
struct E4M3xE4M3 {};
struct E5M2xE4M3 {};
struct E4M3xE5M2 {};

// The instruction for a shape is the type that atom_of returns.
template <class Operands, int kN, Major kMajorA, Major kMajorB>
struct Shape {};

#define FLUX_WGMMA_ATOM(n)                                                                                \
  template <Major A, Major B>                                                                             \
  cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<A, B> atom_of(Shape<__nv_bfloat16, n, A, B>);          \
  template <Major A, Major B>                                                                             \
  cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<A, B> atom_of(Shape<__half, n, A, B>);                   \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<> atom_of(Shape<E4M3xE4M3, n, Major::K, Major::K>); \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E5M2E4M3_SS_TN<> atom_of(Shape<E5M2xE4M3, n, Major::K, Major::K>); \
  cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E5M2_SS_TN<> atom_of(Shape<E4M3xE5M2, n, Major::K, Major::K>);
FLUX_WGMMA_ATOM(8)
FLUX_WGMMA_ATOM(16)
FLUX_WGMMA_ATOM(32)
FLUX_WGMMA_ATOM(64)
FLUX_WGMMA_ATOM(80)
FLUX_WGMMA_ATOM(96)
FLUX_WGMMA_ATOM(112)
FLUX_WGMMA_ATOM(128)
FLUX_WGMMA_ATOM(160)
FLUX_WGMMA_ATOM(192)
FLUX_WGMMA_ATOM(224)
FLUX_WGMMA_ATOM(256)
#undef FLUX_WGMMA_ATOM

// Operands: the type of both, or a pair of fp8 types.
template <class Operands, int kN, Major kMajorA, Major kMajorB>
struct Wgmma {
  static constexpr int kAccumulators = kN / 2;  // fp32 registers of each of the 128 threads

  FLUX_DEVICE static void step(uint64_t a, uint64_t b, float (&d)[kAccumulators], bool accumulate) {
    call(a, b, d, accumulate ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<kAccumulators>());
  }

 private:
  template <size_t... kI>
  FLUX_DEVICE static void call(uint64_t a, uint64_t b, float (&d)[kAccumulators], ScaleOut scale,
                               std::index_sequence<kI...>) {
    decltype(atom_of(Shape<Operands, kN, kMajorA, kMajorB>()))::fma(a, b, d[kI]..., scale);
  }
};

// wgmma descriptor of an operand with the 128-byte swizzle. Offsets in bytes; `leading`: of MN-major operands only.
FLUX_DEVICE uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (kSwizzle128 << 62);
}

// --- operands: x, and the weight as [N, K] (K-major) or [K, N] (MN-major) ---

constexpr int kPanelK = kBlockBytes / 2;    // elements of a k-block; those of MN-major operands have 16 bits
constexpr int kPanelBytes = kPanelK * 128;  // MN-major: 64 columns (128 bytes) of all its rows

// Bytes in a stage from one wgmma step of K (32 bytes of a row) to the next.
template <Major kMajorB>
constexpr int kBStepBytes = kMajorB == Major::K ? 32 : 16 * 128;

template <Major kMajorB>
FLUX_DEVICE uint64_t make_b_descriptor(uint32_t address) {
  return make_descriptor(address, kMajorB == Major::K ? 0 : kPanelBytes, 1024);
}

// Of an operand of one tile. At the edge boxes are smaller, because TMA is slower on rows beyond the edge; the rest of
// the stage keeps stale data, which affects only results beyond the edge.
struct Boxes {
  const CUtensorMap* map;
  int rows;  // rows of a box (x, K-major weight), or columns of all boxes together (MN-major weight)
};

// A pair of CTAs whose tiles have the same columns shares B: each fetches half and multicasts it to both.
template <Major kMajorB, int kBlockN>
FLUX_DEVICE void load_b(const Boxes& b, uint32_t dst, uint32_t full, int k, int column, int cta,
                        bool shared) {
  if constexpr (kMajorB == Major::K) {
    if (!shared) {
      ptx::tma_load_2d(b.map, dst, full, k, column);
    } else {
      ptx::tma_load_2d_multicast(b.map, dst + cta * b.rows * 128, full, k, column + cta * b.rows, 0b11);
    }
  } else {
#pragma unroll
    for (int panel = 0; panel < kBlockN / 64; ++panel) {
      if (panel * 64 >= b.rows) break;
      if (!shared) {
        ptx::tma_load_2d(b.map, dst + panel * kPanelBytes, full, column + panel * 64, k);
      } else {
        constexpr int kHalf = kPanelK / 2;
        ptx::tma_load_2d_multicast(b.map, dst + panel * kPanelBytes + cta * kHalf * 128, full,
                                   column + panel * 64, k + cta * kHalf, 0b11);
      }
    }
  }
}

FLUX_DEVICE void load_a(const Boxes& a, uint32_t dst, uint32_t full, int k, int row, int cta, bool shared) {
  if (!shared) {
    ptx::tma_load_2d(a.map, dst, full, k, row);
  } else {
    ptx::tma_load_2d_multicast(a.map, dst + cta * a.rows * 128, full, k, row + cta * a.rows, 0b11);
  }
}

// --- the loop ---

struct Operands {
  uint64_t a, b;
};

// How k-blocks are added: all in the tensor core's accumulators. A policy that promotes (TilePromotion) takes the product of
// each k-block from the accumulators instead, or of two, and has:
//
//   kTakesPairs                its tiles have stages enough to hold two while others are loaded
//   pairs                      the product of two k-blocks is promoted at once. Their scales are the same then
//   struct Row, Column         scales of x and of the weight that a thread needs for a k-block
//   read(stage, block) -> Row  from shared memory, when the stage has arrived; or where they are
//   kReadsLate                 add() still reads the stage
//   load(k_block) -> Column    while the k-block is multiplied
//   kColumnParts               parts of the columns that are multiplied and promoted one after the other
//   add(product, row, column, part)
struct NoPromotion {
  static constexpr bool kPromotes = false;
};

template <int kAccumulators>
FLUX_DEVICE void fence_operands(float (&d)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
}

// Multiplies all stages. Leaves their sum in `d`, or that of the last k-block if `promotion` takes each of them.
//
//   kStepA, kStepB           bytes from one wgmma step of K (32 bytes of a row) to the next
//   kBlocks                  k-blocks of a stage
//   kReleasesEarly           if the next stage has not arrived, the previous one is released before the wait
//   full(stage)              its barrier
//   operands(stage, block)
//   release(stage)           called by all threads once their wgmmas have read it
template <class Mma, int kStepA, int kStepB, int kBlocks = 1, bool kReleasesEarly = false, class Ring,
          class Full, class GetOperands, class Release, class Promotion = NoPromotion>
FLUX_DEVICE void multiply(Ring& ring, int num_stages, float (&d)[Mma::kAccumulators], const Full& full,
                          const GetOperands& operands, const Release& release, Promotion promotion = {}) {
  const auto step_through = [&](int index, int block, bool adds, int part_bytes = 0) {
    Operands at = operands(index, block);
    at.b += part_bytes >> 4;
#pragma unroll
    for (int k = 0; k < kBlockBytes / 32; ++k)
      Mma::step(at.a + k * (kStepA >> 4), at.b + k * (kStepB >> 4), d, adds || k > 0);
  };
  if constexpr (Promotion::kPromotes) {
    constexpr int kParts = Promotion::kColumnParts;
    constexpr int kPartBytes = 2 * Mma::kAccumulators * kBlockBytes;
    // Nothing is multiplied while a warpgroup promotes, but another one may be.
    const auto promote = [&](auto stages, int stage) {
      constexpr bool kPair = decltype(stages)::value == 2;
      const int first = ring.index;
      ptx::mbarrier_wait(full(first), ring.phase);
      if constexpr (kPair) ring.advance();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const typename Promotion::Row row = promotion.read(first, block);
        typename Promotion::Column column;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const bool ends = block == kBlocks - 1 && part == kParts - 1;
          cute::warpgroup_arrive();
          step_through(first, block, /*adds=*/false, part * kPartBytes);
          cute::warpgroup_commit_batch();
          if constexpr (kPair) {
            if (part == 0) {
              ptx::mbarrier_wait(full(ring.index), ring.phase);
              cute::warpgroup_arrive();  // else ptxas adds one, as there is a loop between
            }
            step_through(ring.index, block, /*adds=*/true, part * kPartBytes);
            cute::warpgroup_commit_batch();
          }
          if (part == 0) column = promotion.load(stage * kBlocks + block);
          if constexpr (kPair) {
            if (ends) {
              cute::warpgroup_wait<1>();
              __syncwarp();
              release(first);
            }
          }
          cute::warpgroup_wait<0>();
          fence_operands(d);
          if constexpr (Promotion::kReadsLate) promotion.add(d, row, column, part);
          if (ends) {
            __syncwarp();  // one lane releases the stage that all lanes have read scales from
            release(ring.index);
          }
          if constexpr (!Promotion::kReadsLate) promotion.add(d, row, column, part);
        }
      }
      ring.advance();
    };
    int singles = num_stages;
    if constexpr (Promotion::kTakesPairs) singles = promotion.pairs ? num_stages % 2 : num_stages;
#pragma unroll 1
    for (int stage = 0; stage < singles; ++stage) promote(std::integral_constant<int, 1>(), stage);
    if constexpr (Promotion::kTakesPairs) {
#pragma unroll 1
      for (int stage = singles; stage < num_stages; stage += 2)
        promote(std::integral_constant<int, 2>(), stage);
    }
  } else {
    // The stage whose wgmmas may still be running.
    int held = kReleasesEarly ? -1 : 0;
#pragma unroll 1
    for (int stage = 0; stage < num_stages; ++stage, ring.advance()) {
      if constexpr (kReleasesEarly) {
        if (held >= 0 && !ptx::mbarrier_test(full(ring.index), ring.phase)) {
          cute::warpgroup_wait<0>();
          release(held);
          held = -1;
        }
      }
      ptx::mbarrier_wait(full(ring.index), ring.phase);
      cute::warpgroup_arrive();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) step_through(ring.index, block, stage + block > 0);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();  // only this stage's wgmmas may still run: the previous stage is free
      if (kReleasesEarly ? held >= 0 : stage > 0) release(held);
      held = ring.index;
    }
    cute::warpgroup_wait<0>();
    fence_operands(d);
    if (num_stages > 0) release(held);
  }
}

// Releases the stages of a tile of which this warpgroup has no row: the other one then has the tensor cores for itself.
template <class Ring, class Full, class Release>
FLUX_DEVICE void pass_over(Ring& ring, int num_stages, const Full& full, const Release& release) {
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage, ring.advance()) {
    ptx::mbarrier_wait(full(ring.index), ring.phase);
    __syncwarp();  // a lane that still waits would miss the phase if another one let the stage be filled again
    release(ring.index);
  }
}

// As `multiply`, for tiles with kN columns that promote: of OfE4M3 or OfE5M2, as the type of x is. A second mainloop is
// shorter than a second kernel. Without promotion, ptxas would serialise the wgmmas of both.
template <class OfE4M3, class OfE5M2, int kN, int kBlocks = 1, class Ring, class Full, class GetOperands,
          class Release, class Promotion>
FLUX_DEVICE void multiply_fp8(bool e5m2, Ring& ring, int num_stages, float (&d)[kN / 2], const Full& full,
                              const GetOperands& operands, const Release& release, Promotion promotion) {
  if (e5m2) {
    multiply<Wgmma<OfE5M2, kN, Major::K, Major::K>, 32, 32, kBlocks>(ring, num_stages, d, full, operands,
                                                                     release, promotion);
  } else {
    multiply<Wgmma<OfE4M3, kN, Major::K, Major::K>, 32, 32, kBlocks>(ring, num_stages, d, full, operands,
                                                                     release, promotion);
  }
}

// --- scales of fp8 operands ---
//
// Those of blocks are applied when a k-block is promoted, those of rows and columns to the finished sum
// (docs/design/fp8.md#scales).

struct ScaleParams {
  // Without block scales: of row i of x at x[i * x_step], and of column j of the result at weight[j * weight_step]. A
  // step of 0: one scale for all. With block scales: x by `x_blocks`, and weight[j / kScaleBlock][k_block].
  const float *x, *weight;
  int x_step, weight_step;
  bool blocks;
  bool e5m2;             // the type of x; the weight is always e4m3
  CUtensorMap x_blocks;  // [k / kScaleBlock, m]
  // A result in fp32, which math warps write directly: a quad of lanes fills sectors. Null: 16 bits, through slabs.
  float* sums;
  int64_t sums_stride;
};

template <class Params, class Scales = ScaleParams>
struct WithScales : Params {
  Scales scales;
};

// The row in a warpgroup's half tile of this thread's first accumulators; those of the row eight below come next.
FLUX_DEVICE int first_row_of_thread() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Columns of a tile that share a scale of the weight, wherever in a block of them the tile can begin.
template <int kBlockN>
constexpr int kScalePart = kScaleBlock % kBlockN == 0   ? kBlockN
                           : kBlockN % kScaleBlock == 0 ? kScaleBlock
                                                        : 32;
template <int kBlockN>
constexpr int kScaleParts = kBlockN / kScalePart<kBlockN>;

// Scales of the weight along K. A warp loads those of 32 k-blocks at once, one a lane: a scale that all lanes load
// would be moved to a uniform register, and waited for before the wgmmas.
struct WeightScales {
  const float* first;  // null: one
  int last_block;      // of this CTA
  float held = 1.0f;

  FLUX_DEVICE float at(int k_block) {
    if (first == nullptr) return 1.0f;
    if (k_block % 32 == 0) held = __ldg(first + min(k_block + static_cast<int>(ptx::lane()), last_block));
    return __shfl_sync(~0u, held, k_block % 32);
  }
};

// Promotes the k-blocks of a half tile: 64 rows of x and kBlockN columns, in kParts parts of the same width, of at most
// two blocks of the weight's scales. Scales that are not of blocks are one here.
template <int kBlockN, int kParts, class Smem>
struct TilePromotion {
  static constexpr bool kPromotes = true, kReadsLate = false;
  static constexpr bool kTakesPairs = promotes_pairs(Smem::kTile);
  static constexpr int kAccumulators = kBlockN / 2;
  static constexpr int kColumnParts = column_parts(Smem::kTile);
  static constexpr int kProducts = kAccumulators / kColumnParts;

  float (&sums)[kAccumulators];
  const Smem& smem;
  bool has_rows;                // scales of x come with the stages
  int row;                      // of the staged scales, of this thread's first accumulators
  WeightScales before, behind;  // scales of the columns before and behind the boundary
  int boundary;                 // the first part behind it
  bool pairs;

  struct Row {
    float first, second;
  };
  // Of the columns of a part before and behind the boundary.
  struct Column {
    float before, behind;
  };
  FLUX_DEVICE Row read(int stage, int) const {
    if (!has_rows) return {1.0f, 1.0f};
    const uint32_t scales = smem.scales(stage) + row * 4;
    return {__uint_as_float(ptx::load_shared(scales)), __uint_as_float(ptx::load_shared(scales + 8 * 4))};
  }
  FLUX_DEVICE Column load(int k_block) {
    const float of_first = before.at(k_block);
    return {of_first, kParts > 1 ? behind.at(k_block) : of_first};
  }
  FLUX_DEVICE void add(const float (&product)[kProducts], const Row& x, const Column& w,
                       int column_part) const {
    static_assert(kParts == 1 || kParts % kColumnParts == 0);
    constexpr int kScaled = kParts == 1 ? 1 : kParts / kColumnParts, kEach = kProducts / kScaled;
#pragma unroll
    for (int part = 0; part < kScaled; ++part) {
      const float column = kParts == 1 || column_part * kScaled + part < boundary ? w.before : w.behind;
      const float factors[2] = {x.first * column, x.second * column};
#pragma unroll
      for (int i = part * kEach; i < (part + 1) * kEach; ++i)
        sums[column_part * kProducts + i] += product[i] * factors[i / 2 % 2];
    }
  }
};

// Where the block scales of a tile's columns are. `k_blocks`: of the whole problem. `part`: of a CTA's k-blocks.
template <int kBlockN>
struct ColumnScales {
  WeightScales before, behind;
  int boundary;

  template <class Part>
  FLUX_DEVICE ColumnScales(const ScaleParams& s, int first_column, int n, int k_blocks, const Part& part) {
    const int block = first_column / kScaleBlock, last = (n - 1) / kScaleBlock;
    const float* const first = s.weight + static_cast<int64_t>(block) * k_blocks + part.first_block;
    before = {s.blocks ? first : nullptr, part.num_blocks - 1};
    behind = {s.blocks ? first + (block < last ? k_blocks : 0) : nullptr, part.num_blocks - 1};
    boundary = (kScaleBlock - first_column % kScaleBlock) / kScalePart<kBlockN>;
  }
};

// Promotes the k-blocks of a swap-AB tile: kSwapAbN columns and kRows rows of x, where adjacent accumulators are of
// adjacent rows. Their scales are too many to be held during the wgmmas.
template <int kRows, int kBlocks, int kScaleBytes>
struct SwapAbPromotion {
  static constexpr bool kPromotes = true, kReadsLate = true, kTakesPairs = false;
  static constexpr int kAccumulators = kRows / 2, kColumnParts = 1;

  float (&sums)[kAccumulators];
  uint32_t scales;  // of this thread's first row, in the first stage
  WeightScales weight;
  using Row = uint32_t;  // address
  using Column = float;
  FLUX_DEVICE Row read(int stage, int block) const {
    return scales + (stage * kBlocks + block) * kScaleBytes;
  }
  FLUX_DEVICE Column load(int k_block) { return weight.at(k_block); }
  FLUX_DEVICE void add(const float (&product)[kAccumulators], Row x, Column w, int) const {
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const float2 pair = weight.first == nullptr ? float2{1.0f, 1.0f} : ptx::load_shared_pair(x + i * 8);
      const float factors[2] = {pair.x * w, pair.y * w};
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] += product[i + j] * factors[j % 2];
    }
  }
};

// Applies the scales of rows and columns to the sums of a half tile. `x`: the scale of its first row; it has `rows`
// rows. A warp loads each scale of a column once: lane i those of the columns that lane i % 4 has in the groups of
// eight columns i / 4, i / 4 + 8, ...
template <int kAccumulators>
FLUX_DEVICE void scale_sums(const ScaleParams& s, const float* x, int rows, int first_column, int n,
                            float (&d)[kAccumulators]) {
  if (s.blocks) return;
  constexpr int kGroups = kAccumulators / 4, kLoads = (kGroups + 7) / 8;
  const int lane = static_cast<int>(ptx::lane());
  float of_rows[2], left[kLoads], right[kLoads];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row_of_thread() + half * 8;
    of_rows[half] = row < rows ? x[row * s.x_step] : 0.0f;
  }
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const int column = first_column + (load * 8 + lane / 4) * 8 + lane % 4 * 2;
    left[load] = column < n ? __ldg(s.weight + column * s.weight_step) : 0.0f;
    right[load] = column < n ? __ldg(s.weight + (column + 1) * s.weight_step) : 0.0f;
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int source = group % 8 * 4 + lane % 4;
    const float of_columns[2] = {__shfl_sync(~0u, left[group / 8], source),
                                 __shfl_sync(~0u, right[group / 8], source)};
#pragma unroll
    for (int i = 0; i < 4; ++i) d[group * 4 + i] *= of_rows[i / 2] * of_columns[i % 2];
  }
}

// The same for a swap-AB tile: columns `column` and column + 8, and pairs of rows eight apart, from `row` of `m` on.
template <int kAccumulators>
FLUX_DEVICE void scale_swapped_sums(const ScaleParams& s, int row, int m, int column, int n,
                                    float (&d)[kAccumulators]) {
  if (s.blocks) return;
  float of_columns[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    of_columns[half] = column + half * 8 < n ? __ldg(s.weight + (column + half * 8) * s.weight_step) : 0.0f;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const int at = row + i / 4 * 8 + i % 2;
    d[i] *= (at < m ? __ldg(s.x + at * s.x_step) : 0.0f) * of_columns[i / 2 % 2];
  }
}

// Writes sums of a half tile in fp32. `row`: its first one in the result; it has `rows` rows.
template <int kSums>
FLUX_DEVICE void store_sums(const ScaleParams& s, int row, int rows, int first_column, int end_column,
                            const float (&sums)[kSums]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_tile = first_row_of_thread() + half * 8;
    if (in_tile >= rows) break;
    float* const out = s.sums + static_cast<int64_t>(row + in_tile) * s.sums_stride;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const int column = first_column + i * 2 + static_cast<int>(threadIdx.x) % 4 * 2;
      if (column >= end_column) break;
      *reinterpret_cast<float2*>(out + column) = {sums[i + half * 2], sums[i + half * 2 + 1]};
    }
  }
}

template <int kAccumulators>
FLUX_DEVICE void store_swapped_sums(const ScaleParams& s, int row, int end_row, int column, int n,
                                    const float (&d)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const int at = row + i / 4 * 8 + i % 2, to = column + i / 2 % 2 * 8;
    if (at < end_row && to < n) s.sums[at * s.sums_stride + to] = d[i];
  }
}

}  // namespace flux::gemm
