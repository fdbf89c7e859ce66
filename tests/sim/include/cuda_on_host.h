// CUDA C++ for g++: included before everything else when kernel sources are compiled for the host.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sim.h"

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// The engine maps a CTA's memory over the thread-local block of the program whenever it switches to that CTA.
#define __shared__ thread_local

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct dim3 : sim::Dim {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : Dim{x, y, z} {}
};

inline void __syncthreads(FLUX_SIM_HERE) { sim::cta_barrier(0, 0, true, where); }
inline void __syncwarp(uint32_t mask = ~0u, FLUX_SIM_HERE) {
  uint64_t values[32];
  sim::warp_exchange(mask, 0, values, where, /*orders=*/true);
}

template <class T>
T sim_exchange(uint32_t mask, T value, int from, const sim::Where& where) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0, values[32];
  std::memcpy(&bits, &value, sizeof(T));
  sim::warp_exchange(mask, bits, values, where);
  std::memcpy(&value, &values[from & 31], sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int = 32, FLUX_SIM_HERE) {
  return sim_exchange(mask, value, lane, where);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes, int = 32, FLUX_SIM_HERE) {
  return sim_exchange(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes, where);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int lanes, int = 32, FLUX_SIM_HERE) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return sim_exchange(mask, value, lane < lanes ? lane : lane - lanes, where);
}
inline uint32_t __ballot_sync(uint32_t mask, bool set, FLUX_SIM_HERE) {
  uint64_t values[32];
  sim::warp_exchange(mask, set, values, where);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) bits |= static_cast<uint32_t>(values[lane]) << lane;
  }
  return bits;
}
inline bool __all_sync(uint32_t mask, bool set, FLUX_SIM_HERE) {
  return __ballot_sync(mask, set, where) == mask;
}
// `result` joined with the values of all lanes of `mask`.
template <class T, class Join>
T sim_reduce(uint32_t mask, T value, T result, const sim::Where& where, Join join) {
  uint64_t values[32];
  sim::warp_exchange(mask, static_cast<uint32_t>(value), values, where);
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) result = join(result, static_cast<T>(values[lane]));
  }
  return result;
}
template <class T>
T __reduce_add_sync(uint32_t mask, T value, FLUX_SIM_HERE) {
  return sim_reduce(mask, value, T{0}, where, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(uint32_t mask, T value, FLUX_SIM_HERE) {
  return sim_reduce(mask, value, value, where, [](T a, T b) { return std::max(a, b); });
}

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __clz(uint32_t bits) { return std::countl_zero(bits); }
inline int64_t clock64() { return sim::clock_cycles(); }

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
using std::max;
using std::min;

inline void __threadfence() { sim::memory_fence(); }
inline void __threadfence_system() { sim::memory_fence(); }
template <class T>
T atomicAdd(T* address, T value, FLUX_SIM_HERE) {
  static_assert(sizeof(T) == 4);
  const auto add = [&](uint32_t old) { return old + static_cast<uint32_t>(value); };
  return static_cast<T>(sim::atomic(reinterpret_cast<uint32_t*>(address), add, where));
}
inline uint32_t atomicOr(uint32_t* address, uint32_t value, FLUX_SIM_HERE) {
  return sim::atomic(address, [&](uint32_t old) { return old | value; }, where);
}
inline uint32_t atomicExch(uint32_t* address, uint32_t value, FLUX_SIM_HERE) {
  return sim::atomic(address, [&](uint32_t) { return value; }, where);
}
inline uint32_t atomicCAS(uint32_t* address, uint32_t expected, uint32_t value, FLUX_SIM_HERE) {
  return sim::atomic(address, [&](uint32_t old) { return old == expected ? value : old; }, where);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __float2int_rn(float value) {
  return value == value ? static_cast<int>(std::nearbyint(value)) : 0;
}
inline void* __cvta_shared_to_generic(uint32_t address) { return sim::shared_pointer(address); }
