// The GEMM kernel for few rows: D^T = W * x^T. A cluster of CTAs computes each tile and splits its K (swap_ab.h).
//
//   math       warpgroup 0            wgmma on the whole tile; writes it to shared memory
//   epilogue   warpgroup 1            outputs the finished tile while the math warpgroup computes the next one; both
//                                     output the last tile of a CTA. With split K, the CTAs of the cluster first
//                                     exchange fp32 partial sums; each CTA adds and outputs a share of the columns
//   loader     warp 8, one thread     TMA loads of W and x into a ring of stages
//
// There is no second math warpgroup, because it would read the whole weight stage from shared memory again
// (docs/design/decode.md#rejected-for-the-gemm).
//
// An Output defines where results go:
//
//   struct Params, begin(params) -> Call
//   kSums, kGates                             whether it sums over ranks, after all tiles; whether columns gate others
//   bias(params)                              bias to add to the product, or null
//   store(params, call, row, column, v)       stores eight columns of a row of the local product
//   fetch_ahead(params)                       called by a warp that has loaded all tiles of its CTA
//   end(params, box)                          called by that warp after all threads have called begin; leaves shares of
//                                             a sum in `box`
//   finish<Element>(params, call, box, spare) called by both warpgroups after all tiles
#pragma once

#include "gemm/finish.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/swap_ab.h"
#include "operators.h"

namespace flux::gemm {

constexpr int kSwapAbMathThreads = 128;
constexpr int kSwapAbBothThreads = 256;  // math and epilogue warpgroups
constexpr int kSwapAbThreads = kSwapAbBothThreads + 32;

template <class Output>
struct SwapAbParams {
  CUtensorMap weight, x;
  CUtensorMap last_x;  // for the last tile of rows: its box has only the rows that exist
  int m, n;
  int stage_blocks;    // K in stages; at least one stage for each part of a split
  bool shares_weight;  // no split K: a pair of CTAs with adjacent tiles of rows; each loads half the weight
  bool weight_is_constant;
  int gate_rows;  // of the weight, each multiplied by as many that follow them (GemmArgs::swiglu); or 0
  typename Output::Params output;
};

template <class Output>
struct ScaledSwapAbParams : SwapAbParams<Output> {
  ScaleParams scales;
  int k_blocks;  // of kScaleBlock elements
};

template <bool kFp8, class Output>
using SwapAbParamsFor = std::conditional_t<kFp8, ScaledSwapAbParams<Output>, SwapAbParams<Output>>;

// Loads the halves of a tile whose columns are a gate and what it gates. A pair of CTAs loads one each, for both.
FLUX_DEVICE void load_gate_and_gated(const CUtensorMap& weight, int gate_rows, uint32_t dst, uint32_t full,
                                     int k, int row, int cta, bool shared) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t to = dst + half * (kSwapAbWeightBytes / 2);
    if (!shared) {
      ptx::tma_load_2d(&weight, to, full, k, row + half * gate_rows);
    } else if (half == cta) {
      ptx::tma_load_2d_multicast(&weight, to, full, k, row + half * gate_rows, 0b11);
    }
  }
}

template <class Element>
FLUX_DEVICE uint4 gated(const uint4& gates, const uint4& values) {
  float gate[kVector], value[kVector];
  widen<Element>(gates, gate);
  widen<Element>(values, value);
#pragma unroll
  for (int i = 0; i < kVector; ++i) value[i] *= silu(gate[i]);
  return round<Element>(value);
}

