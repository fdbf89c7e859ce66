// Plain GEMM, and the arguments of every op that uses its kernel: pointers, sizes, a stream. Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/tensor_map.h"

namespace flux::gemm {

struct GemmArgs {
  runtime::Matrix x;       // [m, k]
  runtime::Matrix weight;  // [n, k], or [k, n] if transpose_weight
  bool transpose_weight;
  runtime::Matrix out;  // [m, n], or this rank's [m / world_size, n]
  const void* bias;     // [n] or null
  runtime::DType dtype;
  int config;   // pack_choice(...); -1: the cost model chooses
  int num_sms;  // 0: all

  int m() const { return static_cast<int>(x.rows); }
  int n() const { return static_cast<int>(out.columns); }
  int k() const { return static_cast<int>(x.columns); }
};

// out = x * weight^T + bias, fp32 accumulation. Rows 16-byte aligned.
void gemm(const GemmArgs& args, cudaStream_t stream);

// Loads every kernel of this file. Lazy loading would wait for a kernel that spins on a peer.
void prepare();

}  // namespace flux::gemm
