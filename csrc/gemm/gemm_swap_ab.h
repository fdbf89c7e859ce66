// Plain GEMM for few rows of x, in a translation unit of its own, so that it compiles in parallel with gemm.cu.
#pragma once

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

void gemm_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream);
void prepare_swap_ab();

}  // namespace flux::gemm
