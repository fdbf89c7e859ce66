// How _core, which knows Python, enqueues kernels of _C, which knows CUDA.
#pragma once

#include <cstdint>

namespace flux::runtime {

// A kept launch is a launch of fixed sizes that takes the addresses of its tensors anew each time.
struct LaunchTable {
  // Whether kept launches may be enqueued on a device's current stream, which it returns in `stream`. False if the
  // device is not the current one, or if the stream is being captured.
  bool (*ready)(int32_t device, void** stream);
  // Makes a stream wait for what is on another one of the device. False if it cannot, as while that is captured.
  bool (*follow)(int32_t device, void* last, void* next);
  // Enqueues a launch. Returns null, or why it failed: a text that is valid until this thread's next launch.
  const char* (*run)(void* launch, void* const* addresses, uint32_t copy_epoch, void* stream);
  void (*drop)(void* launch);
};

constexpr const char* kLaunchTableName = "flux.LaunchTable";  // of the capsule that contains its address

}  // namespace flux::runtime
