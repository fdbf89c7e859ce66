// Of the current GPU, and driver functions without linking libcuda: the library must load where there is no driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

constexpr int kMaxDevices = 64;

// Its index, below kMaxDevices.
inline int current_device() {
  int device = 0;
  FLUX_CUDA_CHECK(cudaGetDevice(&device));
  FLUX_CHECK(device < kMaxDevices, device);
  return device;
}

// Of the current device; cached.
inline int num_sms() {
  static std::atomic<int> cache[kMaxDevices];
  const int device = current_device();
  int count = cache[device];
  if (count == 0) {
    FLUX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    cache[device] = count;
  }
  return count;
}

// A cuXxx entry point; throws an error that names the needed driver.
inline void* driver_function(const char* name) {
  constexpr unsigned kDriverVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  FLUX_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found));
  FLUX_CHECK(found == cudaDriverEntryPointSuccess && function != nullptr, "the CUDA driver lacks", name);
  return function;
}

// The SMs that a call may use: the given number, or all.
inline int usable_sms(int given_sms) { return given_sms > 0 ? given_sms : num_sms(); }

// A launch that is limited to some of the SMs must not start early, because it would occupy other SMs meanwhile.
inline bool may_start_early(int given_sms) { return given_sms >= num_sms(); }

// The kernels of a file, a static object. A call that waits for peers loads all of them before: lazy loading would wait
// for a kernel that spins on a peer, and may be forbidden during capture.
class Kernels {
 public:
  explicit Kernels(void (*load)()) : load_(load), next_(newest_) { newest_ = this; }
  Kernels(const Kernels&) = delete;
  void load() {
    std::atomic<bool>& loaded = loaded_[current_device()];
    if (loaded.load(std::memory_order_acquire)) return;
    load_();
    loaded.store(true, std::memory_order_release);
  }
  static void load_all() {
    for (Kernels* each = newest_; each != nullptr; each = each->next_) each->load();
  }

 private:
  static inline Kernels* newest_ = nullptr;
  void (*const load_)();
  Kernels* const next_;
  std::atomic<bool> loaded_[kMaxDevices] = {};
};

}  // namespace flux::runtime
