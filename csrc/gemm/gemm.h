// Plain GEMM, and the arguments of every op that uses its kernel: pointers, sizes, a stream. Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/select.h"
#include "runtime/tensor_map.h"

namespace flux::gemm {

// Of fp8 operands: x of e4m3 or e5m2, and a weight of e4m3.
//
//   blocks: x [k / 128][x_stride], one for each row of x, 16-byte aligned; weight [ceil(n / 128)][k / 128]
//   else:   one scale for each row of x (x_step 1) or for all (0), and likewise for each column of the result
struct Scales {
  const float *x = nullptr, *weight = nullptr;
  int x_step = 0, weight_step = 0;
  bool blocks = false;
  int64_t x_stride = 0;
  bool fast = false;  // not of blocks or e5m2: sums need not be promoted (tile_config.h)
  runtime::DType x_dtype = runtime::DType::kE4M3;
};

struct GemmArgs {
  runtime::Matrix x;       // [m, k]
  runtime::Matrix weight;  // [n, k], or [k, n] if transpose_weight
  bool transpose_weight;
  runtime::Matrix out;   // [m, n], or this rank's [m / world_size, n]
  const void* bias;      // [n] or null
  runtime::DType dtype;  // of out and bias, and of 16-bit operands
  int config;            // pack_choice(...); -1: the cost model chooses
  int num_sms;           // 0: all
  Scales scales = {};    // given if and only if the operands are fp8
  // No kernel before this one writes the weight, so swap-AB tiles begin to load it before that has ended.
  bool weight_is_constant = false;
  // The weight has rows of a gate, and then as many others: out = silu(gate) * others. 16 bits, few rows, no bias.
  bool swiglu = false;

  int m() const { return static_cast<int>(x.rows); }
  int n() const { return static_cast<int>(out.columns) * (swiglu ? 2 : 1); }
  int k() const { return static_cast<int>(x.columns); }
  bool is_fp8() const { return scales.weight != nullptr; }
  runtime::DType x_dtype() const { return is_fp8() ? scales.x_dtype : dtype; }
  runtime::DType weight_dtype() const { return is_fp8() ? runtime::DType::kE4M3 : dtype; }
};

// The problem of a plain GEMM.
inline Problem problem_of(const GemmArgs& args, int num_sms) {
  const Scales& s = args.scales;
  return {.m = args.m(),
          .n = args.n(),
          .k = args.k(),
          .transpose_weight = args.transpose_weight,
          .num_sms = num_sms,
          .swiglu = args.swiglu,
          .operand_bytes = args.is_fp8() ? 1 : 2,
          .promotes = args.is_fp8() && (s.blocks || !s.fast || s.x_dtype == runtime::DType::kE5M2),
          .block_scales = s.blocks};
}

// out = x * weight^T + bias in fp32; of fp8 operands times their scales, before the bias. Rows 16-byte aligned.
void gemm(const GemmArgs& args, cudaStream_t stream);

}  // namespace flux::gemm
