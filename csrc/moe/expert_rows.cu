// Steps between the GEMMs of the layers and of their backward passes. Each is bound by memory: it reads and writes a row
// once, computes in fp32, and skips the rows that no expert has, whose number only the device knows.
#include <type_traits>

#include "moe/activation.cuh"
#include "moe/moe.h"

namespace flux::moe {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtasPerSm = 8;
constexpr int kBatch = 4;  // vectors whose loads a thread has in flight at the same time

struct Extent {
  const int32_t* end;  // rows of experts
  int rows;
  int vectors;  // of a row of the result
};

// Calls use(row) in all lanes of the warp that has this row.
template <class Use>
FLUX_DEVICE void for_each_row(int rows, const Use& use) {
  const int warps = gridDim.x * kWarps;
  for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += warps) use(row);
}

// A lane's vectors of a row, in batches: load(i, vector) for all of a batch, then use(i, vector).
template <class Load, class Use>
FLUX_DEVICE void for_each_vector(int vectors, const Load& load, const Use& use) {
  for (int first = threadIdx.x % 32; first < vectors; first += 32 * kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + 32 * i < vectors) load(i, first + 32 * i);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + 32 * i < vectors) use(i, first + 32 * i);
  }
}

template <class Element>
FLUX_DEVICE uint4 scaled(const uint4& values, float scale) {
  float terms[kVector];
  gemm::widen<Element>(values, terms);
#pragma unroll
  for (int j = 0; j < kVector; ++j) terms[j] *= scale;
  return gemm::round<Element>(terms);
}

template <class Element>
FLUX_DEVICE float dot(const uint4& values, const uint4& others) {
  float a[kVector], b[kVector], sum = 0;
  gemm::widen<Element>(values, a);
  gemm::widen<Element>(others, b);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
  return sum;
}

FLUX_DEVICE void store_sum(float* to, float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
  if (threadIdx.x % 32 == 0) *to = value;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(Extent extent, const uint4* x, const int32_t* tokens, const float* scores,
                       uint4* out) {
  for_each_row(*extent.end, [&](int row) {
    const uint4* const from = x + int64_t{tokens[row]} * extent.vectors;
    uint4* const to = out + int64_t{row} * extent.vectors;
    uint4 values[kBatch];
    const auto load = [&](int i, int vector) { values[i] = __ldg(from + vector); };
    if (scores == nullptr) {
      for_each_vector(extent.vectors, load, [&](int i, int vector) { to[vector] = values[i]; });
    } else {
      const float score = scores[row];
      for_each_vector(extent.vectors, load,
                      [&](int i, int vector) { to[vector] = scaled<Element>(values[i], score); });
    }
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(Extent extent, uint4* rows, const float* scores, const uint4* x, float* dots) {
  const int end = *extent.end;
  for_each_row(extent.rows, [&](int row) {
    uint4* const mine = rows + int64_t{row} * extent.vectors;
    float sum = 0;
    if (row >= end) {
      for (int vector = threadIdx.x % 32; vector < extent.vectors; vector += 32) mine[vector] = {0, 0, 0, 0};
    } else if (scores != nullptr || x != nullptr) {
      const uint4* const other = x == nullptr ? nullptr : x + int64_t{row} * extent.vectors;
      const float score = scores == nullptr ? 1.0f : scores[row];
      uint4 values[kBatch], others[kBatch];
      const auto load = [&](int i, int vector) {
        values[i] = mine[vector];
        if (other != nullptr) others[i] = __ldg(other + vector);
      };
      for_each_vector(extent.vectors, load, [&](int i, int vector) {
        if (other != nullptr) sum += dot<Element>(values[i], others[i]);
        if (scores != nullptr) mine[vector] = scaled<Element>(values[i], score);
      });
    }
    if (x != nullptr) store_sum(dots + row, sum);
  });
}

// The weighted sum over a token's experts, if layer 1's GEMM and its communication run separately.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Products products, int64_t tokens, int columns, uint4* out) {
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int column = threadIdx.x * kVector; column < columns; column += kThreads * kVector) {
      float sum[kVector] = {};
#pragma unroll 1
      for (int first = 0; first < products.top_k; first += kBatch) {
        uint4 values[kBatch];
        float weights[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int64_t choice = token * products.top_k + first + i;
          const int position = first + i < products.top_k ? __ldg(products.positions + choice) : -1;
          values[i] = {0, 0, 0, 0};
          weights[i] = 0;
          if (position < 0) continue;
          weights[i] = __ldg(products.weights + choice);
          const char* const row = products.rows + position * products.row_bytes;
          values[i] = *reinterpret_cast<const uint4*>(row + column * sizeof(Element));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) add_choice<Element>(values[i], weights[i], sum);
      }
      out[(token * columns + column) / kVector] = gemm::round<Element>(sum);
    }
  }
}

// The gate of swiglu, or the only operand of others, and what swiglu multiplies its gate by.
template <class Element, bool kGated>
struct Operands {
  uint4 gates[kBatch], ups[kGated ? kBatch : 1];

  FLUX_DEVICE void load(const uint4* row, int vectors, int i, int vector) {
    gates[i] = __ldg(row + vector);
    if constexpr (kGated) ups[i] = __ldg(row + vectors + vector);
  }
  FLUX_DEVICE void widen(int i, float (&gate)[kVector], float (&up)[kVector]) const {
    gemm::widen<Element>(gates[i], gate);
    if constexpr (kGated) gemm::widen<Element>(ups[i], up);
  }
};

template <class Element, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    activate_rows_kernel(Extent extent, const uint4* product, uint4* out) {
  constexpr bool kGated = kActivation == Activation::kSwiglu;
  for_each_row(*extent.end, [&](int row) {
    const uint4* const from = product + int64_t{row} * extent.vectors * (kGated ? 2 : 1);
    uint4* const to = out + int64_t{row} * extent.vectors;
    Operands<Element, kGated> operands;
    const auto load = [&](int i, int vector) { operands.load(from, extent.vectors, i, vector); };
    for_each_vector(extent.vectors, load, [&](int i, int vector) {
      float gate[kVector], up[kVector], result[kVector];
      operands.widen(i, gate, up);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        result[j] = activated<kActivation>(gate[j]);
        if constexpr (kGated) result[j] *= up[j];
      }
      to[vector] = gemm::round<Element>(result);
    });
  });
}

