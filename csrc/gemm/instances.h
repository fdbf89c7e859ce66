// Kernels of the plain GEMM that have translation units of their own, so that they compile in parallel.
#pragma once

#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm {

void gemm_split_k(const GemmArgs& args, const Choice& choice, const TileOrder& order, int num_sms,
                  cudaStream_t stream);
void gemm_swap_ab(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream);
// Of fp8 operands, in all kinds of tiles.
void gemm_fp8(const GemmArgs& args, const Choice& choice, int num_sms, cudaStream_t stream);
void prepare_split_k();
void prepare_swap_ab();
void prepare_fp8();

}  // namespace flux::gemm
