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

struct NamedOp {
  const char* name;
  OpId id;
};
constexpr NamedOp kOps[] = {
    {"gemm_rs", kGemmRs},
    {"ag_gemm", kAgGemm},
    {"all_gather", kAllGather},
    {"gemm_ar", kGemmAr},
    {"all_reduce", kAllReduce},
    {"moe.route", kRoute},
    {"moe.ag_scatter_gemm", kAgScatterGemm},
    {"moe.gemm_gather_rs", kGemmGatherRs},
    {"reduce_scatter", kReduceScatter},
};

}  // namespace flux::runtime
