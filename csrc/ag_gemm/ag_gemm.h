// AllGather+GEMM in one launch, and AllGather alone (FLUX, arXiv 2406.06858, section 4; but CTAs push, then compute).
#pragma once

#include "ag_gemm/plan.h"
#include "gemm/gemm.h"
#include "runtime/symm_buffer.h"

namespace flux::ag_gemm {

// How rows are sent to peers: by CTAs or by copy engines. Every rank of the workspace must choose the same.
struct Transport {
  // 0: CTAs of the launch push the rows, and the device counts the epochs, so that CUDA graphs can replay calls. Else
  // copy engines push them, and the host counts the epochs: a copy needs its destination when it is enqueued.
  uint32_t copy_epoch;
  int chunk_rows;  // copy engines: rows announced by one signal, a multiple of kBlockM
};

// out[m, n] = x * weight^T + bias for the rows of all ranks; args.x holds this rank's rows, contiguous.
// `reuse`: use the rows that the previous call on this stream has gathered; nothing is sent.
void ag_gemm(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool reuse, cudaStream_t stream);

// Starts the copies of x, so that other kernels can run before all_gather. x must not change until all_gather is done.
void begin_all_gather(const runtime::Matrix& x, const runtime::SymmBuffer& symm, const Transport& transport,
                      cudaStream_t stream);

// The scales of fp8 rows: this rank's, and where those of all rows go, as a matrix of one column after the other:
// [columns][pad], where pad is the number of rows, rounded up to a multiple of four.
struct CollectedScales {
  OwnScales own = {};
  int columns = 0;  // 0: there are none
  float* out = nullptr;
};

// Of the rows of all ranks, when all_gather is called: nothing is sent; begin_all_gather has started the copies; all
// are here, because the previous ag_gemm on this stream has gathered them.
enum class Rows { kToSend, kBegun, kHere };

// out[m, k] = the rows of all ranks. `scales`: of rows that are here.
void all_gather(const runtime::Matrix& x, const runtime::Matrix& out, const runtime::SymmBuffer& symm,
                const Transport& transport, Rows rows, const CollectedScales& scales, cudaStream_t stream);

// Pushes this rank's rows to its peers by copy engines, after the work on `stream`; a signal follows each chunk.
// Enqueued before the launch that waits for them: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue.
// `apart`: copies do not wait for the signals of earlier ones, so the last is complete sooner, and the first signals
// arrive later (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines). `scales`: of the rows, if the layout has them.
void push_by_copy_engine(const runtime::SymmBuffer& symm, const Layout& layout, const void* rows,
                         uint32_t epoch, int chunk_rows, bool apart, cudaStream_t stream,
                         const OwnScales& scales = {});

inline void check_room(const Layout& layout, const runtime::SymmBuffer& symm, const Transport& transport) {
  FLUX_CHECK(layout.slot_bytes() <= symm.slot_bytes, layout.slot_bytes(), symm.slot_bytes);
  FLUX_CHECK(layout.num_signals() * 4 <= symm.signal_bytes, layout.num_signals(), symm.signal_bytes);
  FLUX_CHECK(transport.copy_epoch != 0 || layout.num_signals() <= runtime::kMaxPushBlocks,
             layout.num_signals());
}

}  // namespace flux::ag_gemm
