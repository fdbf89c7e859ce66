// Signals between processes of one host: 32-bit words in shared memory, named by their address because Python
// maps them. The CPU path waits with these where kernels wait with ld.acquire.sys, so both run the same
// protocol.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

namespace flux::runtime {

using Clock = std::chrono::steady_clock;

inline uint32_t* word_at(uint64_t address) { return reinterpret_cast<uint32_t*>(address); }

// What this thread wrote before becomes visible to whoever acquires the value.
inline void store_release(uint64_t address, uint32_t value) {
  __atomic_store_n(word_at(address), value, __ATOMIC_RELEASE);
}

inline uint32_t load_acquire(uint64_t address) { return __atomic_load_n(word_at(address), __ATOMIC_ACQUIRE); }

// Returns the value before the addition.
inline uint32_t fetch_add(uint64_t address, uint32_t n) {
  return __atomic_fetch_add(word_at(address), n, __ATOMIC_ACQ_REL);
}

// Epochs wrap around, so they are compared by their distance.
inline bool reached(uint32_t seen, uint32_t epoch) { return static_cast<int32_t>(seen - epoch) >= 0; }

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until the word has reached `epoch` or `timeout` has passed; returns the value last seen, acquired. A
// peer that is about to signal is met by the short spin; one that shares this core needs the yields; one that
// is busy for long costs nothing but a wake-up every 50 us. `poll` is called about every 50 ms and may throw
// to end the wait.
template <class Poll>
uint32_t wait_at_least(uint64_t address, uint32_t epoch, Clock::duration timeout, Poll&& poll) {
  constexpr int kSpins = 200, kYields = 64;
  constexpr auto kSleep = std::chrono::microseconds(50);
  constexpr auto kPollEvery = std::chrono::milliseconds(50);

  uint32_t seen = load_acquire(address);
  for (int i = 0; i < kSpins && !reached(seen, epoch); ++i) {
    cpu_relax();
    seen = load_acquire(address);
  }
  if (reached(seen, epoch)) return seen;

  const auto start = Clock::now();
  auto next_poll = start + kPollEvery;
  for (int i = 0;; ++i) {
    seen = load_acquire(address);
    const auto now = Clock::now();
    if (reached(seen, epoch) || now - start >= timeout) return seen;
    if (now >= next_poll) {
      poll();
      next_poll = now + kPollEvery;
    }
    if (i < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
}

}  // namespace flux::runtime
