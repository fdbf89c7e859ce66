// Gradients of experts' weights: of each expert, [n, k] = grad^T * x over its rows, added to an fp32 matrix or stored
// rounded. A tile is 128 of n x block_n of k of one expert; its k-blocks are 64 rows. Both operands lie along the
// result's rows or columns, and wgmma takes them so. A pair of CTAs has the same columns, and shares the loads of x.
//
//   loader   warp 0, one thread     TMA loads of grad and x into the ring of stages
//   cleaner  warp 1                 zeroes the rows behind an expert's last one in its last k-block
//   storers  warps 2 and 3, one     one for each math warpgroup: stores its slabs by TMA, or adds them to memory
//            thread each
//   math     warpgroups 1 and 2     wgmma on 64 of n each; then each stages its half tile, slab by slab
//
// Rows of other experts must not even be multiplied by zero: they may be infinite. The last k-block of such a tile
// completes on a barrier that only the cleaner waits for, which completes that of the math warps: their loop is that of
// all GEMM kernels.

#include "gemm/sm90/launch.cuh"
#include "moe/moe.h"

namespace flux::moe {

constexpr int kWgradProducerRegisters = 80;
constexpr int kWgradMathRegisters = 208;
constexpr int kWgradCluster = 2;           // CTAs that share the loads of x
constexpr int kWgradRows = gemm::kPanelK;  // of a k-block
// Columns of tiles that are computed together: the clusters of a GPU then need about as many rows as columns.
constexpr int kWgradGroup = 8;

struct GroupedWgradParams {
  CUtensorMap grad;  // [rows, n], boxes of 64 columns and a k-block
  CUtensorMap x;     // [rows, k], boxes of 64 columns and half a k-block
  CUtensorMap out;   // [experts][n, k], boxes of 128 bytes and 64 rows
  const int32_t* offsets;
  int experts, n, k;
  bool prefetches;  // what is added to, while its tile is multiplied
};

// The shared memory of the GEMM kernels, followed by a barrier for each stage.
constexpr int wgrad_smem_bytes(const gemm::TileConfig& c) { return gemm::smem_bytes(c) + 8 * (c.stages + 1); }

struct WgradTile {
  int expert, row, column;  // of the result
  int first, rows;          // rows of the expert

  // An expert without rows gets one k-block of zeros.
  FLUX_DEVICE int blocks() const { return max(1, gemm::ceil_div(rows, kWgradRows)); }
  FLUX_DEVICE int last_rows() const { return rows - (blocks() - 1) * kWgradRows; }
};

// Calls use(tile) for each tile of this CTA. kAdds: experts without rows have none.
template <bool kAdds, int kBlockN, class Use>
FLUX_DEVICE void for_each_wgrad_tile(const GroupedWgradParams& p, int cta, const Use& use) {
  const int pairs = gemm::ceil_div(p.n, kWgradCluster * gemm::kBlockM);
  const int columns = gemm::ceil_div(p.k, kBlockN);
  const int last = p.experts * pairs * columns;
#pragma unroll 1
  for (int index = blockIdx.x / kWgradCluster; index < last; index += gridDim.x / kWgradCluster) {
    const int expert = index / (pairs * columns), of_expert = index - expert * pairs * columns;
    const int first = __ldg(p.offsets + expert), rows = __ldg(p.offsets + expert + 1) - first;
    if (kAdds && rows == 0) continue;
    const int group = of_expert / (pairs * kWgradGroup), of_group = of_expert - group * pairs * kWgradGroup;
    const int width = min(kWgradGroup, columns - group * kWgradGroup);
    const int pair = of_group / width, column = group * kWgradGroup + of_group - pair * width;
    use(WgradTile{expert, (pair * kWgradCluster + cta) * gemm::kBlockM, column * kBlockN, first, rows});
  }
}

// Stages 32 columns of fp32 sums for a TMA copy with the 128-byte swizzle. d: 16 accumulators of a thread. Lanes of odd
// rows store their blocks of eight columns in another order, so that half a warp finds all banks.
FLUX_DEVICE void stage_floats(uint32_t slab, int thread, const float* d) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const bool odd = row % 2 != 0;
  const int swizzle = row % 8, vector = (lane % 4 / 2 ^ swizzle) & 1;
  const uint32_t to = slab + row * 128 + vector * 16 + lane % 2 * 8;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int stored = block ^ (odd ? 2 : 0);
    const uint32_t at = to + (stored ^ swizzle / 2) * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows, and the rows eight below
      const int even_at = block * 4 + half * 2, odd_at = (block ^ 2) * 4 + half * 2;
      ptx::store_shared_pair(at + half * 8 * 128, odd ? d[odd_at] : d[even_at],
                             odd ? d[odd_at + 1] : d[even_at + 1]);
    }
  }
}

