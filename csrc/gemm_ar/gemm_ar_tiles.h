// GEMM+AllReduce with ordinary tiles in one launch, in a translation unit of its own, so that it compiles in
// parallel with gemm_ar.cu.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm_ar {

void gemm_ar_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice,
                      const gemm::ExchangeParams& exchange, int num_sms, cudaStream_t stream);
void prepare_tiles();

// Of fp8 operands, in all tiles that sum in the launch; likewise.
void gemm_ar_fp8(const gemm::GemmArgs& args, const gemm::Choice& choice, const gemm::ExchangeParams& exchange,
                 int num_sms, cudaStream_t stream);
void prepare_fp8();

}  // namespace flux::gemm_ar
