// Host functions of the mixture-of-experts kernels: pointers, sizes, a stream. Free of torch.
#pragma once

#include "moe/routing.h"
#include "operators.h"

namespace flux::moe {

// --- routing and sums ---

// The experts and weights that the tokens of this rank chose, in device memory.
struct OwnChoices {
  const void* ids;  // [tokens][top_k]; invalid expert ids are not routed
  bool wide;        // true: ids are int64; false: int32
  const float* weights;
  int tokens;
  // Rows are whole vectors of 16 bytes, and 16-byte aligned; route() sets the flag.
  bool whole_vectors = false;
};

// Computes the routing from the choices of all ranks, as route_on_host does: `out` and `weights` [world_size]
// [max_tokens][top_k]. A collective: the exchange buffers have route_exchange_bytes(); `symm` may be null for one rank,
// or for no tokens. `scratch`: route_scratch_words() words. A cooperative launch, which CUDA graphs can capture.
void route(const Layout& layout, int block_m, const OwnChoices& own, const runtime::SymmBuffer* symm,
           const RoutingArrays& out, float* weights, int32_t* scratch, cudaStream_t stream);

// out[token] = the sum over its choices of weight * row, for 16-bit products. The number of columns must be a multiple
// of eight. A choice without a row (position -1) adds nothing. out: [tokens][columns], 16-byte aligned.
void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream);

// --- rows between GEMMs ---

// Rows in the order of a routing, of 16-bit elements; contiguous, 16-byte aligned, a multiple of eight columns.
// Experts have the first *end of them. Nothing else is read, and what results have there is written only where it says so.
struct ExpertRows {
  const int32_t* end;  // in device memory: the last of the offsets
  int count;           // of all rows
  int columns;
  runtime::DType dtype;
};

// out[row] = x[tokens[row]] * scores[row]; scores null: x[tokens[row]].
void gather_rows(const ExpertRows& rows, const void* x, const int32_t* tokens, const float* scores, void* out,
                 cudaStream_t stream);

// dots[row] = data[row] . x[row], if x is given; then data[row] *= scores[row], if given. Zeros for rows of no expert.
void finish_rows(const ExpertRows& rows, void* data, const float* scores, const void* x, float* dots,
                 cudaStream_t stream);

// out = activation(product). Columns are those of out; for swiglu, the product has twice as many.
void activate_rows(const ExpertRows& rows, int activation, const runtime::Matrix& product, void* out,
                   cudaStream_t stream);

// What layer 1's backward pass has before the activation's: the gradient is of rows times their scores.
struct Finish {
  const float* scores = nullptr;
  void* rows = nullptr;   // gets activation(product); may be where the gradient is
  float* dots = nullptr;  // gets gradient . row
};

// out = the gradient of `product` from that of its activation's result, whose columns are given. finish: or nothing.
void activation_grad(const ExpertRows& rows, int activation, const void* grad, const runtime::Matrix& product,
                     void* out, const Finish& finish, cudaStream_t stream);

// --- grouped GEMM ---

struct GroupedGemmArgs {
  runtime::Matrix x;         // [m, k], contiguous
  runtime::Matrices weight;  // of each expert: [n, k], or [k, n] if transposed (16 bits, not for swiglu)
  bool transpose_weight;
  const int32_t* offsets;  // [experts + 1]
  const int32_t* rows;     // [num_rows]: row of x for each row of the result; null: the same row
  int num_rows;            // rows of the result: at least offsets[experts]
  int activation;          // Activation (activation.cuh)
  void* out;               // [num_rows, n], or n / 2 columns for swiglu
  // Scratch memory of schedule_words(...) words; need not be initialised.
  int32_t* schedule;
  runtime::DType dtype;  // of the result, and of 16-bit operands
  int config;            // id of a tile shape; -1: the cost model chooses
  int num_sms;           // 0: all SMs
  // Of fp8 operands. The weight's: one for each expert, or for each row of `weight`; blocks of each expert's weight.
  gemm::Scales scales = {};

  int experts() const { return static_cast<int>(weight.count); }
  int n() const { return static_cast<int>(transpose_weight ? weight.first.columns : weight.first.rows); }
  // A rank without tokens has no scales of x.
  bool is_fp8() const { return scales.weight != nullptr; }
  int scale_columns() const {  // of a row of x
    return !is_fp8() ? 0 : scales.blocks ? static_cast<int>(x.columns) / gemm::kScaleBlock : 1;
  }
  int operand_bytes() const { return is_fp8() ? 1 : 2; }
};

inline int schedule_words(int num_rows, int experts) { return 4 * (num_rows / gemm::kBlockM + experts) + 1; }

// Two launches: the tile schedule, computed on the device because it depends on the offsets, and the GEMM.
void grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream);

// --- gradients of experts' weights ---

// Matrices that are added to are fetched to the L2 before.
constexpr int kWgradPrefetches = 1 << 8;

struct GroupedWgradArgs {
  runtime::Matrix grad, x;  // [m, n] and [m, k], 16 bits, sorted by expert
  const int32_t* offsets;   // [experts + 1]
  runtime::Matrices out;    // of each expert [n, k]
  bool adds;  // to fp32 matrices; else `out` has the operands' type, and zeros for experts without rows
  runtime::DType dtype;  // of the operands
  int choice;            // id of a tile shape (kTileConfigs), plus kWgradPrefetches or not
  int num_sms;           // 0: all SMs
};

// out[e] = grad^T * x over the rows of each expert e, or added to out[e], in fp32. Rows of no expert are not used.
void grouped_wgrad(const GroupedWgradArgs& args, cudaStream_t stream);

// --- layers in one launch each (COMET, arXiv 2502.19811, sections 3 and 4) ---

// Layer 0. args.out = activation(x_sorted * weight^T), where x_sorted has the tokens of all ranks in the order of the
// routing, which provides the schedule (not args), and args.x holds this rank's tokens.
void ag_scatter_gemm(const GroupedGemmArgs& args, const Layout& layout, const RoutingArrays& routing,
                     const runtime::SymmBuffer& symm, cudaStream_t stream);

struct CombineArgs {
  const float* weights;  // [world_size][max_tokens][top_k]: weight of each choice
  void* out;             // [num_tokens, n]: the sums of this rank's tokens
  int num_tokens;
  int tiles_per_chunk;     // columns of tiles that are summed together
  int communication_ctas;  // CTAs that start with communication
};

// Layer 1. combine.out = for each token of this rank, the sum over ranks and choices of weight * (its row of x * W^T).
// The routing gives the order of args.x [max_rows, k], and the schedule. args.out [max_rows, n]: scratch memory for the
// products. args.config must be given: chunks are counted in its tiles.
void gemm_gather_rs(const GroupedGemmArgs& args, const CombineArgs& combine, const Layout& layout,
                    const RoutingArrays& routing, const runtime::SymmBuffer& symm, cudaStream_t stream);

}  // namespace flux::moe
