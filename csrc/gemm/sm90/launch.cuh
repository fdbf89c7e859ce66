// Launches the GEMM kernel for any Store: picks the instance, encodes the tensor maps, configures clusters.
#pragma once

#include <algorithm>

#include "gemm/sm90/gemm.cuh"
#include "operators.h"

namespace flux::gemm {

// --- the instances of a kernel template, by dtype, layout of the weight, and tile ---

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

  // Kernels are loaded, and may use their shared memory.
  static KernelTable& on_current_device() {
    loaded_.load();
    return table();
  }

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
  static KernelTable& table() {
    static KernelTable table{std::make_integer_sequence<int, Family::kTiles>()};
    return table;
  }
  static inline runtime::Kernels loaded_{[] { table().raise_limits(); }};

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

// Of the current device. Defined where FLUX_KERNELS(Family) stands, which compiles the kernels (csrc/instances: in
// parallel): callers do not.
template <class Family>
KernelTable<Family>& kernels_of();

#define FLUX_KERNELS(...)                                                       \
  template <>                                                                   \
  flux::gemm::KernelTable<__VA_ARGS__>& flux::gemm::kernels_of<__VA_ARGS__>() { \
    return KernelTable<__VA_ARGS__>::on_current_device();                       \
  }

// --- what launches of all GEMM kernels share ---

// The problem of a plain GEMM.
inline Problem problem_of(const GemmArgs& args, int num_sms) {
  const Scales& s = args.scales;
  return {.m = args.m(),
          .n = args.n(),
          .k = args.k(),
          .transpose_weight = args.transpose_weight,
          .num_sms = num_sms,
          .swiglu = args.swiglu,
          .operand_bytes = args.is_fp8() ? 1 : 2,
          .promotes = args.is_fp8() && (s.blocks || !s.fast || s.x_dtype == runtime::DType::kE5M2),
          .block_scales = s.blocks};
}

// box_rows: rows of x whose block scales are loaded together.
inline ScaleParams scale_params(const GemmArgs& args, int box_rows) {
  const Scales& s = args.scales;
  ScaleParams params = {};
  params.x = s.x;
  params.weight = s.weight;
  params.x_step = s.x_step;
  params.weight_step = s.weight_step;
  params.blocks = s.blocks;
  params.e5m2 = s.x_dtype == runtime::DType::kE5M2;
  if (s.blocks) {
    FLUX_CHECK(args.k() % kScaleBlock == 0, args.k());
    params.x_blocks =
        runtime::make_vector_map({s.x, args.k() / kScaleBlock, args.x.rows, s.x_stride}, box_rows);
  }
  if (args.dtype == runtime::DType::kFloat32) {
    params.sums = static_cast<float*>(const_cast<void*>(args.out.data));
    params.sums_stride = args.out.row_stride;
  }
  return params;
}

// --- the kernel for any Store ---

template <class Store, bool kFp8>
struct GemmFamily {
  using Params = GemmParamsFor<kFp8, Store>;
  static constexpr int kThreads = kNumThreads, kTiles = kNumTileConfigs;
  static constexpr bool kStoresFloats = kFp8 && !Store::kReduces;
  static constexpr int smem_bytes(int tile) { return gemm::smem_bytes(kTileConfigs[tile]); }

