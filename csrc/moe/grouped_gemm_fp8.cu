#include "moe/fp8.h"
#include "moe/local_rows.cuh"

namespace flux::moe {

void grouped_gemm_fp8(const GroupedGemmArgs& args, const Schedule& schedule, cudaStream_t stream) {
  if (args.rows == nullptr) {
    launch_grouped<OrderedRows, true>(args, schedule, args.num_rows, {}, stream);
    return;
  }
  const gemm::Scales& s = args.scales;
  ScaledIndexedRows::Params rows = {{static_cast<const char*>(args.x.data), args.rows}};
  rows.row_bytes = static_cast<int>(args.x.columns);
  rows.scales = s.x;
  rows.step = s.blocks ? 1 : s.x_step;
  rows.stride = s.blocks ? s.x_stride : 0;
  launch_grouped<ScaledIndexedRows, true>(args, schedule, args.num_rows, rows, stream);
}

void prepare_grouped_gemm_fp8() {
  grouped_kernels<OrderedRows, true>();
  grouped_kernels<ScaledIndexedRows, true>();
}

}  // namespace flux::moe
