// GEMM+ReduceScatter in one launch (FLUX, arXiv 2406.06858, section 4). Not from the paper: separate storer warps,
// and adding the peers' contributions in the epilogue of the own shard.
#pragma once

#include "gemm/gemm.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_rs {

// How tiles are sent to peers: by storer warps or by copy engines. Every rank of the workspace must choose the same.
struct Transport {
  // 0: storers send the tiles, and the device counts the epochs, so that CUDA graphs can replay calls. Else copy
  // engines send them, and the host counts the epochs, because it must know the destination when it enqueues a copy.
  uint32_t copy_epoch;
  int chunks;     // chunks that a copy engine sends to each peer
  char* staging;  // source of the copies, as large as the slots; used until the call is complete
};

// out[m / world_size, n] = rows of this rank of the sum over ranks of x * weight^T, plus bias once. Collective.
// `rounds_own`: a rank's own products are rounded to 16 bits before they are summed, as those of its peers are.
void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool rounds_own, cudaStream_t stream);

}  // namespace flux::gemm_rs
