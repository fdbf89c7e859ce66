#include "runtime/device.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "runtime/check.h"

namespace flux::runtime {

int num_sms() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> cache[kMaxDevices];
  int device = 0;
  FLUX_CUDA_CHECK(cudaGetDevice(&device));
  if (device < kMaxDevices && cache[device] > 0) return cache[device];
  int count = 0;
  FLUX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kMaxDevices) cache[device] = count;
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
