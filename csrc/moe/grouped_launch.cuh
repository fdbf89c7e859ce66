// Launches the grouped GEMM kernel for any Rows policy.
#pragma once

#include "gemm/sm90/launch.cuh"
#include "moe/moe.h"
#include "moe/sm90_grouped_gemm.cuh"

namespace flux::moe {

// Tile rows in the order in which they are computed, in device memory.
struct Schedule {
  const int32_t* offsets;  // [experts + 1]
  const TileEntry* tiles;
  const int32_t* num_tile_rows;
};

template <class Rows, bool kFp8>
struct GroupedFamily {
  using Params = GroupedParamsFor<kFp8, Rows>;
  static constexpr int kThreads = gemm::kNumThreads, kTiles = gemm::kNumTileConfigs;
  static constexpr bool kStoresFloats = false;
  static constexpr int smem_bytes(int tile) { return grouped_smem_bytes(gemm::kTileConfigs[tile]); }

  static constexpr bool has(gemm::Major major, int tile) {
    return (!kFp8 || major == gemm::Major::K) && is_grouped_config(tile) &&
           gemm::kTileConfigs[tile].is_fp8() == kFp8;
  }
  template <class Element, gemm::Major kMajorB, int kTile>
  static constexpr auto kKernel = sm90_grouped_gemm<Element, kMajorB, kTile, Rows>;
};

inline void check_layout(const GroupedGemmArgs& args, const Layout& layout, const runtime::SymmBuffer& symm) {
  FLUX_CHECK(symm.world_size == layout.world_size && symm.world_size >= 2, symm.world_size,
             layout.world_size);
  FLUX_CHECK(args.experts() == layout.local_experts(), args.experts(), layout.local_experts());
}

// Checks that the workspace has room for slot rows, and for `signals` signals of each source.
inline void check_room(const Layout& layout, const runtime::SymmBuffer& symm, int row_bytes,
                       int64_t signals) {
  const int64_t peers = symm.world_size - 1;
  const int64_t slot_bytes = peers * layout.max_tokens * row_bytes;
  FLUX_CHECK(slot_bytes <= symm.slot_bytes, slot_bytes, symm.slot_bytes);
  FLUX_CHECK(peers * signals * 4 <= symm.signal_bytes, symm.signal_bytes);
}

// The scales of x that do not come with gathered rows are those of rows in order.
inline GroupedScales grouped_scales(const GroupedGemmArgs& args, bool in_order) {
  const gemm::Scales& s = args.scales;
  GroupedScales scales = {};
  scales.weight = s.weight;
  scales.weight_step = s.weight_step;
  scales.weight_rows = args.experts() * args.n();
  scales.blocks = s.blocks;
  scales.e5m2 = s.x_dtype == runtime::DType::kE5M2;
  if (!in_order) return scales;
  if (!s.blocks && s.x_step == 0) {
    scales.x = s.x;
  } else {
    const int64_t stride = s.blocks ? s.x_stride : (args.x.rows + 3) / 4 * 4;
    scales.x_scales =
        runtime::make_vector_map({s.x, args.scale_columns(), args.x.rows, stride}, gemm::kScaleBoxRows);
  }
  return scales;
}

// expected_rows: the number of rows for which the tile shape is chosen.
template <class Rows, bool kFp8>
void launch_grouped_as(const GroupedGemmArgs& args, const Schedule& schedule, int expected_rows,
                       const typename Rows::Params& rows, cudaStream_t stream, int tiles_per_chunk = 0) {
  const int num_sms = runtime::usable_sms(args.num_sms);
  const int k = static_cast<int>(args.x.columns), n = args.n(), experts = args.experts();
  const bool swiglu = static_cast<Activation>(args.activation) == Activation::kSwiglu;
  const int columns = swiglu ? n / 2 : n;
  FLUX_CHECK(k % 8 == 0 && columns % 8 == 0 && experts > 0, k, columns, experts);
  FLUX_CHECK(args.x.row_stride == k, args.x.row_stride, k);
  FLUX_CHECK((args.transpose_weight ? args.weight.first.rows : args.weight.first.columns) == k, k);
  FLUX_CHECK(!(args.transpose_weight && swiglu), "a transposed weight is not split into gates and ups");

  const int config = args.config >= 0
                         ? args.config
                         : choose_grouped_config(expected_rows, experts, n, k, num_sms, args.operand_bytes());
  FLUX_CHECK(is_grouped_config(config), config);
  const gemm::TileConfig& tile = gemm::kTileConfigs[config];
  FLUX_CHECK(args.is_fp8() == kFp8 && tile.is_fp8() == kFp8, kFp8, config);
  // A gate and what it gates must not share a block of scales.
  FLUX_CHECK(!(args.scales.blocks && swiglu) || columns % gemm::kScaleBlock == 0, columns);

  GroupedParamsFor<kFp8, Rows> params;
  const auto weight_dtype = kFp8 ? runtime::DType::kE4M3 : args.dtype;
  params.weight = args.transpose_weight
                      ? runtime::make_tensor_map(args.weight, weight_dtype, 64, tile.block_k())
                      : runtime::make_tensor_map(args.weight, weight_dtype, tile.block_k(), tile.block_n / 2);
  if constexpr (Rows::kInOrder) {
    const auto x_dtype = kFp8 ? args.scales.x_dtype : args.dtype;
    params.x = runtime::make_tensor_map(args.x, x_dtype, tile.block_k(), gemm::kBlockM);
  }
  if constexpr (kFp8) params.scales = grouped_scales(args, Rows::kInOrder);
  params.offsets = schedule.offsets;
  params.tiles = schedule.tiles;
  params.num_tile_rows = schedule.num_tile_rows;
  params.n = n;
  params.out_columns = columns;
  params.n_tiles = ceil_div(columns, swiglu ? tile.block_n / 2 : tile.block_n);
  params.tiles_per_chunk = tiles_per_chunk > 0 ? tiles_per_chunk : params.n_tiles;
  params.k = k;
  params.activation = static_cast<Activation>(args.activation);
  params.out = args.out;
  params.rows = rows;
  runtime::Launch(num_sms, gemm::kNumThreads, grouped_smem_bytes(tile), stream)
      .run(gemm::kernels_of<GroupedFamily<Rows, kFp8>>().get(args.dtype, args.transpose_weight, config),
           params);
}

template <class Rows>
void launch_grouped(const GroupedGemmArgs& args, const Schedule& schedule, int expected_rows,
                    const typename Rows::Params& rows, cudaStream_t stream, int tiles_per_chunk = 0) {
  (args.is_fp8() ? launch_grouped_as<Rows, true> : launch_grouped_as<Rows, false>)(args, schedule,
                                                                                   expected_rows, rows,
                                                                                   stream, tiles_per_chunk);
}

// --- Rows policies without communication ---

struct LocalRows {
  struct Call {};
  struct Progress {};
  static constexpr bool kArrive = false, kCombine = false;
  template <class Params>
  FLUX_DEVICE static Call begin(const Params&) {
    return {};
  }
  template <class Params>
  FLUX_DEVICE static uint32_t* tile_counter(const Params&) {
    return nullptr;
  }
};

struct OrderedRows : LocalRows {
  struct Params {};
  static constexpr bool kInOrder = true;
};

struct IndexedRows : LocalRows {
  struct Params {
    const char* x;
    const int32_t* rows;
  };
  static constexpr bool kInOrder = false;
  FLUX_DEVICE static Sources sources(const Params& p, const Call&) { return {p.x, nullptr}; }
  FLUX_DEVICE static int place(const Params& p, int row) { return p.rows[row]; }
};

struct ScaledIndexedRows : IndexedRows {
  struct Params : IndexedRows::Params {
    int row_bytes;
    const float* scales;  // of row i in k-block b at scales[i * step + b * stride]
    int step;
    int64_t stride;
  };
  FLUX_DEVICE static int first_row_bytes(const Params& p) { return p.row_bytes; }
  FLUX_DEVICE static RowScales scales(const Params& p, const Call&, int place) {
    return {p.scales + static_cast<int64_t>(place) * p.step, p.stride};
  }
};

}  // namespace flux::moe
