// Stands in for csrc/runtime/device/ptx.cuh in threads of the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

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
inline void prefetch_line(const void*) {}
constexpr int kLineBytes = 128;

// Copies of every other group land as soon as they may, those of the others as late: when somebody waits for them.
struct Copy {
  char* to;
  const void* from;
};
inline thread_local std::vector<Copy> copies;              // of the group that is committed next
inline thread_local std::deque<std::vector<Copy>> groups;  // under way
inline char* shared_memory() { return reinterpret_cast<char*>(cta->shared.data()); }
inline uint32_t smem_addr(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory());
}
inline thread_local bool at_once = false;
inline void copy_async_16(uint32_t dst, const void* src, bool) {
  char* const to = shared_memory() + dst;
  if (at_once) {
    std::memcpy(to, src, 16);
  } else {
    copies.push_back({to, src});
  }
}
inline void copy_async_commit() {
  at_once = !at_once;
  groups.push_back(std::move(copies));
  copies.clear();
}
template <int kPending>
void copy_async_wait() {
  for (; groups.size() > kPending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
  }
}
inline void wait_for_earlier_kernels() {}
inline void let_next_kernel_start() {}
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

// Nothing is quantised here; tests/sim does that.
inline uint32_t to_e4m3(float, float, float, float) { std::abort(); }
inline uint32_t to_e5m2(float, float, float, float) { std::abort(); }

}  // namespace flux::ptx

inline void* __cvta_shared_to_generic(size_t address) { return flux::ptx::shared_memory() + address; }
