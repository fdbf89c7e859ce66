// Enough of CUDA C++ to run device code in threads of the host: one of them for each thread of a CTA. Included before
// everything else (test_device_code.py), so that ThreadSanitizer sees what a GPU's threads would do to each other.
#pragma once

#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__  // of code that is compiled here, and not run
#define FLUX_DEVICE inline

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

struct float2 {
  float x, y;
};

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx, blockIdx;
inline Dim blockDim, gridDim;

// What the threads of a CTA meet at, and what the lanes of its warps tell each other.
struct Cta {
  struct Warp {
    std::barrier<> barrier{32};
    uint32_t words[32];
  };
  struct Named {
    std::unique_ptr<std::barrier<>> barrier;
    uint32_t refused[2] = {0, 0};  // by threads that met with a false condition, in turns
  };
  std::barrier<> all;
  std::vector<std::unique_ptr<Warp>> warps;
  Named named[16];
  std::vector<uint4> shared = std::vector<uint4>(1 << 14);  // 256 KB, as an SM has

  explicit Cta(int threads) : all(threads) {
    for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Warp>());
    for (int i = 1; i < 16; ++i)
      named[i].barrier = std::make_unique<std::barrier<>>(128);  // a warpgroup each
  }
};
inline thread_local Cta* cta;

inline void __syncthreads() { cta->all.arrive_and_wait(); }
inline uint32_t __ballot_sync(uint32_t, bool there) {
  Cta::Warp& warp = *cta->warps[threadIdx.x / 32];
  warp.words[threadIdx.x % 32] = there;
  warp.barrier.arrive_and_wait();
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= warp.words[lane] << lane;
  warp.barrier.arrive_and_wait();
  return bits;
}
inline float __shfl_xor_sync(uint32_t, float value, int distance) {
  Cta::Warp& warp = *cta->warps[threadIdx.x / 32];
  warp.words[threadIdx.x % 32] = std::bit_cast<uint32_t>(value);
  warp.barrier.arrive_and_wait();
  const float other = std::bit_cast<float>(warp.words[threadIdx.x % 32 ^ distance]);
  warp.barrier.arrive_and_wait();
  return other;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __popc(uint32_t bits) { return std::popcount(bits); }

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
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
