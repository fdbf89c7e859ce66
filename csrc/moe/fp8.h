// Grouped GEMMs of fp8 operands, in translation units of their own, so that they compile in parallel with those of 16
// bits.
#pragma once

#include "moe/arriving_rows.cuh"
#include "moe/combining_rows.cuh"
#include "moe/grouped_launch.cuh"
#include "moe/moe.h"

namespace flux::moe {

void grouped_gemm_fp8(const GroupedGemmArgs& args, const Schedule& schedule, cudaStream_t stream);
void ag_scatter_gemm_fp8(const GroupedGemmArgs& args, const Schedule& schedule,
                         const ArrivingRows::Params& rows, cudaStream_t stream);
void gemm_gather_rs_fp8(const GroupedGemmArgs& args, const Schedule& schedule,
                        const CombiningRows::Params& rows, int tiles_per_chunk, cudaStream_t stream);
void prepare_grouped_gemm_fp8();
void prepare_layers_fp8();

}  // namespace flux::moe
