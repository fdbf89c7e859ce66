#include "runtime/device.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

int current_device() {
  int device = 0;
  FLUX_CUDA_CHECK(cudaGetDevice(&device));
  FLUX_CHECK(device < kMaxDevices, device);
  return device;
}

int num_sms() {
  static std::atomic<int> cache[kMaxDevices];
  const int device = current_device();
  int count = cache[device];
  if (count == 0) {
    FLUX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    cache[device] = count;
  }
  return count;
}

void* driver_function(const char* name) {
  constexpr unsigned kDriverVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  FLUX_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found));
  FLUX_CHECK(found == cudaDriverEntryPointSuccess && function != nullptr, "the CUDA driver lacks", name);
  return function;
}

}  // namespace flux::runtime
