// Stands in for csrc/runtime/device/ptx.cuh in threads of the host.
#pragma once

#include <chrono>
#include <cstdint>

namespace flux::ptx {

inline uint32_t lane() { return threadIdx.x % 32; }
inline uint64_t globaltimer_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
inline void fence_proxy_async() {}
inline void store_release_sys(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void add_release_sys(uint32_t* address, uint32_t value) {
  __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
}
inline uint32_t load_acquire_sys(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline uint32_t load_relaxed(const uint32_t* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }

}  // namespace flux::ptx
