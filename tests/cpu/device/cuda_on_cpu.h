// Enough of CUDA C++ to run device code in threads of the host: one of them for each thread of a CTA. Included before
// everything else (test_device_code.py), so that ThreadSanitizer sees what a GPU's threads would do to each other.
#pragma once

#include <barrier>
#include <cstdint>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define FLUX_DEVICE inline

struct uint4 {
  uint32_t x, y, z, w;
};

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx, blockIdx;
inline Dim blockDim, gridDim;
inline thread_local std::barrier<>* cta;

inline void __syncthreads() { cta->arrive_and_wait(); }
// Atomics below order everything, which ThreadSanitizer understands; fences it does not.
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicExch(uint32_t* address, uint32_t value) {
  return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicCAS(uint32_t* address, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
