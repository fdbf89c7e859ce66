// Copies in global memory, also to and from peers.
#pragma once

#include <cstdint>

#include "runtime/macros.h"

namespace flux::runtime {

// Called by kThreads threads. `src` null: writes all ones (NaN). `bytes`: a multiple of 16. kUnroll loads at a time.
template <int kThreads, int kUnroll = 4>
FLUX_DEVICE void copy_bytes(char* dst, const char* src, int bytes, int thread) {
  const uint4 ones = {~0u, ~0u, ~0u, ~0u};
  for (int begin = thread * 16; begin < bytes; begin += kUnroll * kThreads * 16) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = begin + i * kThreads * 16;
      if (at < bytes) values[i] = src != nullptr ? *reinterpret_cast<const uint4*>(src + at) : ones;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = begin + i * kThreads * 16;
      if (at < bytes) *reinterpret_cast<uint4*>(dst + at) = values[i];
    }
  }
}

}  // namespace flux::runtime
