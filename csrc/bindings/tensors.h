// Conversions from torch tensors, for the ops.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

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

// Kernels support only bf16 and fp16; Python has checked the dtype.
inline runtime::DType dtype_of(const torch::stable::Tensor& tensor) {
  return tensor.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? runtime::DType::kBFloat16
                                                                         : runtime::DType::kFloat16;
}

// Converts the address of a SymmBuffer, which Python passes as an integer.
inline const runtime::SymmBuffer& symm_buffer_at(int64_t address) {
  return *reinterpret_cast<const runtime::SymmBuffer*>(address);
}

}  // namespace flux::bindings
