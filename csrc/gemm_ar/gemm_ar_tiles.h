// GEMM+AllReduce in ordinary tiles and one launch, apart from gemm_ar.cu so that both compile at the same time.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/gemm.h"
#include "gemm/select.h"

namespace flux::gemm_ar {

// Whether that is possible: there is such a kernel, and all CTAs that wait for peers are on the GPU at once.
bool sums_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice);
void gemm_ar_in_tiles(const gemm::GemmArgs& args, const gemm::Choice& choice,
                      const gemm::ExchangeParams& exchange, int num_sms, cudaStream_t stream);
void prepare_tiles();

}  // namespace flux::gemm_ar
