// Stands in for csrc/runtime/device/ptx.cuh in threads of the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace flux::ptx {

inline uint32_t lane() { return threadIdx.x % 32; }
inline uint64_t globaltimer_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
inline void named_barrier_sync(int id, int) { cta->named[id].barrier->arrive_and_wait(); }
// The word of the next turn is cleared between two meetings, when nobody looks at it.
inline bool named_barrier_and(int id, int, bool condition) {
  thread_local int turns[16] = {};
  const int turn = turns[id] ^= 1;
  Cta::Named& named = cta->named[id];
  if (!condition) __atomic_store_n(&named.refused[turn], 1, __ATOMIC_RELAXED);
  named.barrier->arrive_and_wait();
  const bool all = __atomic_load_n(&named.refused[turn], __ATOMIC_RELAXED) == 0;
  __atomic_store_n(&named.refused[turn ^ 1], 0, __ATOMIC_RELAXED);
  return all;
}
inline void fence_proxy_async() {}
inline void wait_for_earlier_kernels() {}
inline void store_release_sys(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void add_release_sys(uint32_t* address, uint32_t value) {
  __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
}
// Who waits asks again and again; the few cores of a host are then for others.
inline uint32_t load_acquire_sys(const uint32_t* address) {
  std::this_thread::yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline uint32_t load_relaxed(const uint32_t* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }

// Vectors whose words say by themselves that they are there (runtime/device/exchange.cuh). No word orders another.
inline void store_relaxed_sys(char* address, const uint4& v) {
  auto* const words = reinterpret_cast<uint32_t*>(address);
  const uint32_t values[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) __atomic_store_n(words + i, values[i], __ATOMIC_RELAXED);
}
inline uint4 load_relaxed_sys(const char* address) {
  std::this_thread::yield();
  const auto* const words = reinterpret_cast<const uint32_t*>(address);
  uint32_t values[4];
  for (int i = 0; i < 4; ++i) values[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
  return {values[0], values[1], values[2], values[3]};
}

}  // namespace flux::ptx
