#include "gemm/sm90/instances.cuh"
#include "moe/combining_rows.cuh"
#include "moe/grouped_launch.cuh"

template class flux::gemm::KernelTable<flux::moe::GroupedFamily<flux::moe::CombiningRows, false>>;
