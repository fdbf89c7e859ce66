// AllGather+GEMM of fp8 operands, in a translation unit of its own, so that it compiles in parallel with ag_gemm.cu.
#pragma once

#include "ag_gemm/gather.cuh"
#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::ag_gemm {

void launch_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::TileOrder& order,
                int num_sms, const GatherStore::Params& store, const OwnScales& scales, cudaStream_t stream);
void prepare_fp8();

}  // namespace flux::ag_gemm
