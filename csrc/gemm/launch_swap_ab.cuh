// Launches the swap-AB kernel for any Output.
#pragma once

#include <algorithm>
#include <atomic>

#include "gemm/gemm.h"
#include "gemm/select.h"
#include "gemm/sm90_gemm_swap_ab.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace flux::gemm {

template <class Output>
using SwapAbKernel = void (*)(const SwapAbParams<Output>);

template <class Output>
class SwapAbKernels {
 public:
  // Raises each kernel's shared-memory limit on the current device, which also loads its code. Runs once per device.
  static SwapAbKernels& on_current_device() {
    constexpr int kMaxDevices = 64;
    static SwapAbKernels devices[kMaxDevices];
    int device = 0;
    FLUX_CUDA_CHECK(cudaGetDevice(&device));
    FLUX_CHECK(device < kMaxDevices, device);
    devices[device].prepare();
    return devices[device];
  }

  SwapAbKernel<Output> get(runtime::DType dtype, bool transpose_weight, int config) const {
    return kernels_[static_cast<int>(dtype)][transpose_weight][config];
  }

  // Clusters that can be resident at once: CTAs of a cluster share a group of SMs, and groups differ in size.
  int resident_clusters(SwapAbKernel<Output> kernel, const runtime::Launch& launch, int config,
                        int cluster_size) {
    std::atomic<int>& known = resident_[config][cluster_size];
    int count = known.load(std::memory_order_relaxed);
    if (count == 0) {
      count = launch.max_active_clusters(kernel);
      known.store(count, std::memory_order_relaxed);
    }
    return count;
  }

 private:
  void prepare() {
    if (prepared_.load(std::memory_order_acquire)) return;
#define FLUX_FILL_SWAP_AB(id, ...) fill<id>();
    FLUX_FOR_EACH_SWAP_AB(FLUX_FILL_SWAP_AB)
#undef FLUX_FILL_SWAP_AB
    prepared_.store(true, std::memory_order_release);
  }

  template <int kConfig>
  void fill() {
    static_assert(swap_ab_smem_bytes(kSwapAbConfigs[kConfig]) + 64 <= kSmemLimit);
    kernels_[0][0][kConfig] = sm90_gemm_swap_ab<__nv_bfloat16, Major::K, kConfig, Output>;
    kernels_[0][1][kConfig] = sm90_gemm_swap_ab<__nv_bfloat16, Major::MN, kConfig, Output>;
    kernels_[1][0][kConfig] = sm90_gemm_swap_ab<__half, Major::K, kConfig, Output>;
    kernels_[1][1][kConfig] = sm90_gemm_swap_ab<__half, Major::MN, kConfig, Output>;
    for (const auto& by_layout : kernels_) {
      for (const auto& by_config : by_layout) {
        FLUX_CUDA_CHECK(cudaFuncSetAttribute(by_config[kConfig], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             swap_ab_smem_bytes(kSwapAbConfigs[kConfig])));
      }
    }
  }

  SwapAbKernel<Output> kernels_[2][2][kNumSwapAbConfigs] = {};
  std::atomic<int> resident_[kNumSwapAbConfigs][kMaxSplit + 1] = {};
  std::atomic<bool> prepared_{false};
};

template <class Output>
void launch_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms,
                    const typename Output::Params& output, cudaStream_t stream) {
  const SwapAbConfig& tile = kSwapAbConfigs[choice.config - kFirstSwapAb];
  auto& kernels = SwapAbKernels<Output>::on_current_device();
  const SwapAbKernel<Output> kernel = kernels.get(args.dtype, args.transpose_weight, tile.id);

  SwapAbParams<Output> params;
  const int sharers = choice.group_m, cluster_size = choice.split * sharers;
  FLUX_CHECK(sharers == 1 || (sharers == 2 && choice.split == 1), sharers, choice.split);
  params.weight = args.transpose_weight
                      ? make_tensor_map(args.weight, args.dtype, 64, kBlockK / sharers)
                      : make_tensor_map(args.weight, args.dtype, kBlockK, kSwapAbN / sharers);
  const int last_rows = args.m() % tile.rows;
  params.last_x = make_tensor_map(args.x, args.dtype, kBlockK, last_rows > 0 ? last_rows : tile.rows);
  const bool alike = last_rows == 0 || args.m() < tile.rows;  // the common case: one tensor map fewer
  params.x = alike ? params.last_x : make_tensor_map(args.x, args.dtype, kBlockK, tile.rows);
  params.m = args.m();
  params.n = args.n();
  params.stage_blocks = swap_ab_stage_blocks(tile, args.k());
  params.shares_weight = sharers > 1;
  params.output = output;
  FLUX_CHECK(choice.split <= params.stage_blocks, choice.split, params.stage_blocks);

  runtime::Launch launch(cluster_size, kSwapAbThreads, swap_ab_smem_bytes(tile), stream);
  launch.cluster(cluster_size);
  const int resident = kernels.resident_clusters(kernel, launch, tile.id, cluster_size);
  const int num_tiles = ceil_div(args.m(), tile.rows * sharers) * ceil_div(args.n(), kSwapAbN);
  const int clusters = std::min({num_tiles, resident, num_sms / cluster_size});
  FLUX_CHECK(clusters > 0, num_tiles, resident, num_sms, cluster_size);
  launch.ctas(clusters * cluster_size).early_start(runtime::may_start_early(num_sms)).run(kernel, params);
}

}  // namespace flux::gemm
