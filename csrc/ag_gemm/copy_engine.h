// Pushes a rank's rows to its peers with the GPU's copy engines, without SMs. A signal follows each chunk.
#pragma once

#include <cuda_runtime_api.h>

#include "ag_gemm/plan.h"
#include "runtime/symm_buffer.h"

namespace flux::ag_gemm {

// Enqueues the copies on a stream of their own, after the work on `stream`. Must come before the launch that
// waits for the peers' copies: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue. `apart`: copies
// do not wait for the signals of earlier copies, so the last copy is complete sooner, and the first signals
// arrive later: good for all_gather, bad for a GEMM that waits for the first rows
// (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines).
// `scales`: of the rows, if the layout has scales.
void push_by_copy_engine(const runtime::SymmBuffer& symm, const Layout& layout, const void* rows,
                         uint32_t epoch, int chunk_rows, bool apart, cudaStream_t stream,
                         const OwnScales& scales = {});

}  // namespace flux::ag_gemm
