#include "gemm/sm90/instances.cuh"
#include "gemm/sm90/launch_swap_ab.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm::LocalStore, true>>;
template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm::SplitStore, true>>;
template class flux::gemm::KernelTable<flux::gemm::SwapAbFamily<flux::gemm::LocalOutput, true>>;
