// The instances of a kernel template, by dtype, layout of the weight, and tile. For CUDA sources only.
#pragma once

#include "gemm/sm90/mainloop.cuh"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/tensor_map.h"

namespace flux::gemm {

// A Family describes a kernel template:
//
//   Params                                    argument of the kernels
//   kThreads, kTiles                          threads of a CTA, number of tile shapes
//   kStoresFloats                             whether results may be fp32
//   smem_bytes(tile)                          shared memory of a CTA
//   has(kMajor, tile)                         whether there are kernels
//   kKernel<Element, kMajor, kTile>           one of them
template <class Family>
class KernelTable {
 public:
  using Kernel = void (*)(typename Family::Params);

  // Kernels are loaded, and may use their shared memory. Defined in instances.cuh: callers do not compile kernels.
  static KernelTable& on_current_device();

  // dtype: of the result. Results in fp32, if there are any, come from the kernels for bf16.
  Kernel get(runtime::DType dtype, bool transpose_weight, int tile) const {
    const bool floats = Family::kStoresFloats && dtype == runtime::DType::kFloat32;
    const Kernel kernel = kernels_[!floats && !runtime::is_bfloat16(dtype)][transpose_weight][tile];
    FLUX_CHECK(kernel != nullptr, "no kernel for tile", tile, "transposed", transpose_weight);
    return kernel;
  }

  // Clusters that can be resident at once. The CTAs of a cluster share a group of SMs, and groups differ in size.
  int resident_clusters(int tile, int cluster_size) {
    FLUX_CHECK(cluster_size <= kMaxClusterSize, cluster_size);
    std::atomic<int>& known = resident_[runtime::current_device()][tile][cluster_size];
    int count = known.load(std::memory_order_relaxed);
    if (count == 0) {
      count = runtime::Launch(cluster_size, Family::kThreads, Family::smem_bytes(tile), nullptr)
                  .cluster(cluster_size)
                  .max_active_clusters(get(runtime::DType::kBFloat16, false, tile));
      known.store(count, std::memory_order_relaxed);
    }
    return count;
  }

 private:
  static constexpr int kMaxClusterSize = 8;
  static KernelTable& table();
  static runtime::Kernels loaded_;

  template <int... kTile>
  explicit KernelTable(std::integer_sequence<int, kTile...>) {
    (fill<kTile>(), ...);
  }

  template <int kTile>
  void fill() {
    static_assert(Family::smem_bytes(kTile) <= kSmemLimit);
    add<Major::K, kTile>();
    add<Major::MN, kTile>();
  }

  template <Major kMajor, int kTile>
  void add() {
    if constexpr (Family::has(kMajor, kTile)) {
      kernels_[0][kMajor == Major::MN][kTile] = Family::template kKernel<__nv_bfloat16, kMajor, kTile>;
      kernels_[1][kMajor == Major::MN][kTile] = Family::template kKernel<__half, kMajor, kTile>;
    }
  }

  void raise_limits() const {
    for (const auto& by_layout : kernels_) {
      for (const auto& by_tile : by_layout) {
        for (int tile = 0; tile < Family::kTiles; ++tile) {
          if (by_tile[tile] == nullptr) continue;
          FLUX_CUDA_CHECK(cudaFuncSetAttribute(by_tile[tile], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               Family::smem_bytes(tile)));
        }
      }
    }
  }

  Kernel kernels_[2][2][Family::kTiles] = {};
  std::atomic<int> resident_[runtime::kMaxDevices][Family::kTiles][kMaxClusterSize + 1] = {};
};

}  // namespace flux::gemm
