// How host code uses a GPU: kernels, their launches, the tensor maps among their arguments, and copy engines. Driver
// functions are not linked: the library must load where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/macros.h"

namespace flux::runtime {

// --- the current device ---

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

// --- kernels and their launches ---

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

// --- matrices, and TMA descriptors of row-major ones ---

enum class DType { kBFloat16, kFloat16, kFloat32, kE4M3, kE5M2 };
constexpr bool is_fp8(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; }
constexpr int element_bytes(DType dtype) { return is_fp8(dtype) ? 1 : dtype == DType::kFloat32 ? 4 : 2; }

// Which of the two types of 16 bits; the kernels have no third.
inline bool is_bfloat16(DType dtype) {
  FLUX_CHECK(dtype == DType::kBFloat16 || dtype == DType::kFloat16, static_cast<int>(dtype));
  return dtype == DType::kBFloat16;
}

struct Matrix {
  const void* data;
  int64_t rows, columns;
  int64_t row_stride;  // in elements; the last dimension is contiguous
};

// A matrix of the same shape elsewhere.
inline Matrix at(const void* address, const Matrix& like) {
  return {address, like.rows, like.columns, like.row_stride};
}

// `count` matrices of equal sizes, one every `step` elements.
struct Matrices {
  Matrix first;
  int64_t count, step;
};

// A matrix whose rows are `count` shards of equal height.
inline Matrices shards_of(const Matrix& matrix, int count) {
  const int64_t rows = matrix.rows / count;
  return {{matrix.data, rows, matrix.columns, matrix.row_stride}, count, rows * matrix.row_stride};
}

// A box is stored row by row, with the swizzle of the row's size: 32, 64 or 128 bytes. Outside the matrix are zeros.
CUtensorMap make_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows);

// Tensor map of fp32 vectors, one in each row of the matrix. A box is a part of one of them, not swizzled.
CUtensorMap make_vector_map(const Matrix& vectors, int box_columns);

// Of several matrices. The number of the matrix is the third coordinate, so a box does not cross from one into the next.
CUtensorMap make_tensor_map(const Matrices& matrices, DType dtype, int box_columns, int box_rows);

// The tensor maps of a launch that is repeated with other tensors of the same sizes: mostly, only addresses change.
class KeptTensorMaps {
 public:
  // While it lives, tensor maps that this thread makes are kept, or taken from those kept, in their order.
  class Scope {
   public:
    explicit Scope(KeptTensorMaps& maps);
    ~Scope();
    Scope(const Scope&) = delete;
  };

  using Geometry = std::array<int64_t, 10>;  // what a map is made of, besides its address
  template <class Make>
  CUtensorMap next(const void* address, const Geometry& geometry, const Make& make);

 private:
  struct Kept {
    const void* address;
    Geometry geometry;
    CUtensorMap map;
  };
  std::vector<Kept> maps_;
  size_t next_ = 0;
};

// --- copy engines, which need no SM ---

// Exclusive access to the copy stream of the current device, for the lifetime of the object. One peer after the other:
// copies to all at once have less bandwidth (docs/design/gemm-rs.md#copy-engines).
class CopyQueue {
 public:
  CopyQueue() : queue_(Queue::of_current_device()), lock_(queue_.mutex) {}

  // Later work of this queue waits for the work that is on `stream` now.
  void follow(cudaStream_t stream) {
    submit();
    FLUX_CUDA_CHECK(cudaEventRecord(queue_.begin, stream));
    FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.stream, queue_.begin));
    if (!queue_.announces) return;
    // An announcement of the previous call must not overwrite one of this call.
    FLUX_CUDA_CHECK(cudaEventRecord(queue_.announced, queue_.aside));
    FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.stream, queue_.announced));
    queue_.announces = false;
  }
  void copy(void* dst, const void* src, int64_t bytes) {
    submit();
    FLUX_CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, queue_.stream));
  }
  // Rows of `bytes` each; pitches are the bytes from one to the next.
  void copy_rows(void* dst, int64_t dst_pitch, const void* src, int64_t src_pitch, int64_t bytes, int rows) {
    if (rows == 1) return copy(dst, src, bytes);
    submit();
    FLUX_CUDA_CHECK(
        cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, bytes, rows, cudaMemcpyDefault, queue_.stream));
  }
  // Writes the word after all earlier copies are visible, to this GPU and to others: the default flag includes a barrier.
  void write(uint32_t* address, uint32_t value) {
    add_word(CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  // As write, but later work of this queue does not wait for it.
  void announce(uint32_t* address, uint32_t value) {
    submit();
    FLUX_CUDA_CHECK(cudaEventRecord(queue_.copied, queue_.stream));
    FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.aside, queue_.copied));
    write(address, value);
    submit_to(queue_.aside);
    queue_.announces = true;
  }
  // Waits until a kernel has raised the word to `value`.
  void wait(const uint32_t* address, uint32_t value) {
    add_word(CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, CU_STREAM_WAIT_VALUE_GEQ);
  }
  // Later work on `stream` waits for the work that is in this queue now.
  void join(cudaStream_t stream) {
    submit();
    FLUX_CUDA_CHECK(cudaEventRecord(queue_.done, queue_.stream));
    FLUX_CUDA_CHECK(cudaStreamWaitEvent(stream, queue_.done));
  }
  // Must be the last call, unless that is join. Words are batched: each driver call costs the host microseconds.
  void submit() { submit_to(queue_.stream); }

 private:
  struct Queue {
    std::mutex mutex;
    cudaStream_t stream, aside;
    cudaEvent_t begin, copied, announced, done;
    bool announces = false;  // since the last call began

    Queue() {
      for (cudaStream_t* each : {&stream, &aside})
        FLUX_CUDA_CHECK(cudaStreamCreateWithFlags(each, cudaStreamNonBlocking));
      for (cudaEvent_t* each : {&begin, &copied, &announced, &done})
        FLUX_CUDA_CHECK(cudaEventCreateWithFlags(each, cudaEventDisableTiming));
    }

    static Queue& of_current_device() {
      static std::mutex mutex;
      static Queue* by_device[kMaxDevices];  // never deleted: the CUDA context may be destroyed first
      const int device = current_device();
      const std::lock_guard lock(mutex);
      if (by_device[device] == nullptr) by_device[device] = new Queue;
      return *by_device[device];
    }
  };

  // A word to wait for has the same fields as one to write.
  void add_word(CUstreamBatchMemOpType operation, const uint32_t* address, uint32_t value, unsigned flags) {
    if (num_words_ == kMaxWords) submit();
    auto& word = (words_[num_words_++] = {}).writeValue;
    word.operation = operation;
    word.address = reinterpret_cast<CUdeviceptr>(address);
    word.value = value;
    word.flags = flags;
  }

  void submit_to(cudaStream_t stream) {
    if (num_words_ == 0) return;
    using Batch = decltype(&cuStreamBatchMemOp);
    static const auto batch = reinterpret_cast<Batch>(driver_function("cuStreamBatchMemOp"));
    const CUresult status = batch(stream, num_words_, words_, 0);
    num_words_ = 0;
    FLUX_CHECK(status == CUDA_SUCCESS, static_cast<int>(status));
  }

  static constexpr int kMaxWords = 8;
  Queue& queue_;
  CUstreamBatchMemOpParams words_[kMaxWords];
  int num_words_ = 0;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace flux::runtime
