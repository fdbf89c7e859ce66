// The kernel for few rows: D^T = W * x^T, a cluster of CTAs for each tile, each with its part of K (swap_ab.h).
//
//   math     warpgroups 0 and 1     wgmma on 64 columns of the result each; then their partial tile, in fp32,
//                                   to the CTAs of the cluster, which each add up a share and give it away
//   loader   warp 8, one thread     TMA loads of W and x into a ring of stages
//
// An Output says where results go:
//
//   struct Params
//   begin(params) -> Call
//   store<Element>(params, call, row, column, f)      eight columns of a row of the local product
//   finish<Element>(params, call)                     the math threads, after all tiles
//   end(params, call)                                 one thread of each CTA, when all have begun
#pragma once

#include "gemm/finish.cuh"
#include "gemm/smem.cuh"
#include "gemm/swap_ab.h"
#include "gemm/wgmma.cuh"
#include "runtime/device/ptx.cuh"

namespace flux::gemm {

constexpr int kSwapAbMathThreads = 128 * kNumMathWarpgroups;
constexpr int kSwapAbThreads = kSwapAbMathThreads + 32;

template <class Output>
struct SwapAbParams {
  CUtensorMap weight, x;
  int m, n;
  int box_rows;  // of x in a stage: all of them if there is one tile of rows, else the tile's
  int k_blocks;  // at least one for each CTA of a cluster
  typename Output::Params output;
};

template <class Element, Major kMajorW, int kConfig, class Output>
__global__ void __launch_bounds__(kSwapAbThreads, 1)
    sm90_gemm_swap_ab(const __grid_constant__ SwapAbParams<Output> params) {
  constexpr SwapAbConfig kTile = kSwapAbConfigs[kConfig];
  constexpr int kRows = kTile.rows;
  constexpr int kStageBytes = swap_ab_stage_bytes(kTile);
  constexpr int kMeetingRows = swap_ab_meeting_rows(kTile);
  constexpr int kVector = Exchange::kVector;
  using Stages = RingCursor<kTile.stages>;

  extern __shared__ uint8_t raw_smem[];
  const uint32_t stages = (ptx::smem_addr(raw_smem) + 1023) & ~1023u;
  const uint32_t staged = stages + kTile.stages * kStageBytes;
  const uint32_t partials = staged + swap_ab_meeting_bytes(kTile);
  const uint32_t barriers = partials + swap_ab_meeting_bytes(kTile);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kTile.stages + stage); };
  const uint32_t partials_full = barriers + 8 * (2 * kTile.stages), partials_empty = partials_full + 8;

  const int split = static_cast<int>(ptx::cluster_num_ctas());
  const int part = static_cast<int>(ptx::cluster_cta_rank());
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weight);
    ptx::prefetch_tensor_map(&params.x);
    for (int stage = 0; stage < kTile.stages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kSwapAbMathThreads / 32);
    }
    ptx::mbarrier_init(partials_full, 1);
    ptx::mbarrier_init(partials_empty, kSwapAbMathThreads / 32 * split);
    ptx::fence_mbarrier_init();
  }
  // Barriers must be ready before another CTA counts on them.
  if (split > 1) ptx::cluster_sync_relaxed();
  ptx::wait_for_earlier_kernels();
  // All threads have asked which call it is before one of them closes it.
  const auto call = Output::begin(params.output);
  __syncthreads();

  const int m_tiles = (params.m + kRows - 1) / kRows;
  const int num_tiles = m_tiles * ((params.n + kSwapAbN - 1) / kSwapAbN);
  const int first_tile = blockIdx.x / split, step = gridDim.x / split;
  const int first_block = params.k_blocks * part / split;
  const int num_blocks = params.k_blocks * (part + 1) / split - first_block;

  if (warp == kSwapAbMathThreads / 32) {
    if (ptx::lane() == 0) {
      // Rows of one column tile follow each other: the weight comes from memory once, then from the L2.
      Stages ring;
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const int column = tile / m_tiles * kSwapAbN, row = tile % m_tiles * kRows;
        for (int block = 0; block < num_blocks; ++block, ring.advance()) {
          const int k = (first_block + block) * kBlockK;
          const uint32_t bar = full(ring.index), dst = stages + ring.index * kStageBytes;
          ptx::mbarrier_wait(empty(ring.index), ring.phase ^ 1);
          ptx::mbarrier_arrive_expect_tx(bar, swap_ab_weight_bytes() + params.box_rows * 128);
          load_b<kMajorW, kSwapAbN>(&params.weight, dst, bar, k, column, 0, /*shared=*/false);
          ptx::tma_load_2d(&params.x, dst + swap_ab_weight_bytes(), bar, k, row);
        }
      }
      Output::end(params.output, call);
    }
  } else {
    using Mma = Wgmma<Element, kRows, kMajorW, Major::K>;
    const int warpgroup = warp / 4;
    const int lane = ptx::lane();
    const int share = kSwapAbN / split;  // columns of a tile that this CTA adds up
    const int row_floats = swap_ab_row_floats(split);
    float d[Mma::kAccumulators];
    Stages ring;
    RingCursor<1> meetings;

    for (int tile = first_tile; tile < num_tiles; tile += step) {
      int held = 0;  // the stage whose wgmmas may still be running
#pragma unroll 1
      for (int block = 0; block < num_blocks; ++block, ring.advance()) {
        ptx::mbarrier_wait(full(ring.index), ring.phase);
        const uint32_t w = stages + ring.index * kStageBytes;
        const uint64_t a = kMajorW == Major::K ? make_descriptor(w + warpgroup * 64 * 128, 0, 1024)
                                               : make_b_descriptor<kMajorW>(w + warpgroup * kPanelBytes);
        const uint64_t b = make_descriptor(w + swap_ab_weight_bytes(), 0, 1024);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
          Mma::step(a + k * (kBStepBytes<kMajorW> >> 4), b + k * (32 >> 4), d, block > 0 || k > 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();  // all but this k-block are done: the one before is free
        if (block > 0 && lane == 0) ptx::mbarrier_arrive(empty(held));
        held = ring.index;
      }
      cute::warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < Mma::kAccumulators; ++i) cute::warpgroup_fence_operand(d[i]);
      if (lane == 0) ptx::mbarrier_arrive(empty(held));

      // Partial tiles meet: a thread has two columns, eight apart, and of each pairs of rows. They are staged
      // by share, and one copy brings each share to the CTA that adds it up, and counts on its barrier. What this
      // CTA adds up itself is put there at once.
      const int first_row = tile % m_tiles * kRows, first_column = tile / m_tiles * kSwapAbN;
      const uint32_t share_bytes = 4 * kMeetingRows * row_floats;
#pragma unroll
      for (int meeting = 0; meeting < kRows / kMeetingRows; ++meeting, meetings.advance()) {
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(partials_full, (split - 1) * share_bytes);
        ptx::mbarrier_wait(partials_empty, meetings.phase ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = warpgroup * 64 + warp % 4 * 16 + half * 8 + lane / 4;
          const int owner = column / share;
          const uint32_t address = (owner == part ? partials : staged) + owner * share_bytes +
                                   4 * (lane % 4 * 2 * row_floats + column % share);
#pragma unroll
          for (int block = 0; block < kMeetingRows / 8; ++block) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              ptx::store_shared(address + 4 * (block * 8 + i) * row_floats,
                                __float_as_uint(d[(meeting * kMeetingRows / 8 + block) * 4 + half * 2 + i]));
            }
          }
        }
        ptx::fence_proxy_async_smem();
        ptx::named_barrier_sync(1, kSwapAbMathThreads);
        if (threadIdx.x < split && threadIdx.x != part) {
          ptx::bulk_copy_cluster(partials + part * share_bytes, staged + threadIdx.x * share_bytes,
                                 share_bytes, partials_full, threadIdx.x);
        }
        ptx::mbarrier_wait(partials_full, meetings.phase);
        const int vectors = share / kVector, begin = first_row + meeting * kMeetingRows;
        const int rows = min(params.m - begin, kMeetingRows);
        for (int i = threadIdx.x; i < rows * vectors; i += kSwapAbMathThreads) {
          const int row = i / vectors, column = i % vectors * kVector;
          float sum[kVector] = {};
          for (int source = 0; source < split; ++source) {
            const uint32_t address = partials + source * share_bytes + 4 * (row * row_floats + column);
            const float4 low = ptx::load_shared_v4(address), high = ptx::load_shared_v4(address + 16);
            const float part_sum[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] += part_sum[j];
          }
          const int out_column = first_column + part * share + column;
          if (out_column < params.n) {
            Output::template store<Element>(params.output, call, begin + row, out_column, sum);
          }
        }
        // After the last meeting nobody asks, and nothing is left that another CTA would have to wait for.
        if (tile + step >= num_tiles && meeting + 1 == kRows / kMeetingRows) break;
        __syncwarp();
        if (lane < split) ptx::mbarrier_arrive_cluster(partials_empty, lane);
      }
    }
    Output::template finish<Element>(params.output, call);
    ptx::let_next_kernel_start();
  }

  __syncthreads();
  // A CTA must not leave while its sums are on their way to others, or others have not yet arrived at its barriers. Who
  // comes here has received all that was sent to it.
  if (split > 1) ptx::cluster_sync_relaxed();
}

