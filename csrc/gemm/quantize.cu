#include <algorithm>

#include "gemm/quantize.cuh"
#include "operators.h"

namespace flux::gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 8;
constexpr int kBlockRows = 128;

struct QuantizeParams {
  const uint4* x;
  int64_t rows, height;
  int vectors;  // of a row
  Quantized to;
};

FLUX_DEVICE void begin() {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
}

// Called by all threads. `warps` has one float for each warp.
FLUX_DEVICE float largest_over_cta(float value, float* warps) {
  value = largest_over_lanes<32>(value);
  __syncthreads();  // no thread still reads the values of the call before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = larger(value, warps[warp]);
  return value;
}

template <class Element>
FLUX_DEVICE void store(const QuantizeParams& p, int64_t vector, const uint4& v, float inverse_scale) {
  static_cast<uint2*>(p.to.q)[vector] = quantized<Element>(v, inverse_scale, p.to.e5m2);
}

// A group of a row: one vector of each of kGroupVectors lanes.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantize_groups(const __grid_constant__ QuantizeParams p) {
  begin();
  constexpr int kGroups = kThreads / kGroupVectors;  // of a CTA
  const int across = ceil_div(p.vectors, kGroupVectors), lane = threadIdx.x % kGroupVectors;
  const int groups = static_cast<int>(p.rows) * across;
  for (int first = blockIdx.x * kGroups; first < groups; first += gridDim.x * kGroups) {
    const int group = first + threadIdx.x / kGroupVectors, row = group / across;
    const int in_row = group % across, vector = in_row * kGroupVectors + lane;
    const bool valid = group < groups && vector < p.vectors;
    const int64_t at = static_cast<int64_t>(row) * p.vectors + vector;
    const uint4 v = valid ? p.x[at] : uint4{0, 0, 0, 0};
    const float largest = largest_over_lanes<kGroupVectors>(largest_of<Element>(v));
    const float scale = scale_of(largest, p.to.e5m2, p.to.ue8m0);
    if (!valid) continue;
    if (lane == 0) p.to.scales[in_row * p.to.scale_stride + row] = scale;
    store<Element>(p, at, v, 1.0f / scale);
  }
}

// A row, or a block of kBlockRows rows and kGroupVectors vectors: one CTA.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantize_areas(const __grid_constant__ QuantizeParams p) {
  begin();
  __shared__ float warps[kThreads / 32];
  const bool blocks = p.to.granularity == Granularity::kBlock;
  const int most_rows = blocks ? kBlockRows : 1, most_vectors = blocks ? kGroupVectors : p.vectors;
  const int across = ceil_div(p.vectors, most_vectors);
  const int64_t down = (p.height + most_rows - 1) / most_rows;  // of a matrix
  const int64_t areas = p.rows / p.height * down * across;
  for (int64_t area = blockIdx.x; area < areas; area += gridDim.x) {
    const int64_t row = area / across % down * most_rows, matrix = area / across / down;
    const int vector = static_cast<int>(area % across) * most_vectors;
    const int rows = static_cast<int>(min(p.height - row, static_cast<int64_t>(most_rows)));
    const int vectors = min(p.vectors - vector, most_vectors);
    const int64_t first = (matrix * p.height + row) * p.vectors + vector;
    const auto for_each = [&](auto use) {
      for (int i = threadIdx.x; i < rows * vectors; i += kThreads)
        use(first + static_cast<int64_t>(i / vectors) * p.vectors + i % vectors);
    };
    float largest = 0.0f;
    for_each([&](int64_t at) { largest = larger(largest, largest_of<Element>(p.x[at])); });
    const float scale = scale_of(largest_over_cta(largest, warps), p.to.e5m2, p.to.ue8m0);
    if (threadIdx.x == 0) p.to.scales[area] = scale;
    for_each([&](int64_t at) { store<Element>(p, at, p.x[at], 1.0f / scale); });
  }
}

template <class Use>
FLUX_DEVICE void for_each_vector(const QuantizeParams& p, Use use) {
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < p.rows * p.vectors;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    use(at);
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) largest_of_tensor(const __grid_constant__ QuantizeParams p) {
  begin();
  __shared__ float warps[kThreads / 32];
  float largest = 0.0f;
  for_each_vector(p, [&](int64_t at) { largest = larger(largest, largest_of<Element>(p.x[at])); });
  largest = largest_over_cta(largest, warps);
  if (threadIdx.x == 0) leave_part(p.to, blockIdx.x, largest);
}

