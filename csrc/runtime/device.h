// Properties of the current GPU, and access to driver functions without linking libcuda, because the library must
// load on machines without a driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

constexpr int kMaxDevices = 64;

int current_device();                     // its index, below kMaxDevices
int num_sms();                            // of the current device; cached
void* driver_function(const char* name);  // a cuXxx entry point; throws an error that names the needed driver

// The SMs that a call may use: the given number, or all.
inline int usable_sms(int given_sms) { return given_sms > 0 ? given_sms : num_sms(); }

// A launch that is limited to some of the SMs must not start early, because it would occupy other SMs meanwhile.
inline bool may_start_early(int given_sms) { return given_sms >= num_sms(); }

// Calls a function once per device. Use it as a static object.
class OncePerDevice {
 public:
  template <class Function>
  void operator()(Function function) {
    std::atomic<bool>& done = done_[current_device()];
    if (done.load(std::memory_order_acquire)) return;
    function();
    done.store(true, std::memory_order_release);
  }

 private:
  std::atomic<bool> done_[kMaxDevices] = {};
};

}  // namespace flux::runtime
