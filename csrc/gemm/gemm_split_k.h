// The GEMM whose CTAs share tiles: instantiated apart from the others, so that both compile at the same time.
#pragma once

#include <cuda_runtime.h>

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

void gemm_split_k(const GemmArgs& args, const Choice& choice, const TileOrder& order, int num_sms,
                  cudaStream_t stream);
void prepare_split_k();

}  // namespace flux::gemm
