// The part of the CUDA runtime that csrc uses. Engine files implement it (engine/host.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda.h"
#include "sim.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorCooperativeLaunchTooLarge = 720 };
using cudaStream_t = CUstream;
struct SimEvent;
using cudaEvent_t = SimEvent*;

inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "invalid";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

constexpr uint64_t cudaEnableDefault = 0;
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             uint64_t flags, cudaDriverEntryPointQueryResult* found);

constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaDeviceSynchronize();
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed, cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  struct Size {
    unsigned x = 1, y = 1, z = 1;
    Size& operator=(int count) {
      x = static_cast<unsigned>(count);
      return *this;
    }
  } gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
cudaError_t sim_set_shared_limit(const void* kernel, int bytes);
sim::LaunchConfig sim_config(const cudaLaunchConfig_t& config);
cudaError_t sim_max_active_clusters(int* count, const cudaLaunchConfig_t& config);

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  return sim_set_shared_limit(reinterpret_cast<const void*>(kernel), value);
}
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  *attributes = {};
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Parameters...),
                                           const cudaLaunchConfig_t* config) {
  return sim_max_active_clusters(count, *config);
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const bool fits =
      sim::launch(reinterpret_cast<const void*>(kernel), sim_config(*config), [=] { kernel(arguments...); });
  return fits ? cudaSuccess : cudaErrorCooperativeLaunchTooLarge;
}
