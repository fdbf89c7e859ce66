#include <algorithm>
#include <cmath>

#include "gemm/select.h"
#include "moe/grouped_gemm.h"
#include "moe/sm90_grouped_gemm.cuh"
#include "runtime/check.h"
#include "runtime/device.h"

namespace flux::moe {
namespace {

// Rows of one matrix, in an order of their own or as they are.
struct IndexedRows {
  struct Params {
    const char* x;
    const int32_t* rows;
    int64_t row_bytes;
  };
  FLUX_DEVICE static int place(const Params& p, int row) { return p.rows == nullptr ? row : p.rows[row]; }
  FLUX_DEVICE static const char* at(const Params& p, int place) { return p.x + place * p.row_bytes; }
};

using Kernel = void (*)(const GroupedParams<IndexedRows>);

// Tile shapes (ids of tile_config.h) that grouped GEMMs are compiled for: those stored in whole 64-column panels.
constexpr int kConfigs[] = {0, 3, 5, 9};

Kernel kernel_of(runtime::DType dtype, int config) {
  const bool bf16 = dtype == runtime::DType::kBFloat16;
  switch (config) {
    case 0:
      return bf16 ? sm90_grouped_gemm<__nv_bfloat16, 0, IndexedRows>
                  : sm90_grouped_gemm<__half, 0, IndexedRows>;
    case 3:
      return bf16 ? sm90_grouped_gemm<__nv_bfloat16, 3, IndexedRows>
                  : sm90_grouped_gemm<__half, 3, IndexedRows>;
    case 5:
      return bf16 ? sm90_grouped_gemm<__nv_bfloat16, 5, IndexedRows>
                  : sm90_grouped_gemm<__half, 5, IndexedRows>;
    case 9:
      return bf16 ? sm90_grouped_gemm<__nv_bfloat16, 9, IndexedRows>
                  : sm90_grouped_gemm<__half, 9, IndexedRows>;
  }
  return nullptr;
}

// The widest shape that needs no more waves of time than others, if experts get equally many rows.
int choose_config(const GroupedGemmArgs& args, int columns, int k_blocks, int num_sms) {
  const int tile_rows = ceil_div(ceil_div(args.num_rows, args.experts), gemm::kBlockM) * args.experts;
  int best = -1;
  double best_us = INFINITY;
  for (const int config : kConfigs) {
    const int block_n = gemm::kTileConfigs[config].block_n;
    const double waves = std::ceil(static_cast<double>(tile_rows) * ceil_div(columns, block_n) / num_sms);
    const double block_us = gemm::k_block_us(block_n, 0.128 * (gemm::kBlockM + block_n));
    const double time_us = waves * (k_blocks * block_us + 0.5);
    if (time_us < best_us) {
      best = config;
      best_us = time_us;
    }
  }
  return best;
}

constexpr int kScheduleThreads = 256;

// Tiles of experts one after the other: sizes by a scan over experts, then every thread writes those of its own.
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const int32_t* offsets, int experts, TileEntry* tiles, int32_t* num_tile_rows) {
  __shared__ int ends[kScheduleThreads];
  const int per_thread = ceil_div(experts, kScheduleThreads);
  const int first = threadIdx.x * per_thread, last = min(first + per_thread, experts);
  int count = 0;
  for (int expert = first; expert < last; ++expert) {
    count += ceil_div(offsets[expert + 1] - offsets[expert], gemm::kBlockM);
  }
  ends[threadIdx.x] = count;
  __syncthreads();
  for (int distance = 1; distance < kScheduleThreads; distance *= 2) {
    const int before = threadIdx.x >= distance ? ends[threadIdx.x - distance] : 0;
    __syncthreads();
    ends[threadIdx.x] += before;
    __syncthreads();
  }
  int base = ends[threadIdx.x] - count;
  for (int expert = first; expert < last; ++expert) {
    const int rows = ceil_div(offsets[expert + 1] - offsets[expert], gemm::kBlockM);
    for (int i = 0; i < rows; ++i) tiles[base + i] = make_entry(expert, /*step=*/0, 0, rows, base, i);
    base += rows;
  }
  if (threadIdx.x == kScheduleThreads - 1) *num_tile_rows = ends[threadIdx.x];
}

}  // namespace

void grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream) {
  const int num_sms = args.num_sms > 0 ? args.num_sms : runtime::num_sms();
  const int k = static_cast<int>(args.x.columns), n = static_cast<int>(args.weight.rows / args.experts);
  const bool swiglu = static_cast<Activation>(args.activation) == Activation::kSwiglu;
  const int columns = swiglu ? n / 2 : n;
  FLUX_CHECK(k % 8 == 0 && columns % 8 == 0 && args.experts > 0, k, columns, args.experts);
  FLUX_CHECK(args.x.row_stride == k && args.weight.row_stride == k, args.x.row_stride,
             args.weight.row_stride);

  const int k_blocks = ceil_div(k, gemm::kBlockK);
  const int config = args.config >= 0 ? args.config : choose_config(args, n, k_blocks, num_sms);
  const Kernel kernel = kernel_of(args.dtype, config);
  FLUX_CHECK(kernel != nullptr, config);
  const gemm::TileConfig& tile = gemm::kTileConfigs[config];
  prepare_grouped_gemm();

  auto* tiles = reinterpret_cast<TileEntry*>(args.schedule);
  int32_t* num_tile_rows = args.schedule + schedule_words(args.num_rows, args.experts) - 1;
  schedule_kernel<<<1, kScheduleThreads, 0, stream>>>(args.offsets, args.experts, tiles, num_tile_rows);

  GroupedParams<IndexedRows> params;
  params.weight = runtime::make_tensor_map(args.weight, args.dtype, gemm::kBlockK, tile.block_n / 2);
  params.offsets = args.offsets;
  params.tiles = tiles;
  params.num_tile_rows = num_tile_rows;
  params.n = n;
  params.out_columns = columns;
  params.n_tiles = ceil_div(columns, swiglu ? tile.block_n / 2 : tile.block_n);
  params.k = k;
  params.activation = static_cast<Activation>(args.activation);
  params.out = args.out;
  params.rows = {static_cast<const char*>(args.x.data), args.rows,
                 static_cast<int64_t>(k) * gemm::kElementBytes};
  kernel<<<num_sms, kGroupedThreads, grouped_smem_bytes(tile), stream>>>(params);
  FLUX_CUDA_CHECK(cudaGetLastError());
}

void prepare_grouped_gemm() {
  static runtime::OncePerDevice once;
  once([] {
    for (const int config : kConfigs) {
      for (const auto dtype : {runtime::DType::kBFloat16, runtime::DType::kFloat16}) {
        FLUX_CUDA_CHECK(cudaFuncSetAttribute(kernel_of(dtype, config),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             grouped_smem_bytes(gemm::kTileConfigs[config])));
      }
    }
  });
}

}  // namespace flux::moe
