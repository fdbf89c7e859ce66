// Ids of named barriers (bar.sync), of which a CTA has 16. 0 is __syncthreads. A kernel uses an id for one set of
// threads only.
#pragma once

namespace flux::gemm {

constexpr int kMathBarrier = 1;       // both warpgroups that compute, or all threads that normalise a row
constexpr int kWarpgroupBarrier = 2;  // one math warpgroup; plus its index
constexpr int kEpochBarrier = 4;      // all threads of a CTA: they have read the epoch
constexpr int kGroupBarrier = 5;      // a group of threads that sums rows of MoE layer 1; plus its index
constexpr int kNamedBarriers = 16;

}  // namespace flux::gemm
