// Scales of fp8 operands: those of blocks, which are applied when a k-block is promoted, and those of rows and columns,
// which are applied to the finished sum (docs/design/fp8.md#scales).
#pragma once

#include "gemm/sm90/mainloop.cuh"

namespace flux::gemm {

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
