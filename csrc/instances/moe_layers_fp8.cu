#include "gemm/sm90/instances.cuh"
#include "moe/arriving_rows.cuh"
#include "moe/combining_rows.cuh"
#include "moe/grouped_launch.cuh"

template class flux::gemm::KernelTable<flux::moe::GroupedFamily<flux::moe::ScaledArrivingRows, true>>;
template class flux::gemm::KernelTable<flux::moe::GroupedFamily<flux::moe::CombiningRows, true>>;
