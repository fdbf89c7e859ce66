#include "runtime/copy_queue.h"

#include "runtime/device.h"

namespace flux::runtime {

struct CopyQueue::Queue {
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

CopyQueue::CopyQueue() : queue_(Queue::of_current_device()), lock_(queue_.mutex) {}

void CopyQueue::follow(cudaStream_t stream) {
  submit();
  FLUX_CUDA_CHECK(cudaEventRecord(queue_.begin, stream));
  FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.stream, queue_.begin));
  if (!queue_.announces) return;
  // An announcement of the previous call must not overwrite one of this call.
  FLUX_CUDA_CHECK(cudaEventRecord(queue_.announced, queue_.aside));
  FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.stream, queue_.announced));
  queue_.announces = false;
}

void CopyQueue::copy(void* dst, const void* src, int64_t bytes) {
  submit();
  FLUX_CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, queue_.stream));
}

void CopyQueue::copy_rows(void* dst, int64_t dst_pitch, const void* src, int64_t src_pitch, int64_t bytes,
                          int rows) {
  if (rows == 1) return copy(dst, src, bytes);
  submit();
  FLUX_CUDA_CHECK(
      cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, bytes, rows, cudaMemcpyDefault, queue_.stream));
}

void CopyQueue::write(uint32_t* address, uint32_t value) {
  // The default flag includes a memory barrier, so the write is ordered after all earlier copies of the stream.
  next_word().writeValue = {CU_STREAM_MEM_OP_WRITE_VALUE_32,
                            reinterpret_cast<CUdeviceptr>(address),
                            {value},
                            CU_STREAM_WRITE_VALUE_DEFAULT,
                            0};
}

void CopyQueue::announce(uint32_t* address, uint32_t value) {
  submit();
  FLUX_CUDA_CHECK(cudaEventRecord(queue_.copied, queue_.stream));
  FLUX_CUDA_CHECK(cudaStreamWaitEvent(queue_.aside, queue_.copied));
  write(address, value);
  submit_to(queue_.aside);
  queue_.announces = true;
}

void CopyQueue::wait(const uint32_t* address, uint32_t value) {
  next_word().waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32,
                           reinterpret_cast<CUdeviceptr>(address),
                           {value},
                           CU_STREAM_WAIT_VALUE_GEQ,
                           0};
}

void CopyQueue::join(cudaStream_t stream) {
  submit();
  FLUX_CUDA_CHECK(cudaEventRecord(queue_.done, queue_.stream));
  FLUX_CUDA_CHECK(cudaStreamWaitEvent(stream, queue_.done));
}

CUstreamBatchMemOpParams& CopyQueue::next_word() {
  if (num_words_ == kMaxWords) submit();
  CUstreamBatchMemOpParams& word = words_[num_words_++];
  word = {};
  return word;
}

void CopyQueue::submit() { submit_to(queue_.stream); }

void CopyQueue::submit_to(cudaStream_t stream) {
  if (num_words_ == 0) return;
  using Batch = decltype(&cuStreamBatchMemOp);
  static const auto batch = reinterpret_cast<Batch>(driver_function("cuStreamBatchMemOp"));
  const CUresult status = batch(stream, num_words_, words_, 0);
  num_words_ = 0;
  FLUX_CHECK(status == CUDA_SUCCESS, static_cast<int>(status));
}

}  // namespace flux::runtime