template <class Element, Major kMajorW, int kConfig, class Output>
__global__ void __launch_bounds__(kSwapAbThreads, 1) sm90_gemm_swap_ab(
    const __grid_constant__ SwapAbParamsFor<kSwapAbConfigs[kConfig].is_fp8, Output> params) {
  constexpr SwapAbConfig kTile = kSwapAbConfigs[kConfig];
  constexpr bool kIsFp8 = kTile.is_fp8;
  constexpr bool kGates = Output::kGates && kMajorW == Major::K && !kIsFp8;
  constexpr int kRows = kTile.rows;
  constexpr int kRowsBytes = swap_ab_rows_bytes(kTile);
  constexpr int kStageBytes = swap_ab_stage_bytes(kTile);
  constexpr int kScaleBytes = swap_ab_scale_bytes(kTile);
  static_assert(kStageBytes % 1024 == 0 && swap_ab_meeting_bytes(kTile) % 128 == 0);
  constexpr int kMeetingRows = swap_ab_meeting_rows(kTile);
  constexpr int kVector = Exchange::kVector;
  using Stages = RingCursor<kTile.stages>;

  extern __shared__ uint8_t raw_smem[];
  const uint32_t stages = (ptx::smem_addr(raw_smem) + 1023) & ~1023u;
  const uint32_t staged = stages + kTile.stages * kStageBytes;
  const uint32_t partials = staged + swap_ab_meeting_bytes(kTile);
  const uint32_t scales = partials + swap_ab_meeting_bytes(kTile);
  const uint32_t barriers = scales + kTile.stages * kTile.k_blocks * kScaleBytes;
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kTile.stages + stage); };
  const uint32_t partials_full = barriers + 8 * (2 * kTile.stages), partials_empty = partials_full + 8;
  const SharesBox shares = {barriers + 8 * swap_ab_barriers(kTile)};

  const int cluster_size = static_cast<int>(ptx::cluster_num_ctas());
  const int cta = static_cast<int>(ptx::cluster_cta_rank());
  const bool shares_weight = kTile.in_pairs && params.shares_weight;
  const int sharers = shares_weight ? cluster_size : 1, split = cluster_size / sharers;
  const int row_in_cluster = shares_weight ? cta : 0, part = shares_weight ? 0 : cta;
  const int warp = ptx::warp();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weight);
    ptx::prefetch_tensor_map(&params.x);
    ptx::prefetch_tensor_map(&params.last_x);
    for (int stage = 0; stage < kTile.stages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kSwapAbMathThreads / 32 * sharers);
    }
    ptx::mbarrier_init(partials_full, 1);
    ptx::mbarrier_init(partials_empty, kSwapAbBothThreads / 32 * max(split - 1, 1));
    shares.init();
    ptx::fence_mbarrier_init();
  }
  // Barriers must be initialised before another CTA arrives on them.
  if (cluster_size > 1) ptx::cluster_sync_relaxed();
  __syncthreads();

  const int m_tiles = ceil_div(params.m, kRows * sharers);
  const int num_tiles = m_tiles * ceil_div(params.n, kSwapAbN);
  const int first_tile = blockIdx.x / cluster_size, step = gridDim.x / cluster_size;
  // Mostly all rows are one tile. Then no division follows the last wgmma.
  const auto column_tile = [&](int tile) { return m_tiles == 1 ? tile : tile / m_tiles; };
  const auto column_of = [&](int tile) { return column_tile(tile) * kSwapAbN; };
  const auto row_of = [&](int tile) {
    return ((tile - column_tile(tile) * m_tiles) * sharers + row_in_cluster) * kRows;
  };
  const int first_block = params.stage_blocks * part / split;
  const int num_blocks = params.stage_blocks * (part + 1) / split - first_block;

  const bool is_loader = warp == kSwapAbBothThreads / 32;
  // The second CTA of a pair may have no rows.
  const auto rows_of = [&](int tile) { return max(min(params.m - row_of(tile), kRows), 0); };
  const auto first_k = [&](int block, int i) {
    return ((first_block + block) * kTile.k_blocks + i) * kTile.block_k();
  };
  const Boxes weight = {&params.weight, kMajorW == Major::K ? kSwapAbN / sharers : kSwapAbN};
  // Begins a stage of a tile, whose rows of x follow. A division in here would take longer than the loads.
  const auto load_weight = [&](int stage, int column, int rows, int block) {
    int block_bytes = kSwapAbWeightBytes + rows * kBlockBytes;
    if constexpr (kIsFp8) {
      if (params.scales.blocks) block_bytes += kRows * 4;  // also if there are no rows
    }
    ptx::mbarrier_arrive_expect_tx(full(stage), kTile.k_blocks * block_bytes);
#pragma unroll
    for (int i = 0; i < kTile.k_blocks; ++i) {
      const uint32_t dst = stages + stage * kStageBytes + i * kSwapAbWeightBytes;
      if (kGates && params.gate_rows > 0) {
        load_gate_and_gated(params.weight, params.gate_rows, dst, full(stage), first_k(block, i), column / 2,
                            cta, sharers > 1);
      } else {
        load_b<kMajorW, kSwapAbN>(weight, dst, full(stage), first_k(block, i), column, cta, sharers > 1);
      }
    }
  };
  const auto load_x = [&](int stage, int row, int rows, int block) {
    const CUtensorMap* const x = rows < kRows ? &params.last_x : &params.x;
    const uint32_t dst = stages + stage * kStageBytes + kTile.k_blocks * kSwapAbWeightBytes;
#pragma unroll
    for (int i = 0; i < kTile.k_blocks; ++i) {
      const int k = first_k(block, i);
      if (!kTile.in_pairs || rows > 0) ptx::tma_load_2d(x, dst + i * kRowsBytes, full(stage), k, row);
      if constexpr (kIsFp8) {
        const uint32_t to = scales + (stage * kTile.k_blocks + i) * kScaleBytes;
        if (params.scales.blocks)
          ptx::tma_load_2d(&params.scales.x_blocks, to, full(stage), row, k / kTile.block_k());
      }
    }
  };
  const int loaded = params.weight_is_constant ? min(num_blocks, kTile.stages) : 0;
  if (is_loader && ptx::elect_one()) {
    const int column = column_of(first_tile), rows = rows_of(first_tile);
#pragma unroll 1
    for (int stage = 0; stage < loaded; ++stage) load_weight(stage, column, rows, stage);
  }
  ptx::wait_for_earlier_kernels();

  if (is_loader) {
    if (ptx::elect_one()) {
      // Tiles in the same columns are consecutive, so later tiles find the weight in the L2.
      Stages ring;
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const int column = column_of(tile), row = row_of(tile), rows = rows_of(tile);
        int block = 0;
        if (tile == first_tile) {
#pragma unroll 1
          for (; block < loaded; ++block, ring.advance()) load_x(ring.index, row, rows, block);
        }
        // With few stages the way from a free stage to its loads is not hidden: no branches that can be avoided.
#pragma unroll 1
        for (; block < num_blocks; ++block, ring.advance()) {
          ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
          load_weight(ring.index, column, rows, block);
          load_x(ring.index, row, rows, block);
        }
      }
    }
    __syncwarp();
    Output::fetch_ahead(params.output);
    ptx::let_next_kernel_start();
    ptx::named_barrier_sync(kEpochBarrier, kSwapAbThreads);
    Output::end(params.output, shares);
  } else {
    // The latency of reading the epoch overlaps with the first TMA loads. The loader warp closes the call after all
    // threads have arrived on kEpochBarrier, that is, have read the epoch.
    const auto call = Output::begin(params.output);
    ptx::named_barrier_arrive(kEpochBarrier, kSwapAbThreads);
    constexpr int kAccumulators = kRows / 2;
    const bool multiplies = threadIdx.x < kSwapAbMathThreads;
    const int lane = ptx::lane();
    // Columns of a tile that this CTA adds up: a power of two, because a division takes as long as 35 instructions.
    const int share = kSwapAbN / split, share_log = 31 - __clz(share);
    const int row_floats = swap_ab_row_floats(split);
    // Releases stages to the CTAs that fill them: this CTA, and the partner that multicasts its half of the weight.
    const auto release = [&](int stage) {
      if (lane < sharers) ptx::mbarrier_arrive_cluster(empty(stage), sharers > 1 ? lane : cta);
    };
    const auto operands = [&](int stage, int block) {
      const uint32_t w = stages + stage * kStageBytes, x = w + kTile.k_blocks * kSwapAbWeightBytes;
      return Operands{make_b_descriptor<kMajorW>(w + block * kSwapAbWeightBytes),
                      make_descriptor(x + block * kRowsBytes, 0, 1024)};
    };
    float d[kAccumulators];
    Stages ring;
    RingCursor<1> meetings;

    for (int tile = first_tile; tile < num_tiles; tile += step) {
      if constexpr (!kTile.is_fp8) {
        using Mma = Wgmma<Element, kRows, kMajorW, Major::K>;
        if (multiplies) {
          multiply<Mma, kBStepBytes<kMajorW>, 32, kTile.k_blocks>(ring, num_blocks, d, full, operands,
                                                                  release);
        }
      } else if (multiplies) {
        float products[kAccumulators];
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) d[i] = 0.0f;
        const int first = first_block * kTile.k_blocks;
        const float* const weight =
            params.scales.weight + column_of(tile) / kScaleBlock * params.k_blocks + first;
        const SwapAbPromotion<kRows, kTile.k_blocks, kScaleBytes> promotion = {
            d, scales + lane % 4 * 8, {params.scales.blocks ? weight : nullptr, params.k_blocks - 1 - first}};
        multiply_fp8<E4M3xE4M3, E4M3xE5M2, kRows, kTile.k_blocks>(
            params.scales.e5m2, ring, num_blocks, products, full, operands, release, promotion);
        scale_swapped_sums(params.scales, row_of(tile) + lane % 4 * 2, params.m,
                           column_of(tile) + warp * 16 + lane / 4, params.n, d);
      }

      // The accumulators of a thread: two columns of D that are 8 apart, and pairs of rows of each.
      const int first_row = row_of(tile), first_column = column_of(tile);
      const int warp_column = warp * 16;
      float bias[2] = {};
      if (Output::bias(params.output) != nullptr && part == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = first_column + warp_column + half * 8 + lane / 4;
          if (multiplies && column < params.n) {
            bias[half] = static_cast<float>(static_cast<const Element*>(Output::bias(params.output))[column]);
            if constexpr (kTile.is_fp8) {
              if (params.scales.sums != nullptr)
                bias[half] = static_cast<const float*>(Output::bias(params.output))[column];
            }
          }
        }
      }
      const auto both_warpgroups = [] { ptx::named_barrier_sync(kMathBarrier, kSwapAbBothThreads); };
      const bool is_last = tile + step >= num_tiles;
      const bool gives = is_last || !multiplies;
      const int givers = is_last ? kSwapAbBothThreads : kSwapAbBothThreads - kSwapAbMathThreads;
      const int giver = static_cast<int>(threadIdx.x) - (kSwapAbBothThreads - givers);
      if constexpr (kTile.is_fp8) {
        if (split == 1 && params.scales.sums != nullptr) {
          if (!multiplies) continue;
#pragma unroll
          for (int i = 0; i < kAccumulators; ++i) d[i] += bias[i / 2 % 2];
          store_swapped_sums(params.scales, first_row + lane % 4 * 2, min(params.m, first_row + kRows),
                             first_column + warp_column + lane / 4, params.n, d);
          continue;
        }
      }
      if (split == 1) {
        // Rounds the accumulators, and transposes them so that the columns of a row are adjacent.
        constexpr int kRowBytes = kSwapAbN * kResultBytes + 16;  // padded: rows start in different banks
        static_assert(kRows * kRowBytes <= 2 * swap_ab_meeting_bytes(kTile));
        constexpr int kVectors = kSwapAbN / kVector;
        if (tile != first_tile) both_warpgroups();  // the last tile has been read by the epilogue
        if (multiplies) {
          const uint32_t address =
              staged + lane % 8 * kRowBytes + (warp_column + lane / 8 % 2 * 8) * kResultBytes;
#pragma unroll
          for (int block = 0; block < kRows / 8; ++block) {
            ptx::stmatrix_x2_transposed(
                address + block * 8 * kRowBytes,
                Pair<Element>::round(d[block * 4] + bias[0], d[block * 4 + 1] + bias[0]),
                Pair<Element>::round(d[block * 4 + 2] + bias[1], d[block * 4 + 3] + bias[1]));
          }
        }
        both_warpgroups();
        if (!gives) continue;
        if (kGates && params.gate_rows > 0) {
          constexpr int kGated = kVectors / 2;
#pragma unroll 1
          for (int i = giver; i < min(params.m - first_row, kRows) * kGated; i += givers) {
            const int row = i / kGated, column = i % kGated * kVector, out_column = first_column / 2 + column;
            if (out_column >= params.gate_rows) continue;
            const uint32_t gates = staged + row * kRowBytes + column * kResultBytes;
            Output::store(params.output, call, first_row + row, out_column,
                          gated<Element>(ptx::load_shared_v4(gates),
                                         ptx::load_shared_v4(gates + kSwapAbN / 2 * kResultBytes)));
          }
          continue;
        }
        const int vectors = min(params.m - first_row, kRows) * kVectors;
#pragma unroll 1
        for (int i = giver; i < vectors; i += givers) {
          const int row = i / kVectors, column = i % kVectors * kVector;
          if (first_column + column >= params.n) continue;
          Output::store(params.output, call, first_row + row, first_column + column,
                        ptx::load_shared_v4(staged + row * kRowBytes + column * kResultBytes));
        }
        continue;
      }

      // Split K: exchange partial tiles. A CTA stages its partial sums by share. One bulk copy sends each share to
      // the CTA that adds it, and completes on that CTA's mbarrier. This CTA's own share is written in place.
      const uint32_t share_bytes = 4 * kMeetingRows * row_floats;
