// Ids of operators in the headers of calls and in the records of timeouts. Python takes them from here.
#pragma once

#include <cstdint>

namespace flux::runtime {

enum OpId : uint32_t {
  kGemmRs = 1,
  kAgGemm,
  kAllGather,
  kGemmAr,
  kAllReduce,
  kRoute,
  kAgScatterGemm,
  kGemmGatherRs,
  kReduceScatter,
};

// From the id 1 on.
constexpr const char* kOpNames[] = {
    "gemm_rs",        "ag_gemm",   "all_gather",          "gemm_ar",
    "all_reduce",     "moe.route", "moe.ag_scatter_gemm", "moe.gemm_gather_rs",
    "reduce_scatter",
};
static_assert(sizeof(kOpNames) / sizeof(kOpNames[0]) == kReduceScatter);

}  // namespace flux::runtime
