// The operators without experts (moe/moe.h), as bindings call them: pointers, sizes, a stream. Free of torch.
#pragma once

#include "gemm/plan.h"
#include "runtime/device.h"

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
  bool fast = false;  // not of blocks or e5m2: sums need not be promoted (gemm/plan.h)
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

// out = x * weight^T + bias in fp32; of fp8 operands times their scales, before the bias. Rows 16-byte aligned.
void gemm(const GemmArgs& args, cudaStream_t stream);

// --- without a GEMM ---

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

// GEMM+ReduceScatter in one launch (FLUX, arXiv 2406.06858, section 4). Not from the paper: separate storer warps,
// and adding the peers' contributions in the epilogue of the own shard.
namespace flux::gemm_rs {

// How tiles are sent to peers: by storer warps or by copy engines. Every rank of the workspace must choose the same.
struct Transport {
  // 0: storers send the tiles, and the device counts the epochs, so that CUDA graphs can replay calls. Else copy
  // engines send them, and the host counts the epochs, because it must know the destination when it enqueues a copy.
  uint32_t copy_epoch;
  int chunks;     // chunks that a copy engine sends to each peer
  char* staging;  // source of the copies, as large as the slots; used until the call is complete
};

// out[m / world_size, n] = rows of this rank of the sum over ranks of x * weight^T, plus bias once. Collective.
// `rounds_own`: a rank's own products are rounded to 16 bits before they are summed, as those of its peers are.
void gemm_rs(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool rounds_own, cudaStream_t stream);

}  // namespace flux::gemm_rs

// AllGather+GEMM in one launch, and AllGather alone (FLUX, arXiv 2406.06858, section 4; but CTAs push, then compute).
namespace flux::ag_gemm {

// How rows are sent to peers: by CTAs or by copy engines. Every rank of the workspace must choose the same.
struct Transport {
  uint32_t copy_epoch;  // 0: CTAs of the launch push the rows; else as in gemm_rs::Transport
  int chunk_rows;       // copy engines: rows announced by one signal, a multiple of kBlockM
};

// out[m, n] = x * weight^T + bias for the rows of all ranks; args.x holds this rank's rows, contiguous.
// `reuse`: use the rows that the previous call on this stream has gathered; nothing is sent.
void ag_gemm(const gemm::GemmArgs& args, const runtime::SymmBuffer& symm, const Transport& transport,
             bool reuse, cudaStream_t stream);

// Starts the copies of x, so that other kernels can run before all_gather. x must not change until all_gather is done.
void begin_all_gather(const runtime::Matrix& x, const runtime::SymmBuffer& symm, const Transport& transport,
                      cudaStream_t stream);

// The scales of a rank's own rows: of row i in column j at data[i * step + j * stride].
struct OwnScales {
  const float* data;
  int step;  // 0: all rows have the same
  int64_t stride;
};

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

}  // namespace flux::ag_gemm

// GEMM+AllReduce, AllReduce and ReduceScatter.
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
