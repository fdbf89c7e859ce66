// A residual added to a sum, and the RMSNorm of both, in a kernel of its own. Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/tensor_map.h"

namespace flux::gemm {

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