// extent: of the gradient of the activation's result. out: gradients of the product.
template <class Element, Activation kActivation, bool kFinish>
__global__ void __launch_bounds__(kThreads)
    activation_grad_kernel(Extent extent, const uint4* grad, const uint4* product, uint4* out,
                           Finish finish) {
  constexpr bool kGated = kActivation == Activation::kSwiglu;
  for_each_row(*extent.end, [&](int row) {
    const int64_t at = int64_t{row} * extent.vectors, from = at * (kGated ? 2 : 1);
    const float score = kFinish ? finish.scores[row] : 1.0f;
    float sum = 0;
    Operands<Element, kGated> operands;
    uint4 grads[kBatch];
    const auto load = [&](int i, int vector) {
      operands.load(product + from, extent.vectors, i, vector);
      grads[i] = grad[at + vector];
    };
    for_each_vector(extent.vectors, load, [&](int i, int vector) {
      float g[kVector], gate[kVector], up[kVector], active[kVector], of_gate[kVector];
      operands.widen(i, gate, up);
      gemm::widen<Element>(grads[i], g);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        active[j] = activated<kActivation>(gate[j]);
        of_gate[j] = score * g[j] * slope<kActivation>(gate[j]);
        if constexpr (kGated) of_gate[j] *= up[j];
      }
      out[from + vector] = gemm::round<Element>(of_gate);
      if constexpr (kGated) {
        float of_up[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) of_up[j] = score * g[j] * active[j], active[j] *= up[j];
        out[from + extent.vectors + vector] = gemm::round<Element>(of_up);
      }
      if constexpr (kFinish) {
        const uint4 rounded = gemm::round<Element>(active);
        static_cast<uint4*>(finish.rows)[at + vector] = rounded;
        sum += dot<Element>(grads[i], rounded);
      }
    });
    if constexpr (kFinish) store_sum(finish.dots + row, sum);
  });
}

template <class Kernel, class... Arguments>
void launch(const ExpertRows& rows, Kernel* bfloat16, Kernel* half, cudaStream_t stream,
            const Arguments&... arguments) {
  FLUX_CHECK(rows.columns % kVector == 0, rows.columns);
  const auto kernel = runtime::is_bfloat16(rows.dtype) ? bfloat16 : half;
  if (rows.count == 0 || rows.columns == 0) return;
  const int ctas = std::min((rows.count + kWarps - 1) / kWarps, kCtasPerSm * runtime::num_sms());
  const Extent extent = {rows.end, rows.count, rows.columns / kVector};
  runtime::Launch(ctas, kThreads, 0, stream).run(kernel, extent, arguments...);
}

