// GEMM+ReduceScatter in one launch (FLUX, arXiv 2406.06858, section 4; the storer and the own-shard epilogue
// are ours).
#pragma once

#include "gemm/gemm.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_rs {

// Who carries the tiles. Every rank of the workspace must choose the same.
struct Transport {
  // 0: storers of the launch, and the device counts the calls, so they replay in a CUDA graph. Else copy engines,
  // and this is the number of the call on a workspace that only such calls use: which buffer they write to must
  // be known when they are enqueued.
  uint32_t copy_epoch;
  int chunks;     // that a copy engine sends each peer
  char* staging;  // where tiles wait for it: as large as the slots, until the stream has passed the call
};

// out[m / world_size, n] = rows of this rank of the sum over ranks of x * weight^T, plus bias once.
// Every rank of the workspace must make the same call.
void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             cudaStream_t stream);

void prepare();

}  // namespace flux::gemm_rs
