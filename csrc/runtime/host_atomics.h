// Signals between processes of one host: atomics on 32-bit words in shared memory, by address, because Python maps it.
// The CPU path uses them where kernels use ld.acquire.sys: the protocol is the same.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

namespace flux::runtime {

using Clock = std::chrono::steady_clock;

inline uint32_t* word_at(uint64_t address) { return reinterpret_cast<uint32_t*>(address); }

// Earlier writes of this thread are visible to a thread that acquires the value.
inline void store_release(uint64_t address, uint32_t value) {
  __atomic_store_n(word_at(address), value, __ATOMIC_RELEASE);
}

inline uint32_t load_acquire(uint64_t address) { return __atomic_load_n(word_at(address), __ATOMIC_ACQUIRE); }

// Epochs wrap around, so they are compared by their distance.
inline bool reached(uint32_t seen, uint32_t epoch) { return static_cast<int32_t>(seen - epoch) >= 0; }

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until the word has reached `epoch` or `timeout` has passed; returns the last value, acquired. Spins, yields to
// a peer on the same core, then sleeps. `poll` is called about every 50 ms, and may throw to end the wait.
template <class Poll>
uint32_t wait_at_least(uint64_t address, uint32_t epoch, Clock::duration timeout, Poll&& poll) {
  constexpr int kSpins = 200, kYields = 64;
  constexpr auto kSleep = std::chrono::microseconds(50);
  constexpr auto kPollEvery = std::chrono::milliseconds(50);

  for (int i = 0; i < kSpins && !reached(load_acquire(address), epoch); ++i) cpu_relax();
  const auto start = Clock::now();
  auto next_poll = start + kPollEvery;
  for (int i = 0;; ++i) {
    const uint32_t seen = load_acquire(address);
    if (reached(seen, epoch)) return seen;
    const auto now = Clock::now();
    if (now - start >= timeout) return seen;
    if (now >= next_poll) {
      poll();
      next_poll = now + kPollEvery;
    }
    if (i < kYields)
      sched_yield();
    else
      std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace flux::runtime
