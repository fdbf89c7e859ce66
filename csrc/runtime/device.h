// Facts about the current GPU and the way to driver functions without linking libcuda: the library must load
// where there is no driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

int num_sms();                            // of the current device; cached
void* driver_function(const char* name);  // cuXxx entry point, or an error that says which driver it needs

// Programmatic dependent launch: the kernel comes onto the GPU while the stream's kernel before it still runs, and waits
// for that one's results where it needs them (ptx::wait_for_earlier_kernels).
inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
// Not where the launch was given a part of the SMs: it must not take others meanwhile.
inline bool may_start_early(int given_sms) { return given_sms >= num_sms(); }

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
