#include "gemm/sm90/instances.cuh"
#include "moe/grouped_launch.cuh"

template class flux::gemm::KernelTable<flux::moe::GroupedFamily<flux::moe::OrderedRows, true>>;
template class flux::gemm::KernelTable<flux::moe::GroupedFamily<flux::moe::ScaledIndexedRows, true>>;
