// GEMM+ReduceScatter in one launch (FLUX, arXiv 2406.06858, section 4; the storer and the epilogue of the own
// shard are our additions).
#pragma once

#include "gemm/gemm.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_rs {

// Who carries the tiles. Every rank of the workspace must choose the same.
struct Transport {
  // 0: storers carry the tiles, and the device counts the epochs, so calls can be replayed in a CUDA graph.
  // Otherwise copy engines carry them, and this is the epoch of the call on a region that only such calls use:
  // the destination buffer must be known when a copy is enqueued.
  uint32_t copy_epoch;
  int chunks;     // chunks that a copy engine sends to each peer
  char* staging;  // tiles wait here for the copy; as large as the slots, used until the call is complete
};

// out[m / world_size, n] = rows of this rank of the sum over ranks of x * weight^T, plus bias once.
// Every rank of the workspace must make the same call.
void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             cudaStream_t stream);

void prepare();

}  // namespace flux::gemm_rs
