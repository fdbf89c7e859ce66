// Fills ScaleParams for a launch.
#pragma once

#include "gemm/gemm.h"
#include "gemm/sm90/scales.cuh"
#include "runtime/check.h"

namespace flux::gemm {

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

}  // namespace flux::gemm
