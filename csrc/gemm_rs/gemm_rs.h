// GEMM+ReduceScatter in one launch (FLUX, arXiv 2406.06858, section 4; the storer and the own-shard epilogue
// are ours).
#pragma once

#include "gemm/gemm.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_rs {

// out[m / world_size, n] = rows of this rank of the sum over ranks of x * weight^T, plus bias once.
// Every rank of the workspace must make the same call.
void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, cudaStream_t stream);

void prepare();

}  // namespace flux::gemm_rs