// Launches launch_of(Constant<activation>()), if that makes such rows of this product.
template <Activation kActivation>
using Constant = std::integral_constant<Activation, kActivation>;
template <class LaunchOf>
void launch_for(int activation, const ExpertRows& rows, const runtime::Matrix& product,
                const LaunchOf& launch_of) {
  const auto known = static_cast<Activation>(activation);
  const int columns = known == Activation::kSwiglu ? 2 * rows.columns : rows.columns;
  FLUX_CHECK(product.columns == columns && product.row_stride == columns, product.columns, columns);
  if (known == Activation::kSilu) return launch_of(Constant<Activation::kSilu>());
  if (known == Activation::kGelu) return launch_of(Constant<Activation::kGelu>());
  FLUX_CHECK(known == Activation::kSwiglu, activation);
  launch_of(Constant<Activation::kSwiglu>());
}

template <class Element, Activation... kActivations>
void load_all() {
  runtime::load(gather_rows_kernel<Element>, finish_rows_kernel<Element>, combine_kernel<Element>,
                activate_rows_kernel<Element, kActivations>...,
                activation_grad_kernel<Element, kActivations, false>...,
                activation_grad_kernel<Element, kActivations, true>...);
}

runtime::Kernels kernels([] {
  load_all<__nv_bfloat16, Activation::kSilu, Activation::kGelu, Activation::kSwiglu>();
  load_all<__half, Activation::kSilu, Activation::kGelu, Activation::kSwiglu>();
});

const uint4* vectors(const void* data) { return static_cast<const uint4*>(data); }
uint4* vectors(void* data) { return static_cast<uint4*>(data); }

}  // namespace

void gather_rows(const ExpertRows& rows, const void* x, const int32_t* tokens, const float* scores, void* out,
                 cudaStream_t stream) {
  launch(rows, gather_rows_kernel<__nv_bfloat16>, gather_rows_kernel<__half>, stream, vectors(x), tokens,
         scores, vectors(out));
}

void finish_rows(const ExpertRows& rows, void* data, const float* scores, const void* x, float* dots,
                 cudaStream_t stream) {
  launch(rows, finish_rows_kernel<__nv_bfloat16>, finish_rows_kernel<__half>, stream, vectors(data), scores,
         vectors(x), dots);
}

void activate_rows(const ExpertRows& rows, int activation, const runtime::Matrix& product, void* out,
                   cudaStream_t stream) {
  launch_for(activation, rows, product, [&](auto constant) {
    launch(rows, activate_rows_kernel<__nv_bfloat16, constant>, activate_rows_kernel<__half, constant>,
           stream, vectors(product.data), vectors(out));
  });
}

void activation_grad(const ExpertRows& rows, int activation, const void* grad, const runtime::Matrix& product,
                     void* out, const Finish& finish, cudaStream_t stream) {
  const auto launch_as = [&](auto constant, auto finishes) {
    launch(rows, activation_grad_kernel<__nv_bfloat16, constant, finishes>,
           activation_grad_kernel<__half, constant, finishes>, stream, vectors(grad), vectors(product.data),
           vectors(out), finish);
  };
  launch_for(activation, rows, product, [&](auto constant) {
    if (finish.scores != nullptr) return launch_as(constant, std::true_type());
    launch_as(constant, std::false_type());
  });
}

void combine(const runtime::Matrix& products, runtime::DType dtype, const int32_t* positions,
             const float* weights, int64_t tokens, int top_k, void* out, cudaStream_t stream) {
  FLUX_CHECK(products.columns % kVector == 0 && products.row_stride % kVector == 0, products.columns,
             products.row_stride);
  if (tokens == 0 || products.columns == 0) return;
  const int64_t row_bytes = products.row_stride * gemm::kResultBytes;
  const Products params = {static_cast<const char*>(products.data), row_bytes, positions, weights, top_k};
  const auto kernel = runtime::is_bfloat16(dtype) ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  const int ctas = static_cast<int>(std::min<int64_t>(tokens, kCtasPerSm * runtime::num_sms()));
  runtime::Launch(ctas, kThreads, 0, stream)
      .run(kernel, params, tokens, static_cast<int>(products.columns), static_cast<uint4*>(out));
}

}  // namespace flux::moe
