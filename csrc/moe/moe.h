// Host functions of the mixture-of-experts kernels. They take pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/routing.h"
#include "runtime/symm_buffer.h"
#include "runtime/tensor_map.h"

namespace flux::moe {

// The experts and weights that the tokens of this rank chose, in device memory.
struct OwnChoices {
  const void* ids;  // [tokens][top_k]; invalid expert ids are not routed
  bool wide;        // true: ids are int64; false: int32
  const float* weights;
  int tokens;
  bool whole_vectors =
      false;  // rows are whole vectors of 16 bytes, and 16-byte aligned; route() sets the flag
};

// Computes the routing from the choices of all ranks, with the same result as route_on_host. Fills the arrays of `out`
// and `weights` [world_size][max_tokens][top_k], all in device memory. A collective: the exchange buffers of the
// workspace must have route_exchange_bytes(); `symm` may be null for one rank, or for no tokens.
// `scratch` has route_scratch_words() words and need not be initialised. The launch is cooperative, and can be captured
// in a CUDA graph.
void route(const Layout& layout, int block_m, const OwnChoices& own, const runtime::SymmBuffer* symm,
           const RoutingArrays& out, float* weights, int32_t* scratch, cudaStream_t stream);

// out[token] = the sum over its choices of weight * row, for 16-bit products. The number of columns must be a multiple
// of eight. A choice without a row (position -1) adds nothing. out: [tokens][columns], 16-byte aligned.
void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream);

// Load the kernels. Lazy loading would wait for a kernel that spins on a peer.
void prepare_route();
void prepare_combine();

}  // namespace flux::moe