  // Tiles travel, or rows of x. With split K every CTA of a cluster would add the peers' contributions.
  static_assert(!(Store::kReduces && (Store::kGathers || Store::kSplitsK)));
  static constexpr bool has(Major major, int tile) {
    const TileConfig& c = kTileConfigs[tile];
    return c.is_fp8() == kFp8 && (!Store::kSplitsK || supports_split(c)) &&
           supports(c, Store::kReduces, Store::kGathers) &&
           (major == Major::K || supports_transposed_weight(c));
  }
  template <class Element, Major kMajorB, int kTile>
  static constexpr auto kKernel = sm90_gemm<Element, kMajorB, kTile, Store>;
};

// Rows of the TMA boxes of an operand's last tile, or 0 if that tile is full. Each CTA that shares the operand
// loads one of `boxes` boxes. Each box must start at a multiple of the swizzle's 8 rows.
inline int last_box(int rows, int tile_rows, int boxes) {
  const int left = rows % tile_rows;
  return boxes == 1 ? left : ceil_div(left, 8 * boxes) * 8;
}

template <class Store, bool kFp8>
void launch_as(const GemmArgs& args, const Choice& choice, const TileOrder& order, int rows_per_shard,
               int num_sms, const typename Store::Params& store, cudaStream_t stream, int min_ctas = 0) {
  const TileConfig& tile = kTileConfigs[choice.config];
  const auto kernel =
      kernels_of<GemmFamily<Store, kFp8>>().get(args.dtype, args.transpose_weight, choice.config);
  FLUX_CHECK(args.is_fp8() == kFp8, kFp8);

  GemmParamsFor<kFp8, Store> params;
  const int block_k = tile.block_k();
  params.a = make_tensor_map(args.x, args.x_dtype(), block_k, kBlockM / order.cluster_n());
  params.last_rows = last_box(rows_per_shard, kBlockM, order.cluster_n());
  if (params.last_rows > 0)
    params.last_a = make_tensor_map(args.x, args.x_dtype(), block_k, params.last_rows);
  if (args.transpose_weight) {
    params.b = params.last_b = make_tensor_map(args.weight, args.dtype, 64, block_k / order.cluster_m());
    params.last_columns = ceil_div(args.n() % tile.block_n, 64) * 64;
  } else {
    params.b = make_tensor_map(args.weight, args.weight_dtype(), block_k, tile.block_n / order.cluster_m());
    params.last_columns = last_box(args.n(), tile.block_n, order.cluster_m());
    if (params.last_columns > 0)
      params.last_b = make_tensor_map(args.weight, args.weight_dtype(), block_k, params.last_columns);
  }
  if constexpr (kFp8) {
    params.scales = scale_params(args, kScaleBoxRows);
    FLUX_CHECK(tile.promotes() || !(params.scales.blocks || params.scales.e5m2), choice.config);
  }
  params.d =
      args.dtype == runtime::DType::kFloat32
          ? params.a
          : make_tensor_map(runtime::shards_of(args.out, static_cast<int>(args.out.rows / rows_per_shard)),
                            args.dtype, panel_n(tile), 64);
  params.order = order;
  params.rows_per_shard = rows_per_shard;
  params.k_blocks = ceil_div(args.k(), block_k);
  params.n = args.n();
  params.bias = args.bias;
  params.store = store;

  // A kernel that waits for peers must not occupy SMs that the awaited work needs.
  constexpr bool kWaitsForPeers = Store::kGathers || Store::kReduces;
  const int wanted = std::max(order.num_clusters(), min_ctas / order.cluster_size());
  // Clusters that split K have one tile each; a cluster that is not resident starts when another one ends.
  const int room = Store::kSplitsK ? wanted : num_sms / order.cluster_size();
  FLUX_CHECK(num_sms >= order.cluster_size(), num_sms, order.cluster_size());
  FLUX_CHECK(Store::kSplitsK == (order.split() > 1), "not the kernel for", order.split(), "parts of K");
  FLUX_CHECK(params.k_blocks >= order.split(), params.k_blocks, order.split());
  runtime::Launch(std::min(room, wanted) * order.cluster_size(), kNumThreads, smem_bytes(tile), stream)
      .cluster(order.cluster_size())
      .early_start(!kWaitsForPeers && runtime::may_start_early(num_sms))
      .run(kernel, params);
}

template <class Store>
void launch(const GemmArgs& args, const Choice& choice, const TileOrder& order, int rows_per_shard,
            int num_sms, const typename Store::Params& store, cudaStream_t stream) {
  (args.is_fp8() ? launch_as<Store, true> : launch_as<Store, false>)(args, choice, order, rows_per_shard,
                                                                     num_sms, store, stream, /*min_ctas=*/0);
}

}  // namespace flux::gemm