#pragma unroll
      for (int meeting = 0; meeting < kRows / kMeetingRows; ++meeting, meetings.advance()) {
        if (tile != first_tile || meeting > 0) both_warpgroups();  // the epilogue has read the previous sums
        if (multiplies) {
          ptx::mbarrier_wait(partials_empty, meetings.phase ^ 1);
          if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(partials_full, (split - 1) * share_bytes);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = warp_column + half * 8 + lane / 4;
            // The compiler finds what follows from a shift before the mainloop. High tiles have no registers for that.
            const int owner = kRows < 128 ? column >> share_log : column / share;
            const uint32_t address = (owner == part ? partials : staged) + owner * share_bytes +
                                     4 * (lane % 4 * 2 * row_floats + column - owner * share);
#pragma unroll
            for (int block = 0; block < kMeetingRows / 8; ++block) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                ptx::store_shared(
                    address + 4 * (block * 8 + i) * row_floats,
                    __float_as_uint(d[(meeting * kMeetingRows / 8 + block) * 4 + half * 2 + i] + bias[half]));
              }
            }
          }
          ptx::fence_proxy_async_smem();
        }
        both_warpgroups();
        if (gives) {
          const int other = static_cast<int>(threadIdx.x) - kSwapAbMathThreads;
          if (other >= 0 && other < split && other != part) {
            ptx::bulk_copy_cluster(partials + part * share_bytes, staged + other * share_bytes, share_bytes,
                                   partials_full, other);
          }
          ptx::mbarrier_wait(partials_full, meetings.phase);
          const int vectors = share / kVector, vectors_log = 31 - __clz(vectors);
          const int begin = first_row + meeting * kMeetingRows;
          const int rows = min(params.m - begin, kMeetingRows);
#pragma unroll 1
          for (int i = giver; i < rows * vectors; i += givers) {
            const int row = i >> vectors_log, column = (i & (vectors - 1)) * kVector;
            float sum[kVector] = {};
#pragma unroll 2
            for (int source = 0; source < split; ++source) {
              const uint32_t address = partials + source * share_bytes + 4 * (row * row_floats + column);
              const float4 low = ptx::load_shared_floats(address),
                           high = ptx::load_shared_floats(address + 16);
              const float part_sum[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
              for (int j = 0; j < kVector; ++j) sum[j] += part_sum[j];
            }
            const int out_column = first_column + part * share + column;
            if constexpr (kTile.is_fp8) {
              if (out_column < params.n && params.scales.sums != nullptr) {
                auto* const to = reinterpret_cast<float4*>(
                    params.scales.sums + (begin + row) * params.scales.sums_stride + out_column);
                to[0] = {sum[0], sum[1], sum[2], sum[3]};
                to[1] = {sum[4], sum[5], sum[6], sum[7]};
                continue;
              }
            }
            if (out_column < params.n)
              Output::store(params.output, call, begin + row, out_column, round<Element>(sum));
          }
        }
        // After the last exchange no CTA waits on partials_empty, so no arrival is needed.
        if (is_last && meeting + 1 == kRows / kMeetingRows) break;
        __syncwarp();
        if (lane < split && lane != part) ptx::mbarrier_arrive_cluster(partials_empty, lane);
      }
    }
    Output::template finish<Element>(params.output, call, shares,
                                     SpareMemory{stages, kTile.stages * kStageBytes});
    if constexpr (kTile.in_pairs) {
      // The partner's last releases of stages: the cluster barrier below does not wait for them (gemm.cuh).
      if (sharers > 1 && threadIdx.x == 0) {
#pragma unroll 1
        for (int stage = 0; stage < kTile.stages; ++stage, ring.advance())
          ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
      }
    }
  }

  __syncthreads();
  // A CTA must not exit while its copies to others are in flight, or while others may arrive on its barriers. What was
  // sent to this one has been received.
  if (cluster_size > 1) ptx::cluster_sync_relaxed();
}

