#include "moe/fp8.h"

namespace flux::moe {

void ag_scatter_gemm_fp8(const GroupedGemmArgs& args, const Schedule& schedule,
                         const ArrivingRows::Params& rows, cudaStream_t stream) {
  const gemm::Scales& s = args.scales;
  const int columns = args.scale_columns();
  ScaledArrivingRows::Params scaled = {rows};
  scaled.scales = s.x;
  scaled.step = s.blocks ? 1 : s.x_step;
  scaled.stride = s.x_stride;
  scaled.columns = columns;
  scaled.slot_row_bytes = slot_row_bytes(rows.row_bytes, columns);
  launch_grouped<ScaledArrivingRows, true>(args, schedule, rows.layout.expected_rows(), scaled, stream);
}

void gemm_gather_rs_fp8(const GroupedGemmArgs& args, const Schedule& schedule,
                        const CombiningRows::Params& rows, int tiles_per_chunk, cudaStream_t stream) {
  launch_grouped<CombiningRows, true>(args, schedule, rows.layout.expected_rows(), rows, stream,
                                      tiles_per_chunk);
}

void prepare_layers_fp8() {
  grouped_kernels<ScaledArrivingRows, true>();
  grouped_kernels<CombiningRows, true>();
}

}  // namespace flux::moe