template <class Element, bool kAdds, int kConfig>
__global__ void __launch_bounds__(gemm::kNumThreads, 1)
    sm90_grouped_wgrad(const __grid_constant__ GroupedWgradParams params) {
  constexpr gemm::TileConfig kTile = gemm::kTileConfigs[kConfig];
  constexpr int kBlockN = kTile.block_n;
  constexpr int kPanels = (gemm::kBlockM + kBlockN) / 64;  // of a stage; those of grad come first
  constexpr int kSlabColumns = kAdds ? 32 : 64;            // 128 bytes
  static_assert(kTile.slab_n == 64 && kBlockN % 64 == 0 && wgrad_smem_bytes(kTile) <= gemm::kSmemLimit);
  using Shared = gemm::Smem<kConfig>;

  extern __shared__ uint8_t raw_smem[];
  const Shared smem(raw_smem);
  const auto landed = [&](int stage) { return ((smem.end() + 7) & ~7u) + stage * 8; };
  const int cta = static_cast<int>(ptx::cluster_cta_rank());
  const int warp = ptx::warp();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.grad);
    ptx::prefetch_tensor_map(&params.x);
    ptx::prefetch_tensor_map(&params.out);
    for (int stage = 0; stage < kTile.stages; ++stage) ptx::mbarrier_init(landed(stage), 1);
    smem.init(kWgradCluster, /*sharers=*/kWgradCluster, /*loaders=*/1);
  }
  ptx::cluster_sync_relaxed();  // barriers must be initialised before a partner arrives on them
  __syncthreads();

  if (warp < 4) {
    ptx::setmaxnreg_dec<kWgradProducerRegisters>();
    if (warp == 0) {
      if (ptx::elect_one()) {
        typename Shared::Stages ring;
        for_each_wgrad_tile<kAdds, kBlockN>(params, cta, [&](const WgradTile& tile) {
          const int blocks = tile.blocks();
          const int to_clean = tile.last_rows() < kWgradRows ? blocks - 1 : -1;
#pragma unroll 1
          for (int block = 0; block < blocks; ++block, ring.advance()) {
            ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
            const uint32_t bar = block == to_clean ? landed(ring.index) : smem.full(ring.index);
            const int row = tile.first + block * kWgradRows;
            ptx::mbarrier_arrive_expect_tx(bar, Shared::kStageBytes);
#pragma unroll
            for (int panel = 0; panel < gemm::kBlockM / 64; ++panel) {
              ptx::tma_load_2d(&params.grad, smem.a(ring.index) + panel * gemm::kPanelBytes, bar,
                               tile.row + panel * 64, row);
            }
            gemm::load_b<gemm::Major::MN, kBlockN>({&params.x, kBlockN}, smem.b(ring.index), bar, row,
                                                   tile.column, cta, /*shared=*/true);
          }
        });
        // The partner's last arrivals: they must not meet the barriers of another launch.
        for (int stage = 0; stage < kTile.stages; ++stage, ring.advance())
          ptx::mbarrier_wait(smem.empty(ring.index), ring.phase ^ 1);
      }
    } else if (warp == 1) {
      int stage = 0;
      uint32_t phases = 0;  // a bit for each stage
      for_each_wgrad_tile<kAdds, kBlockN>(params, cta, [&](const WgradTile& tile) {
        const int blocks = tile.blocks(), valid = tile.last_rows();
        const int last = (stage + blocks - 1) % kTile.stages;
        stage = (last + 1) % kTile.stages;
        if (valid == kWgradRows) return;
        ptx::mbarrier_wait(landed(last), phases >> last & 1);
        phases ^= 1u << last;
        // A row is 128 bytes of each panel, wherever the swizzle has put its elements.
        const uint32_t end = smem.a(last) + gemm::kPanelBytes;
        for (uint32_t at = smem.a(last) + valid * 128 + ptx::lane() * 16; at < end; at += 32 * 16) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel)
            ptx::store_shared_v4(at + panel * gemm::kPanelBytes, 0u, 0u, 0u, 0u);
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        if (ptx::lane() == 0) ptx::mbarrier_arrive(smem.full(last));
      });
    } else if (ptx::elect_one()) {
      const int warpgroup = warp - 2;
      gemm::SlabRing<Shared> slabs;
      for_each_wgrad_tile<kAdds, kBlockN>(params, cta, [&](const WgradTile& tile) {
        const int row = tile.row + warpgroup * 64;
        if (kAdds && params.prefetches && row < params.n) {
          for (int column = tile.column; column < min(tile.column + kBlockN, params.k);
               column += kSlabColumns)
            ptx::tma_prefetch_3d(&params.out, column, row, tile.expert);
        }
        for (int offset = 0; offset < kBlockN; offset += kSlabColumns) {
          const uint32_t slab = slabs.wait_full(smem, warpgroup);
          const int column = tile.column + offset;
          if (row < params.n && column < params.k) {
            if constexpr (kAdds) {
              ptx::tma_add_3d(&params.out, slab, column, row, tile.expert);
            } else {
              ptx::tma_store_3d(&params.out, slab, column, row, tile.expert);
            }
          }
          slabs.commit(smem, warpgroup);
        }
        slabs.drain(smem, warpgroup);  // the writes are complete when the launch ends
      });
    }
  } else {
    ptx::setmaxnreg_inc<kWgradMathRegisters>();
    constexpr int kAccumulators = kBlockN / 2;
    using Mma = gemm::Wgmma<Element, kBlockN, gemm::Major::MN, gemm::Major::MN>;
    const int warpgroup = warp / 4 - 1;
    const int thread = threadIdx.x % 128;
    float d[kAccumulators];
    typename Shared::Stages ring;
    typename Shared::Slabs slabs;
    const auto full = [&](int stage) { return smem.full(stage); };
    const auto operands = [&](int stage, int) {
      using gemm::Major;
      return gemm::Operands{gemm::make_b_descriptor<Major::MN>(smem.a(stage) + warpgroup * gemm::kPanelBytes),
                            gemm::make_b_descriptor<Major::MN>(smem.b(stage))};
    };
    const auto release = [&](int stage) {
      if (ptx::lane() < kWgradCluster) ptx::mbarrier_arrive_cluster(smem.empty(stage), ptx::lane());
    };
    for_each_wgrad_tile<kAdds, kBlockN>(params, cta, [&](const WgradTile& tile) {
      constexpr int kStep = gemm::kBStepBytes<gemm::Major::MN>;
      gemm::multiply<Mma, kStep, kStep>(ring, tile.blocks(), d, full, operands, release);
#pragma unroll
      for (int column = 0; column < kBlockN; column += kSlabColumns) {
        const uint32_t slab = smem.slab(warpgroup, slabs.index);
        ptx::mbarrier_wait(smem.slab_empty(warpgroup, slabs.index), slabs.phase ^ 1);
        if constexpr (kAdds) {
          stage_floats(slab, thread, &d[column / 2]);
        } else {
#pragma unroll
          for (int chunk = 0; chunk < kSlabColumns / gemm::kChunkN; ++chunk) {
            gemm::stage_rows<64>(slab, chunk, thread,
                                 gemm::round<Element>(&d[column / 2 + chunk * gemm::kChunkAccumulators]));
          }
        }
        ptx::fence_proxy_async_smem();
        ptx::mbarrier_arrive(smem.slab_full(warpgroup, slabs.index));
        slabs.advance();
      }
    });
  }

  __syncthreads();
  ptx::cluster_sync_relaxed();  // a CTA must not exit while its partner may arrive on its barriers
}