// The product stays here: plain GEMM.
struct LocalOutput {
  struct Params {
    void* out;
    const void* bias;
    int64_t row_stride;
  };
  struct Call {};
  FLUX_DEVICE static Call begin(const Params&) { return {}; }
  template <class Element>
  FLUX_DEVICE static void store(const Params& p, const Call&, int row, int column,
                                float (&f)[Exchange::kVector]) {
    if (p.bias != nullptr) add<Element>(*vector_at(p.bias, column), f);
    *const_cast<uint4*>(vector_at(p.out, row * p.row_stride + column)) = round<Element>(f);
  }
  template <class Element>
  FLUX_DEVICE static void finish(const Params&, const Call&) {}
  FLUX_DEVICE static void end(const Params&, const Call&) {}
};

// Products of all ranks are summed.
struct ExchangeOutput {
  using Params = ExchangeParams;
  using Call = sync::Call;
  FLUX_DEVICE static Call begin(const Params& p) { return sync::begin_call(p.symm); }
  template <class Element>
  FLUX_DEVICE static void store(const Params& p, const Call& call, int row, int column,
                                float (&f)[Exchange::kVector]) {
    exchange::contribute(p.symm, p.exchange, call, row, column, round<Element>(f));
  }
  template <class Element>
  FLUX_DEVICE static void finish(const Params& p, const Call& call) {
    gemm::finish<Element, kSwapAbMathThreads>(p, call, threadIdx.x);
  }
  FLUX_DEVICE static void end(const Params& p, const Call& call) { sync::end_call(p.symm, call.epoch); }
};

}  // namespace flux::gemm
