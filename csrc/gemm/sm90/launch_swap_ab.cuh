// Launches the swap-AB kernel for any Output.
#pragma once

#include "gemm/sm90/gemm_swap_ab.cuh"
#include "gemm/sm90/launch.cuh"

namespace flux::gemm {

template <class Output, bool kFp8>
struct SwapAbFamily {
  using Params = SwapAbParamsFor<kFp8, Output>;
  static constexpr int kThreads = kSwapAbThreads, kTiles = kNumSwapAbConfigs;
  static constexpr bool kStoresFloats = kFp8;
  static constexpr int smem_bytes(int tile) { return swap_ab_smem_bytes(kSwapAbConfigs[tile]); }

  static constexpr bool has(Major major, int tile) {
    const SwapAbConfig& c = kSwapAbConfigs[tile];
    return c.is_fp8 == kFp8 && (!kFp8 || major == Major::K) && (!Output::kSums || supports_sum(c));
  }
  template <class Element, Major kMajorW, int kTile>
  static constexpr auto kKernel = sm90_gemm_swap_ab<Element, kMajorW, kTile, Output>;
};

template <class Output, bool kFp8>
void launch_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms,
                    const typename Output::Params& output, cudaStream_t stream) {
  const SwapAbConfig& tile = kSwapAbConfigs[choice.config - kFirstSwapAb];
  auto& kernels = kernels_of<SwapAbFamily<Output, kFp8>>();
  const int block_k = tile.block_k();
  FLUX_CHECK(args.is_fp8() == kFp8 && tile.is_fp8 == kFp8, kFp8, tile.is_fp8);

  SwapAbParamsFor<kFp8, Output> params;
  const int sharers = choice.sharers, cluster_size = choice.split * sharers;
  FLUX_CHECK(sharers == 1 || (sharers == 2 && tile.in_pairs && choice.split == 1), sharers, choice.split);
  params.weight = args.transpose_weight ? make_tensor_map(args.weight, args.dtype, 64, block_k / sharers)
                                        : make_tensor_map(args.weight, args.weight_dtype(), block_k,
                                                          args.swiglu ? kSwapAbN / 2 : kSwapAbN / sharers);
  const int last_rows = args.m() % tile.rows;
  params.last_x = make_tensor_map(args.x, args.x_dtype(), block_k, last_rows > 0 ? last_rows : tile.rows);
  const bool alike = last_rows == 0 || args.m() < tile.rows;  // the common case: one tensor map fewer
  params.x = alike ? params.last_x : make_tensor_map(args.x, args.x_dtype(), block_k, tile.rows);
  params.m = args.m();
  params.n = args.n();
  params.stage_blocks = swap_ab_stage_blocks(tile, args.k());
  params.shares_weight = sharers > 1;
  params.weight_is_constant = args.weight_is_constant;
  params.gate_rows = args.swiglu ? args.n() / 2 : 0;
  FLUX_CHECK(!args.swiglu || (Output::kGates && !kFp8 && !args.transpose_weight && choice.split == 1 &&
                              args.bias == nullptr),
             choice.split);
  params.output = output;
  if constexpr (kFp8) {
    params.scales = scale_params(args, tile.rows);
    params.k_blocks = ceil_div(args.k(), kScaleBlock);
  }
  FLUX_CHECK(choice.split <= params.stage_blocks, choice.split, params.stage_blocks);

  const int resident = kernels.resident_clusters(tile.id, cluster_size);
  const int num_tiles = ceil_div(args.m(), tile.rows * sharers) * ceil_div(args.n(), kSwapAbN);
  const int clusters = std::min({num_tiles, resident, num_sms / cluster_size});
  FLUX_CHECK(clusters > 0, num_tiles, resident, num_sms, cluster_size);
  runtime::Launch(clusters * cluster_size, kSwapAbThreads, swap_ab_smem_bytes(tile), stream)
      .cluster(cluster_size)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernels.get(args.dtype, args.transpose_weight, tile.id), params);
}

}  // namespace flux::gemm
