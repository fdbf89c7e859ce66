// GEMM+AllReduce and AllReduce, where every rank gets the sum, and ReduceScatter. No torch here.
#pragma once

#include "gemm/gemm.h"
#include "runtime/exchange.h"
#include "runtime/symm_buffer.h"

namespace flux::gemm_ar {

// What is done to the sum besides adding args.bias; null where it is not. Rows of n elements, 16-byte aligned.
struct Extras {
  const void* residual;     // [m, n], added
  const void* norm_weight;  // [n], of an RMSNorm: then args.out is the norm, and sum_out [m, n] the sum
  float eps;
  void* sum_out;
};

// args.out [m, n] = sum over ranks of x * weight^T, and so on.
void gemm_ar(const gemm::GemmArgs& args, const Extras& extras, const runtime::SymmBuffer& symm,
             runtime::Exchange::Mode mode, cudaStream_t stream);

// out = sum over ranks of x, or of a scatter this rank's rows of it; both contiguous. The whole sum may be
// written over x. num_sms: SMs to use, 0: all of the device's.
void all_reduce(const runtime::Matrix& x, const runtime::Matrix& out, runtime::DType dtype,
                const runtime::SymmBuffer& symm, int num_sms, runtime::Exchange::Mode mode,
                cudaStream_t stream);

// Loads every kernel of this folder.
void prepare();

}  // namespace flux::gemm_ar
