// Host functions of GEMM+AllReduce, AllReduce and ReduceScatter. Free of torch.
#pragma once

#include "gemm/gemm.h"
#include "gemm/quantize.h"
#include "runtime/exchange.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_ar {

// Optional steps after the sum, besides adding args.bias; null: skipped. Rows have n elements, 16-byte aligned.
struct Extras {
  const void* residual;     // [m, n], added to the sum
  const void* norm_weight;  // [n], weight of an RMSNorm: args.out is the norm, and sum_out [m, n] the sum
  float eps;
  void* sum_out;
  gemm::Quantized quantized = {};  // of the norm, to e4m3; per tensor, token or group
};

// args.out [m, n] = sum over ranks of x * weight^T, then bias, residual, RMSNorm and quantisation as given. In one
// launch, of 16-bit operands, in swap-AB tiles that sum (gemm/swap_ab.h).
void gemm_ar(const gemm::GemmArgs& args, const Extras& extras, const runtime::SymmBuffer& symm,
             runtime::Exchange::Mode mode, cudaStream_t stream);

// out = sum over ranks of x, then residual and RMSNorm as given (scatter: this rank's rows, without any); contiguous.
// Without RMSNorm, but for scatter, `out` may be x or the residual. num_sms: 0 for all; with RMSNorm the same on all.
void all_reduce(const runtime::Matrix& x, const runtime::Matrix& out, runtime::DType dtype,
                const Extras& extras, const runtime::SymmBuffer& symm, int num_sms,
                runtime::Exchange::Mode mode, cudaStream_t stream);

// out [rows, n] = sum over ranks of what each has for this one, [rows, n] at x + rank * owner_stride elements. What ranks
// send each other is rounded to int8, as flux.ops._wire does it; `rounds_own`: so is what a rank has for itself. `dtype`:
// of x and out, in 16 bits or fp32; n is a multiple of 8. num_sms: as of all_reduce, the same on all ranks.
void reduce_scatter_int8(const void* x, int64_t owner_stride, const runtime::Matrix& out,
                         runtime::DType dtype, const runtime::SymmBuffer& symm, int num_sms, bool rounds_own,
                         cudaStream_t stream);

}  // namespace flux::gemm_ar
