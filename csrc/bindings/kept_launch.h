// Launches that are kept, to be enqueued again with other tensors (runtime/launch_table.h).
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/tensors.h"
#include "runtime/tensor_map.h"

namespace flux::bindings {

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

inline void* address_of(const torch::stable::Tensor& tensor) { return tensor.data_ptr(); }
inline void* address_of(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor.has_value() ? tensor->data_ptr() : nullptr;
}

// The addresses of tensors, in their order.
template <class... Tensors>
std::array<void*, sizeof...(Tensors)> addresses_of(const Tensors&... tensors) {
  return {address_of(tensors)...};
}

// Enqueues a launch on the current stream of a tensor's device, or keeps it. launch(addresses, copy_epoch, stream) takes
// nothing but sizes and options from elsewhere.
template <class All, class Launch>
void enqueue(const torch::stable::Tensor& on, const All& at, int64_t copy_epoch, Launch launch) {
  if (keeper == nullptr) {
    const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
    launch(at.data(), static_cast<uint32_t>(copy_epoch), current_stream(on));
    return;
  }
  struct Kept final : KeptLaunch {
    explicit Kept(Launch kept) : launch(std::move(kept)) {}
    void run(Addresses at, uint32_t copy_epoch, cudaStream_t stream) override {
      launch(at, copy_epoch, stream);
    }
    Launch launch;
  };
  keeper->push_back(std::make_unique<Kept>(std::move(launch)));
}

// The same for launch(addresses, stream), which uses no copy engine.
template <class All, class Launch>
void enqueue(const torch::stable::Tensor& on, const All& at, Launch launch) {
  enqueue(on, at, 0, [launch = std::move(launch)](Addresses a, uint32_t, cudaStream_t stream) mutable {
    launch(a, stream);
  });
}

}  // namespace flux::bindings
