// Layer 1 of a mixture of experts in one launch (COMET, arXiv 2502.19811, sections 3 and 4). Free of torch.
#pragma once

#include "moe/grouped_gemm.h"
#include "moe/routing.h"
#include "runtime/symm_buffer.h"

namespace flux::moe {

struct CombineArgs {
  const float* weights;  // [world_size][max_tokens][top_k]: weight of each choice
  void* out;             // [num_tokens, n]: the sums of this rank's tokens
  int num_tokens;
  int tiles_per_chunk;     // columns of tiles that are summed together
  int communication_ctas;  // CTAs that start with communication
};

// combine.out = for each token of this rank, the sum over ranks and choices of weight * (its row of x * W^T). args.x
// [max_rows, k] is in the order of the routing, which also provides the schedule. args.out [max_rows, n] is scratch
// memory for the products. args.config must be given, because the chunks are counted in its tiles.
void gemm_gather_rs(const GroupedGemmArgs& args, const CombineArgs& combine, const Layout& layout,
                    const RoutingArrays& routing, const runtime::SymmBuffer& symm, cudaStream_t stream);

void prepare_gemm_gather_rs();

}  // namespace flux::moe