namespace {

// Of kTileConfigs: few slabs and four stages, or three stages and slabs for more than half a tile of fp32.
constexpr bool is_wgrad_config(int config) { return config == 0 || config == 1; }

template <bool kAdds>
struct WgradFamily {
  using Params = GroupedWgradParams;
  static constexpr int kThreads = gemm::kNumThreads, kTiles = gemm::kNumTileConfigs;
  static constexpr bool kStoresFloats = false;
  static constexpr int smem_bytes(int tile) {
    return is_wgrad_config(tile) ? wgrad_smem_bytes(gemm::kTileConfigs[tile]) : 0;
  }

  static constexpr bool has(gemm::Major layout, int tile) {
    return layout == gemm::Major::K && is_wgrad_config(tile);  // there is one layout
  }
  template <class Element, gemm::Major, int kTile>
  static constexpr auto kKernel = sm90_grouped_wgrad<Element, kAdds, kTile>;
};

template <bool kAdds>
void launch(const GroupedWgradArgs& args, cudaStream_t stream) {
  const runtime::Matrix& first = args.out.first;
  FLUX_CHECK(args.grad.rows == args.x.rows && args.x.rows > 0, args.grad.rows, args.x.rows);
  FLUX_CHECK(first.rows == args.grad.columns && first.columns == args.x.columns, first.rows, first.columns);
  FLUX_CHECK(first.rows % 8 == 0 && first.columns % 8 == 0 && args.out.count > 0, first.rows, first.columns);
  const int config = args.choice % kWgradPrefetches;
  FLUX_CHECK(is_wgrad_config(config), args.choice);

  const GroupedWgradParams params = {
      .grad = runtime::make_tensor_map(args.grad, args.dtype, 64, kWgradRows),
      .x = runtime::make_tensor_map(args.x, args.dtype, 64, kWgradRows / kWgradCluster),
      .out = runtime::make_tensor_map(args.out, kAdds ? runtime::DType::kFloat32 : args.dtype,
                                      kAdds ? 32 : 64, 64),
      .offsets = args.offsets,
      .experts = static_cast<int>(args.out.count),
      .n = static_cast<int>(first.rows),
      .k = static_cast<int>(first.columns),
      .prefetches = args.choice >= kWgradPrefetches};
  auto& kernels = gemm::KernelTable<WgradFamily<kAdds>>::on_current_device();
  const int clusters = std::min(kernels.resident_clusters(config, kWgradCluster),
                                runtime::usable_sms(args.num_sms) / kWgradCluster);
  runtime::Launch(std::max(1, clusters) * kWgradCluster, gemm::kNumThreads,
                  WgradFamily<kAdds>::smem_bytes(config), stream)
      .cluster(kWgradCluster)
      .run(kernels.get(args.dtype, /*transpose_weight=*/false, config), params);
}

}  // namespace

void grouped_wgrad(const GroupedWgradArgs& args, cudaStream_t stream) {
  args.adds ? launch<true>(args, stream) : launch<false>(args, stream);
}

}  // namespace flux::moe
