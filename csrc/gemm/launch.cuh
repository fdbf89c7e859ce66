// Launches the GEMM kernel for any Store: picks the instantiation, encodes the tensor maps, configures clusters.
#pragma once

#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/select.h"
#include "gemm/sm90_gemm.cuh"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm {

template <class Store>
using Kernel = void (*)(const GemmParams<Store>);

// Kernels by [dtype][transpose_weight][config]; null if the tile shape has no such kernel.
template <class Store>
struct KernelTable {
  Kernel<Store> kernels[2][2][kNumTileConfigs] = {};

  KernelTable() {
#define FLUX_FILL_TILE(id, ...) fill<id>();
    FLUX_FOR_EACH_TILE(FLUX_FILL_TILE)
#undef FLUX_FILL_TILE
  }

  Kernel<Store> get(runtime::DType dtype, bool transpose_weight, int config) const {
    return kernels[static_cast<int>(dtype)][transpose_weight][config];
  }

 private:
  template <int kConfig>
  void fill() {
    static_assert(kMaxPeers + 1 == runtime::kMaxWorldSize);
    static_assert(smem_bytes(kTileConfigs[kConfig]) <= kSmemLimit);
    constexpr bool kExists = (!Store::kSplitsK || supports_split(kTileConfigs[kConfig])) &&
                             (!Store::kExchanges || supports_exchange(kTileConfigs[kConfig]));
    if constexpr (kExists) {
      kernels[0][0][kConfig] = sm90_gemm<__nv_bfloat16, Major::K, kConfig, Store>;
      kernels[1][0][kConfig] = sm90_gemm<__half, Major::K, kConfig, Store>;
    }
    if constexpr (kExists && supports_transposed_weight(kTileConfigs[kConfig])) {
      kernels[0][1][kConfig] = sm90_gemm<__nv_bfloat16, Major::MN, kConfig, Store>;
      kernels[1][1][kConfig] = sm90_gemm<__half, Major::MN, kConfig, Store>;
    }
  }
};

template <class Store>
const KernelTable<Store>& kernel_table() {
  static const KernelTable<Store> table;
  return table;
}

// Raises each kernel's shared-memory limit on the current device, which also loads its code. Runs once per device.
template <class Store>
void prepare_kernels() {
  static runtime::OncePerDevice once;
  once([] {
    for (const auto& by_layout : kernel_table<Store>().kernels) {
      for (const auto& by_config : by_layout) {
        for (int config = 0; config < kNumTileConfigs; ++config) {
          if (by_config[config] == nullptr) continue;
          FLUX_CUDA_CHECK(cudaFuncSetAttribute(by_config[config], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               smem_bytes(kTileConfigs[config])));
        }
      }
    }
  });
}

// Rows of the TMA boxes of an operand's last tile, or 0 if that tile is full. Each CTA that shares the operand
// loads one of `boxes` boxes. Each box must start at a multiple of the swizzle's 8 rows.
inline int last_box(int rows, int tile_rows, int boxes) {
  const int left = rows % tile_rows;
  return boxes == 1 ? left : ceil_div(left, 8 * boxes) * 8;
}

template <class Store>
void launch(const GemmArgs& args, const Choice& choice, const TileOrder& order, int rows_per_shard,
            int num_sms, const typename Store::Params& store, cudaStream_t stream, int min_ctas = 0) {
  const TileConfig& tile = kTileConfigs[choice.config];
  const Kernel<Store> kernel = kernel_table<Store>().get(args.dtype, args.transpose_weight, choice.config);
  prepare_kernels<Store>();
  FLUX_CHECK(kernel != nullptr, "no kernel for tile", choice.config, "transposed", args.transpose_weight);

  GemmParams<Store> params;
  params.a = make_tensor_map(args.x, args.dtype, kBlockK, kBlockM / order.cluster_n());
  params.last_rows = last_box(rows_per_shard, kBlockM, order.cluster_n());
  if (params.last_rows > 0) params.last_a = make_tensor_map(args.x, args.dtype, kBlockK, params.last_rows);
  if (args.transpose_weight) {
    params.b = params.last_b = make_tensor_map(args.weight, args.dtype, 64, kBlockK / order.cluster_m());
    params.last_columns = ceil_div(args.n() % tile.block_n, 64) * 64;
  } else {
    params.b = make_tensor_map(args.weight, args.dtype, kBlockK, tile.block_n / order.cluster_m());
    params.last_columns = last_box(args.n(), tile.block_n, order.cluster_m());
    if (params.last_columns > 0) {
      params.last_b = make_tensor_map(args.weight, args.dtype, kBlockK, params.last_columns);
    }
  }
  params.d = make_sharded_tensor_map(args.out, args.dtype, panel_n(tile), 64,
                                     static_cast<int>(args.out.rows / rows_per_shard));
  params.order = order;
  params.rows_per_shard = rows_per_shard;
  params.k_blocks = (args.k() + kBlockK - 1) / kBlockK;
  params.n = args.n();
  params.bias = args.bias;
  params.store = store;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = order.cluster_size();
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1] = runtime::early_start();
  // A kernel that waits for peers must not occupy SMs that the awaited work needs.
  constexpr bool kWaitsForPeers = Store::kGathers || Store::kReduces;
  cudaLaunchConfig_t config = {};
  const int wanted = std::max(order.num_clusters(), min_ctas / order.cluster_size());
  // Clusters that split K have one tile each; a cluster that is not resident starts when another one ends.
  const int room = Store::kSplitsK ? wanted : num_sms / order.cluster_size();
  config.gridDim = std::min(room, wanted) * order.cluster_size();
  config.blockDim = kNumThreads;
  config.dynamicSmemBytes = smem_bytes(tile);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !kWaitsForPeers && runtime::may_start_early(num_sms) ? 2 : 1;
  FLUX_CHECK(num_sms >= order.cluster_size(), num_sms, order.cluster_size());
  FLUX_CHECK(Store::kSplitsK == (order.split() > 1), "not the kernel for", order.split(), "parts of K");
  FLUX_CHECK(params.k_blocks >= order.split(), params.k_blocks, order.split());
  FLUX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace flux::gemm
