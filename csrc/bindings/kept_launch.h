// For the ops: conversions from torch tensors, and launches that are kept (runtime/launch_table.h).
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "operators.h"

// Weak: a CPU-only torch lacks it, and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

namespace flux::bindings {

using runtime::SymmBuffer;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// Python has checked that kernels take it.
inline runtime::DType dtype_of(const Tensor& tensor) {
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

// Scales of fp8 operands as Python passes them: vectors of one scale, or of one for each row of x and column of the
// result; or matrices of block scales, x's with its columns one after the other.
inline gemm::Scales scales_of(const Tensor& x, const Optional& scale_x, const Optional& scale_w, bool fast) {
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

// Of the tensors of a launch, in the order of its op's arguments; null where an optional one is absent.
using Addresses = void* const*;

class KeptLaunch {
 public:
  virtual ~KeptLaunch() = default;
  virtual void run(Addresses at, uint32_t copy_epoch, cudaStream_t stream) = 0;
  runtime::KeptTensorMaps maps;
};

// What this thread's ops keep instead of enqueueing it, or null if they enqueue it.
inline thread_local std::vector<std::unique_ptr<KeptLaunch>>* keeper = nullptr;

inline void* address_of(const Tensor& tensor) { return tensor.data_ptr(); }
inline void* address_of(const Optional& tensor) { return tensor.has_value() ? tensor->data_ptr() : nullptr; }

template <class... Tensors>
std::array<void*, sizeof...(Tensors)> addresses_of(const Tensors&... tensors) {
  return {address_of(tensors)...};
}

// Enqueues a launch on the current stream of a tensor's device, or keeps it. launch(addresses, copy_epoch, stream) takes
// nothing but sizes and options from elsewhere.
template <class All, class Launch>
void enqueue(const Tensor& on, const All& at, uint32_t copy_epoch, Launch launch) {
  static_assert(std::is_trivially_destructible_v<Launch>, "it would keep a tensor");
  if (keeper == nullptr) {
    const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
    FLUX_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch was built without CUDA");
    void* stream = nullptr;
    FLUX_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
               "no current CUDA stream");
    launch(at.data(), copy_epoch, static_cast<cudaStream_t>(stream));
    return;
  }
  struct Kept final : KeptLaunch {
    explicit Kept(const Launch& kept) : launch(kept) {}
    void run(Addresses at, uint32_t copy_epoch, cudaStream_t stream) override {
      launch(at, copy_epoch, stream);
    }
    Launch launch;
  };
  keeper->push_back(std::make_unique<Kept>(launch));
}

// The same for launch(addresses, stream), which uses no copy engine.
template <class All, class Launch>
void enqueue(const Tensor& on, const All& at, Launch launch) {
  enqueue(on, at, 0, [launch](Addresses a, uint32_t, cudaStream_t stream) mutable { launch(a, stream); });
}

}  // namespace flux::bindings
