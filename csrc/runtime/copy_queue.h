// Copies between GPUs by copy engines, which need no SM. Kernels and copies synchronise through 32-bit words.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

namespace flux::runtime {

// Exclusive access of this thread to the copy stream of the current device, for the lifetime of the object. Work runs
// in order. One stream, one peer after the other: copies to all peers at once have less bandwidth
// (docs/design/gemm-rs.md#copy-engines).
class CopyQueue {
 public:
  CopyQueue();

  // Later work of this queue waits for the work that is on `stream` now.
  void follow(cudaStream_t stream);
  void copy(void* dst, const void* src, int64_t bytes);
  // Rows of `bytes` each; pitches are the bytes from one to the next.
  void copy_rows(void* dst, int64_t dst_pitch, const void* src, int64_t src_pitch, int64_t bytes, int rows);
  // Writes the word after all earlier copies are visible, to this GPU and to others.
  void write(uint32_t* address, uint32_t value);
  // As write, but later work of this queue does not wait for it.
  void announce(uint32_t* address, uint32_t value);
  // Waits until a kernel has raised the word to `value`.
  void wait(const uint32_t* address, uint32_t value);
  // Later work on `stream` waits for the work that is in this queue now.
  void join(cudaStream_t stream);
  // Must be the last call, unless that is join. Consecutive words are one driver call, each of which costs the host
  // microseconds.
  void submit();

 private:
  struct Queue;
  CUstreamBatchMemOpParams& next_word();
  void submit_to(cudaStream_t stream);

  static constexpr int kMaxWords = 8;
  Queue& queue_;
  CUstreamBatchMemOpParams words_[kMaxWords];
  int num_words_ = 0;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace flux::runtime
