#include <algorithm>

#include "gemm/sm90/instances.cuh"
#include "moe/moe.h"
#include "moe/sm90_grouped_wgrad.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch.h"

namespace flux::moe {
namespace {

// Of kTileConfigs: few slabs and four stages, or three stages and slabs for more than half a tile of fp32.
constexpr bool is_wgrad_config(int config) { return config == 0 || config == 1; }

template <bool kAdds>
struct WgradFamily {
  using Params = GroupedWgradParams;
  static constexpr int kThreads = kWgradThreads, kTiles = gemm::kNumTileConfigs;
  static constexpr bool kStoresFloats = false;
  static constexpr int smem_bytes(int tile) {
    return is_wgrad_config(tile) ? wgrad_smem_bytes(gemm::kTileConfigs[tile]) : 0;
  }

  // There is one layout of operands: that of index 0 of the table.
  template <class Element, gemm::Major kLayout, int kTile>
  static constexpr auto kernel() -> void (*)(Params) {
    if constexpr (kLayout == gemm::Major::MN || !is_wgrad_config(kTile)) {
      return nullptr;
    } else {
      return sm90_grouped_wgrad<Element, kAdds, kTile>;
    }
  }
};

template <bool kAdds>
gemm::KernelTable<WgradFamily<kAdds>>& wgrad_kernels() {
  return gemm::KernelTable<WgradFamily<kAdds>>::on_current_device();
}

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
  auto& kernels = wgrad_kernels<kAdds>();
  const int clusters = std::min(kernels.resident_clusters(config, kWgradCluster),
                                runtime::usable_sms(args.num_sms) / kWgradCluster);
  runtime::Launch(std::max(1, clusters) * kWgradCluster, kWgradThreads,
                  WgradFamily<kAdds>::smem_bytes(config), stream)
      .cluster(kWgradCluster)
      .run(kernels.get(args.dtype, /*transpose_weight=*/false, config), params);
}

}  // namespace

void grouped_wgrad(const GroupedWgradArgs& args, cudaStream_t stream) {
  args.adds ? launch<true>(args, stream) : launch<false>(args, stream);
}

}  // namespace flux::moe
