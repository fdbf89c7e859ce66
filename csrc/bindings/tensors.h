// Conversions from torch tensors, for the ops.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "gemm/gemm.h"
#include "gemm/tile_config.h"
#include "runtime/check.h"
#include "runtime/symm_buffer.h"
#include "runtime/tensor_map.h"

// Weak: a CPU-only torch lacks it, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

namespace flux::bindings {

// torch's current stream on the device of a tensor.
inline cudaStream_t current_stream(const torch::stable::Tensor& tensor) {
  FLUX_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch was built without CUDA");
  void* stream = nullptr;
  FLUX_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
             "no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// Python has checked that kernels take it.
inline runtime::DType dtype_of(const torch::stable::Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return runtime::DType::kE4M3;
    case ScalarType::Float8_e5m2:
      return runtime::DType::kE5M2;
    case ScalarType::Float:
      return runtime::DType::kFloat32;
    case ScalarType::BFloat16:
      return runtime::DType::kBFloat16;
    default:
      return runtime::DType::kFloat16;
  }
}

// Scales of fp8 operands as Python passes them: vectors of one scale, or of one for each row of x and each column of the
// result; or matrices of block scales, x's with its columns one after the other.
inline gemm::Scales scales_of(const torch::stable::Tensor& x,
                              const std::optional<torch::stable::Tensor>& scale_x,
                              const std::optional<torch::stable::Tensor>& scale_w, bool fast) {
  gemm::Scales scales;
  FLUX_CHECK(scale_x.has_value() == runtime::is_fp8(dtype_of(x)), scale_x.has_value());
  FLUX_CHECK(scale_x.has_value() == scale_w.has_value(), scale_w.has_value());
  if (!scale_x.has_value()) return scales;
  scales.x = static_cast<const float*>(scale_x->data_ptr());
  scales.weight = static_cast<const float*>(scale_w->data_ptr());
  scales.blocks = scale_x->dim() == 2;
  scales.x_dtype = dtype_of(x);
  scales.fast = fast;
  if (scales.blocks) {
    // The stride of a single column may be any number in torch.
    const int64_t rows = scale_x->size(0), columns = scale_x->size(1);
    scales.x_stride = columns == 1 ? (rows + 3) / 4 * 4 : scale_x->stride(1);
    FLUX_CHECK(columns * gemm::kScaleBlock == x.size(1) && scales.x_stride % 4 == 0, columns,
               scales.x_stride);
  } else {
    scales.x_step = scale_x->numel() > 1 ? 1 : 0;
    scales.weight_step = scale_w->numel() > 1 ? 1 : 0;
  }
  return scales;
}

// Converts the address of a SymmBuffer, which Python passes as an integer.
inline const runtime::SymmBuffer& symm_buffer_at(int64_t address) {
  return *reinterpret_cast<const runtime::SymmBuffer*>(address);
}

}  // namespace flux::bindings
