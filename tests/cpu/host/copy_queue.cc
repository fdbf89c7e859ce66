// csrc/runtime/copy_queue.cc on streams of the host: every order in which a GPU may run what was enqueued must leave
// the newest epoch in a signal.

#include "runtime/copy_queue.h"

#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

struct CUevent_st {
  std::shared_ptr<bool> record = std::make_shared<bool>(true);  // the newest; before the first, nobody waits
};
struct CUstream_st {
  struct Work {
    std::function<bool()> ready;
    std::function<void()> run;
  };
  std::deque<Work> waiting;
};

namespace {

std::vector<CUstream_st*> streams;

CUstream_st* make_stream() { return streams.emplace_back(new CUstream_st); }
bool always() { return true; }

CUresult batch_mem_op(CUstream stream, unsigned count, CUstreamBatchMemOpParams* words, unsigned) {
  for (unsigned i = 0; i < count; ++i) {
    uint32_t* const address = reinterpret_cast<uint32_t*>(words[i].writeValue.address);
    const uint32_t value = words[i].writeValue.value;
    if (words[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      stream->waiting.push_back({always, [=] { *address = value; }});
    } else {
      stream->waiting.push_back({[=] { return *address >= value; }, [] {}});
    }
  }
  return CUDA_SUCCESS;
}

// Runs all that was enqueued, in an order that the streams allow.
void finish(std::mt19937& random) {
  while (true) {
    std::vector<CUstream_st*> ready;
    for (CUstream_st* stream : streams) {
      if (!stream->waiting.empty() && stream->waiting.front().ready()) ready.push_back(stream);
    }
    if (ready.empty()) return;
    CUstream_st* const chosen = ready[random() % ready.size()];
    const CUstream_st::Work work = chosen->waiting.front();
    chosen->waiting.pop_front();
    work.run();
  }
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = make_stream(), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto record = event->record = std::make_shared<bool>(false);
  stream->waiting.push_back({always, [=] { *record = true; }});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  stream->waiting.push_back({[record = event->record] { return *record; }, [] {}});
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream->waiting.push_back({always, [=] { memcpy(dst, src, bytes); }});
  return cudaSuccess;
}
}

namespace flux::runtime {
void* driver_function(const char*) { return reinterpret_cast<void*>(&batch_mem_op); }
}  // namespace flux::runtime

int main() {
  CUstream_st* const stream = make_stream();
  std::mt19937 random(1);
  for (int run = 0; run < 2000; ++run) {
    uint32_t signal = 0, data = 0;
    std::vector<uint32_t> values(4);
    for (uint32_t epoch = 1; epoch <= values.size(); ++epoch) {
      values[epoch - 1] = epoch;
      flux::runtime::CopyQueue queue;
      queue.follow(stream);
      queue.copy(&data, &values[epoch - 1], sizeof(data));
      if (random() % 2 != 0) {
        queue.announce(&signal, epoch);
      } else {
        queue.write(&signal, epoch);
      }
      queue.join(stream);
    }
    finish(random);
    if (signal != values.size() || data != values.size()) {
      std::printf("run %d: signal %u and data %u, expected %zu\n", run, signal, data, values.size());
      return 1;
    }
  }
  std::printf("all exact\n");
}
