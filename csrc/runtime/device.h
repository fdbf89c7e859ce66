// Facts about the current GPU and the way to driver functions without linking libcuda: the library must load
// where there is no driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

int num_sms();                            // of the current device; cached
void* driver_function(const char* name);  // cuXxx entry point, or an error that says which driver it needs

// Does something once on each device; make it a static object.
class OncePerDevice {
 public:
  template <class Function>
  void operator()(Function function) {
    int device = 0;
    FLUX_CUDA_CHECK(cudaGetDevice(&device));
    FLUX_CHECK(device < kMaxDevices, device);
    if (done_[device].load(std::memory_order_acquire)) return;
    function();
    done_[device].store(true, std::memory_order_release);
  }

 private:
  static constexpr int kMaxDevices = 64;
  std::atomic<bool> done_[kMaxDevices] = {};
};

}  // namespace flux::runtime
