// Layer 0 of a mixture of experts in one launch (COMET, arXiv 2502.19811, section 3). Free of torch.
#pragma once

#include "moe/grouped_gemm.h"
#include "moe/routing.h"
#include "runtime/symm_buffer.h"

namespace flux::moe {

// args.out = activation(x_sorted * weight^T), where x_sorted has the tokens of all ranks in the order of the routing.
// args.x holds this rank's tokens. The routing provides the schedule: offsets, rows and schedule of args are not read.
void ag_scatter_gemm(const GroupedGemmArgs& args, const Layout& layout, const RoutingArrays& routing,
                     const runtime::SymmBuffer& symm, cudaStream_t stream);

void prepare_ag_scatter_gemm();

}  // namespace flux::moe
