// Plain GEMM of fp8 operands in all kinds of tiles, in a translation unit of its own, so that it compiles in parallel
// with the other kernels.
#pragma once

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

void gemm_fp8(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream);
void prepare_fp8();

}  // namespace flux::gemm
