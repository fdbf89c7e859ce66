// What a quantisation to fp8 writes: by a kernel of its own (quantize.h), or behind a sum (finish.cuh).
#pragma once

#include <cstdint>

#include "runtime/macros.h"

namespace flux::gemm {

// What has one scale; in the order of python/flux/ops/quantize.py.
enum class Granularity { kTensor, kToken, kGroup, kBlock };

// A scale made of a whole tensor is found by one launch and used by the next. The first one leaves the number of its
// CTAs, as an int, and the largest absolute value that each of them has seen.
constexpr int kMaxParts = 511, kPartsFloats = 1 + kMaxParts;

struct Quantized {
  void* q = nullptr;  // contiguous; null: nothing is quantised
  // kTensor: [1]. kToken: [rows]. kGroup: [columns / 128] of scale_stride. kBlock: [rows / 128][columns / 128].
  float* scales = nullptr;
  float* parts = nullptr;        // kTensor, if not given: kPartsFloats of scratch memory
  const float* given = nullptr;  // kTensor: the scale to use; `scales` is not written
  int64_t scale_stride = 0;
  Granularity granularity = Granularity::kTensor;
  bool e5m2 = false, ue8m0 = false;

  FLUX_HD bool needs_all() const {
    return q != nullptr && granularity == Granularity::kTensor && given == nullptr;
  }
};

}  // namespace flux::gemm
