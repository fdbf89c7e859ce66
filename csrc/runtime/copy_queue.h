// Copies between GPUs by copy engines, which need no SM, and the words by which kernels and copies wait for
// each other.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

namespace flux::runtime {

// A stream of copies of the current device, held for this thread while the object lives. What is enqueued here
// runs in order.
//
// One stream, one peer after the other. If all ranks send to all peers at once, on a stream for each peer,
// copies have less bandwidth (docs/design/gemm-rs.md#copy-engines).
class CopyQueue {
 public:
  CopyQueue();

  // Later work of this queue waits for the work that is on `stream` now.
  void follow(cudaStream_t stream);
  void copy(void* dst, const void* src, int64_t bytes);
  // Writes the word after all earlier copies are visible, to this GPU and to others.
  void write(uint32_t* address, uint32_t value);
  // The same, but later work of this queue does not wait for it.
  void announce(uint32_t* address, uint32_t value);
  // Waits until a kernel has raised the word to `value`.
  void wait(const uint32_t* address, uint32_t value);
  // Later work on `stream` waits for the work that is in this queue now.
  void join(cudaStream_t stream);
  // Must be the last call, unless that is join. Consecutive writes and waits of words are batched into one
  // driver call, because each driver call costs the host some microseconds.
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
