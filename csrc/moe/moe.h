// Host functions of the mixture-of-experts kernels. They take pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/routing.h"
#include "runtime/symm_buffer.h"
#include "runtime/tensor_map.h"

namespace flux::moe {

// What the tokens of this rank chose, in device memory.
struct OwnChoices {
  const void* ids;  // [tokens][top_k]; what is no expert's number is not routed
  bool wide;        // int64, else int32
  const float* weights;
  int tokens;
  bool whole_vectors =
      false;  // rows are whole vectors of 16 bytes, and lie at multiples of that; route() finds out
};

// Fills the arrays of a routing (all in device memory) from what all ranks chose, exactly as route_on_host does, and
// `weights` [world_size][max_tokens][top_k] with those of all ranks. A collective of ranks whose workspaces hold
// route_exchange_bytes(); `symm` may be null for one rank, or no tokens.
// `scratch` holds route_scratch_words() words, with anything in them. The launch is cooperative; it can be captured
// in a graph.
void route(const Layout& layout, int block_m, const OwnChoices& own, const runtime::SymmBuffer* symm,
           const RoutingArrays& out, float* weights, int32_t* scratch, cudaStream_t stream);

// out[token] = the sum over its choices of weight times row, for 16-bit products whose columns are a multiple of
// eight; a choice without a row (position -1) adds nothing. out: [tokens][columns], 16-byte aligned.
void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream);

// Load kernels, so that none is loaded behind one that waits.
void prepare_route();
void prepare_combine();

}  // namespace flux::moe