struct LocalOutput {
  static constexpr bool kSums = false, kGates = true;
  struct Params {
    void* out;
    const void* bias;
    int64_t row_stride;
  };
  static Params params(const GemmArgs& args) {
    return {const_cast<void*>(args.out.data), args.bias, args.out.row_stride};
  }
  struct Call {};
  FLUX_DEVICE static Call begin(const Params&) { return {}; }
  FLUX_DEVICE static const void* bias(const Params& p) { return p.bias; }
  FLUX_DEVICE static void store(const Params& p, const Call&, int row, int column, const uint4& v) {
    *const_cast<uint4*>(vector_at(p.out, row * p.row_stride + column)) = v;
  }
  FLUX_DEVICE static void fetch_ahead(const Params&) {}
  template <class Element>
  FLUX_DEVICE static void finish(const Params&, const Call&, const SharesBox&, const SpareMemory&) {}
  FLUX_DEVICE static void end(const Params&, const SharesBox&) {}
};

struct ExchangeOutput {
  static constexpr bool kSums = true, kGates = false;
  using Params = ExchangeParams;
  using Call = sync::Call;
  FLUX_DEVICE static Call begin(const Params& p) { return begin_exchange(p.symm); }
  FLUX_DEVICE static const void* bias(const Params&) { return nullptr; }  // added to the sum
  FLUX_DEVICE static void store(const Params& p, const Call& call, int row, int column, const uint4& v) {
    exchange::contribute(p.symm, p.exchange, call, row, column, v);
  }
  FLUX_DEVICE static void fetch_ahead(const Params& p) { fetch_addends(p); }
  template <class Element>
  FLUX_DEVICE static void finish(const Params& p, const Call& call, const SharesBox& box,
                                 const SpareMemory& spare) {
    gemm::finish<Element, kSwapAbBothThreads>(p, call, threadIdx.x, box.get(), spare);
  }
  FLUX_DEVICE static void end(const Params& p, const SharesBox& box) {
    const uint32_t epoch = sync::begin_call(p.symm).epoch;  // its latency overlaps with that of the draw
    if (ptx::elect_one()) box.put(draw_shares(p.symm));
    __syncwarp();
    fetch_slots(p, epoch);
    if (ptx::elect_one()) end_exchange(p.symm, epoch);
  }
};

}  // namespace flux::gemm
