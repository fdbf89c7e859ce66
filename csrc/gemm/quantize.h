// Kernels without a GEMM: quantisation to fp8 (flux.quantize), and a residual added to a sum with the RMSNorm of both.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/quantized.h"
#include "runtime/tensor_map.h"

namespace flux::gemm {

// x: contiguous, 16-byte aligned, columns a multiple of 8. `height`: the rows of one matrix, if x is several.
void quantize(const runtime::Matrix& x, runtime::DType dtype, int64_t height, const Quantized& to,
              cudaStream_t stream);

// Quantises with the scale of a whole tensor, whose parts an earlier launch on the stream has left.
void quantize_with_parts(const runtime::Matrix& x, runtime::DType dtype, const Quantized& to, int num_sms,
                         cudaStream_t stream);

// [rows, columns] and weight [columns]: contiguous, 16-byte aligned, columns a multiple of 8.
struct AddNorm {
  void* total;  // += residual, rounded
  const void* residual;
  const void* weight;
  void* out;  // the RMSNorm of total's rows
  int rows, columns;
  float eps;
};

void add_norm(const AddNorm& args, runtime::DType dtype, cudaStream_t stream);

}  // namespace flux::gemm