// With the given scale, or with that of the parts that an earlier launch has left.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantize_tensor(const __grid_constant__ QuantizeParams p) {
  begin();
  __shared__ float warps[kThreads / 32];
  float scale;
  if (p.to.given != nullptr) {
    scale = *p.to.given;
  } else {
    const int parts = static_cast<int>(__float_as_uint(p.to.parts[0]));
    float largest = 0.0f;
    for (int i = threadIdx.x; i < parts; i += kThreads) largest = larger(largest, p.to.parts[1 + i]);
    scale = scale_of(largest_over_cta(largest, warps), p.to.e5m2, p.to.ue8m0);
    if (blockIdx.x == 0 && threadIdx.x == 0) p.to.scales[0] = scale;
  }
  for_each_vector(p, [&](int64_t at) { store<Element>(p, at, p.x[at], 1.0f / scale); });
}

runtime::Kernels kernels([] {
  runtime::load(quantize_groups<__nv_bfloat16>, quantize_groups<__half>, quantize_areas<__nv_bfloat16>,
                quantize_areas<__half>, largest_of_tensor<__nv_bfloat16>, largest_of_tensor<__half>,
                quantize_tensor<__nv_bfloat16>, quantize_tensor<__half>);
});

using Kernel = void (*)(QuantizeParams);

template <class Element>
Kernel kernel_of(Granularity granularity) {
  if (granularity == Granularity::kGroup) return quantize_groups<Element>;
  return granularity == Granularity::kTensor ? quantize_tensor<Element> : quantize_areas<Element>;
}

QuantizeParams params_of(const runtime::Matrix& x, int64_t height, const Quantized& to) {
  FLUX_CHECK(x.columns % kVector == 0 && x.row_stride == x.columns, x.columns, x.row_stride);
  FLUX_CHECK(height > 0 && x.rows % height == 0, x.rows, height);
  FLUX_CHECK(x.rows * (x.columns / kGroupVectors / kVector + 1) < INT32_MAX / 2, x.rows, x.columns);
  return {static_cast<const uint4*>(x.data), x.rows, height, static_cast<int>(x.columns / kVector), to};
}

// `threads`: as many as can be of use. Not early on a part of the SMs: the kernel before it may wait for peers there.
void launch(Kernel kernel, const QuantizeParams& params, int64_t threads, int num_sms, cudaStream_t stream) {
  kernels.load();
  const int64_t ctas =
      std::min((threads + kThreads - 1) / kThreads, static_cast<int64_t>(kCtasPerSm) * num_sms);
  runtime::Launch(static_cast<int>(ctas), kThreads, 0, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, params);
}

}  // namespace

void quantize_with_parts(const runtime::Matrix& x, runtime::DType dtype, const Quantized& to, int num_sms,
                         cudaStream_t stream) {
  const QuantizeParams params = params_of(x, x.rows, to);
  const auto kernel = runtime::is_bfloat16(dtype) ? quantize_tensor<__nv_bfloat16> : quantize_tensor<__half>;
  launch(kernel, params, params.rows * params.vectors, num_sms, stream);
}

void quantize(const runtime::Matrix& x, runtime::DType dtype, int64_t height, const Quantized& to,
              cudaStream_t stream) {
  const QuantizeParams params = params_of(x, height, to);
  const int64_t vectors = params.rows * params.vectors;
  const int num_sms = runtime::num_sms();
  FLUX_CHECK(vectors > 0, x.rows, x.columns);
  if (to.granularity == Granularity::kTensor) {
    if (to.needs_all()) {
      const auto kernel =
          runtime::is_bfloat16(dtype) ? largest_of_tensor<__nv_bfloat16> : largest_of_tensor<__half>;
      launch(kernel, params, std::min<int64_t>(vectors, kMaxParts * kThreads), num_sms, stream);
    }
    quantize_with_parts(x, dtype, to, num_sms, stream);
    return;
  }
  const auto kernel = runtime::is_bfloat16(dtype) ? kernel_of<__nv_bfloat16>(to.granularity)
                                                  : kernel_of<__half>(to.granularity);
  const int groups = ceil_div(params.vectors, kGroupVectors);
  const int64_t threads =
      to.granularity == Granularity::kToken ? params.rows * kThreads
      : to.granularity == Granularity::kGroup
          ? params.rows * groups * kGroupVectors
          : params.rows / height * ceil_div(static_cast<int>(height), kBlockRows) * groups * kThreads;
  launch(kernel, params, threads, num_sms, stream);
}

}  // namespace flux::gemm
