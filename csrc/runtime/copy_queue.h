// Copies between GPUs by copy engines, which need no SM. Kernels and copies synchronise through 32-bit words.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>

#include "runtime/device.h"

namespace flux::runtime {

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
    next_word().writeValue = {
        CU_STREAM_MEM_OP_WRITE_VALUE_32, at(address), {value}, CU_STREAM_WRITE_VALUE_DEFAULT};
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
    next_word().waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, at(address), {value}, CU_STREAM_WAIT_VALUE_GEQ};
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

  static CUdeviceptr at(const uint32_t* address) { return reinterpret_cast<CUdeviceptr>(address); }

  CUstreamBatchMemOpParams& next_word() {
    if (num_words_ == kMaxWords) submit();
    return words_[num_words_++] = {};
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
