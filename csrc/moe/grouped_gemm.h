// Grouped GEMM without communication. Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/plan.h"
#include "runtime/tensor_map.h"

namespace flux::moe {

struct GroupedGemmArgs {
  runtime::Matrix x;       // [m, k], contiguous
  runtime::Matrix weight;  // [experts * n, k], contiguous
  const int32_t* offsets;  // [experts + 1]
  const int32_t* rows;     // [num_rows]: row of x for each row of the result; null: the same row
  int experts;
  int num_rows;    // rows of the result: at least offsets[experts]
  int activation;  // Activation (sm90_grouped_gemm.cuh)
  void* out;       // [num_rows, n], or n / 2 columns for swiglu
  // Scratch memory of schedule_words(...) words; need not be initialised.
  int32_t* schedule;
  runtime::DType dtype;
  int config;   // id of a tile shape; -1: the cost model chooses
  int num_sms;  // 0: all SMs
};

inline int schedule_words(int num_rows, int experts) { return 4 * (num_rows / gemm::kBlockM + experts) + 1; }

struct Schedule {
  const int32_t* offsets;  // [experts + 1]
  const TileEntry* tiles;
  const int32_t* num_tile_rows;
};

// Two launches: the tile schedule, computed on the device because it depends on the offsets, and the GEMM.
void grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream);

void prepare_grouped_gemm();

}  // namespace flux::moe
