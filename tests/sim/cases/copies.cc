// The queue of copy engines by itself: calls that announce their epoch, and calls that write it in order.
#include <algorithm>

#include "case.h"
#include "runtime/device.h"

namespace cases {
namespace {

void copy_queue(uint64_t seed) {
  constexpr uint32_t kCalls = 64;
  Random random(seed);
  sim::reset_machine(machine_of(seed, 8));
  auto* const words = static_cast<uint32_t*>(sim::allocate((kCalls + 2) * sizeof(uint32_t), 0, "words"));
  sim::mark_written(words, (kCalls + 2) * sizeof(uint32_t));
  uint32_t *const sources = words, *const data = words + kCalls, *const signal = data + 1;
  std::fill(words, words + kCalls + 2, 0u);
  for (uint32_t epoch = 1; epoch <= kCalls; ++epoch) {
    sources[epoch - 1] = epoch;
    const bool announces = random.below(2) == 0;
    {
      flux::runtime::CopyQueue queue;
      queue.follow(nullptr);
      queue.copy(data, &sources[epoch - 1], sizeof(uint32_t));
      announces ? queue.announce(signal, epoch) : queue.write(signal, epoch);
      queue.join(nullptr);
    }
    if (random.below(4) != 0) continue;  // some calls follow each other, some find the streams empty
    cudaDeviceSynchronize();
    describe("signal ", *signal, ", data ", *data, " in epoch ", epoch);
    // An old epoch that lands after a newer one takes the call back for whoever waits for it.
    if (*signal != epoch || *data != epoch) wrong("an epoch landed after a newer one");
  }
}

}  // namespace

const std::vector<NamedCase> kCases = {{"copy_queue", copy_queue}};

}  // namespace cases
