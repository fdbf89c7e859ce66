#include "moe/grouped_launch.cuh"

// Those of 16 bits are compiled here, beside the schedule.
FLUX_KERNELS(flux::moe::GroupedFamily<flux::moe::OrderedRows, false>)
FLUX_KERNELS(flux::moe::GroupedFamily<flux::moe::IndexedRows, false>)

namespace flux::moe {
namespace {

constexpr int kScheduleThreads = 256;

// Writes the tile schedule: a scan gives the first entry of each expert; then threads write their experts' entries.
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const int32_t* offsets, int experts, TileEntry* tiles, int32_t* num_tile_rows) {
  __shared__ int ends[kScheduleThreads];
  const int per_thread = ceil_div(experts, kScheduleThreads);
  const int first = threadIdx.x * per_thread, last = min(first + per_thread, experts);
  int count = 0;
  for (int expert = first; expert < last; ++expert)
    count += ceil_div(offsets[expert + 1] - offsets[expert], gemm::kBlockM);
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
    for (int i = 0; i < rows; ++i) tiles[base + i] = make_entry(expert, 0, rows, base, i);
    base += rows;
  }
  if (threadIdx.x == kScheduleThreads - 1) *num_tile_rows = ends[threadIdx.x];
}

runtime::Kernels kernels([] { runtime::load(schedule_kernel); });

}  // namespace

void grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream) {
  auto* const tiles = reinterpret_cast<TileEntry*>(args.schedule);
  int32_t* const num_tile_rows = args.schedule + schedule_words(args.num_rows, args.experts()) - 1;
  runtime::Launch(1, kScheduleThreads, 0, stream)
      .run(schedule_kernel, args.offsets, args.experts(), tiles, num_tile_rows);
  const Schedule schedule = {args.offsets, tiles, num_tile_rows};
  if (args.rows == nullptr) {
    launch_grouped<OrderedRows>(args, schedule, args.num_rows, {}, stream);
    return;
  }
  const IndexedRows::Params rows = {static_cast<const char*>(args.x.data), args.rows};
  if (!args.is_fp8()) {
    launch_grouped_as<IndexedRows, false>(args, schedule, args.num_rows, rows, stream);
    return;
  }
  const gemm::Scales& s = args.scales;
  ScaledIndexedRows::Params scaled = {rows};
  scaled.row_bytes = static_cast<int>(args.x.columns);
  scaled.scales = s.x;
  scaled.step = s.blocks ? 1 : s.x_step;
  scaled.stride = s.blocks ? s.x_stride : 0;
  launch_grouped_as<ScaledIndexedRows, true>(args, schedule, args.num_rows, scaled, stream);
}

}  // namespace flux::moe
