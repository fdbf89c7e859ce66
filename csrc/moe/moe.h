// Host functions of the mixture-of-experts kernels. They take pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/routing.h"
#include "runtime/tensor_map.h"

namespace flux::moe {

// Fills the arrays of a routing (all in device memory) from ids [world_size][max_tokens][top_k] of all ranks,
// exactly as route_on_host does. `scratch` holds route_scratch_words() words, with anything in them. The launch
// is cooperative; it can be captured in a graph.
void route(const Layout& layout, int block_m, const int32_t* ids, const RoutingArrays& out, int32_t* scratch,
           cudaStream_t stream);

// out[token] = the sum over its choices of weight times row, for 16-bit products whose columns are a multiple of
// eight; a choice without a row (position -1) adds nothing. out: [tokens][columns], 16-byte aligned.
void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream);

// Load kernels, so that none is loaded behind one that waits.
void prepare_route();
void prepare_combine();

}  // namespace flux::moe
