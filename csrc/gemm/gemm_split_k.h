// The GEMM with split K, in a translation unit of its own, so that it compiles in parallel with the other kernels.
#pragma once

#include <cuda_runtime.h>

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

void gemm_split_k(const GemmArgs& args, const Choice& choice, const TileOrder& order, int num_sms,
                  cudaStream_t stream);
void prepare_split_k();

}  // namespace flux::gemm
