// The one way to launch a kernel. For CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/check.h"

namespace flux::runtime {

template <class... Functions>
void load(Functions*... kernels) {
  cudaFuncAttributes unused;
  for (const cudaError_t status : {cudaFuncGetAttributes(&unused, kernels)...}) FLUX_CUDA_CHECK(status);
}

class Launch {
 public:
  Launch(int ctas, int threads, int smem_bytes, cudaStream_t stream) {
    config_.gridDim = ctas;
    config_.blockDim = threads;
    config_.dynamicSmemBytes = smem_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
  }
  Launch(const Launch&) = delete;  // the configuration points at the attributes

  Launch& cluster(int size) {
    auto& dimension = add(cudaLaunchAttributeClusterDimension).val.clusterDim;
    dimension.x = size;
    dimension.y = dimension.z = 1;
    return *this;
  }
  // Programmatic dependent launch: starts while the previous kernel runs, and waits in ptx::wait_for_earlier_kernels.
  Launch& early_start(bool allowed) {
    if (allowed)
      add(cudaLaunchAttributeProgrammaticStreamSerialization).val.programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  // Fails, instead of hanging at a grid barrier, if not all CTAs can be resident at once.
  Launch& cooperative() {
    add(cudaLaunchAttributeCooperative).val.cooperative = 1;
    return *this;
  }

  template <class... Parameters, class... Arguments>
  void run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    FLUX_CUDA_CHECK(cudaLaunchKernelEx(&config_, kernel, arguments...));
  }
  template <class... Parameters>
  int max_active_clusters(void (*kernel)(Parameters...)) const {
    int count = 0;
    FLUX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &config_));
    return count;
  }

 private:
  cudaLaunchAttribute& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute;
  }

  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[3] = {};
};

}  // namespace flux::runtime
