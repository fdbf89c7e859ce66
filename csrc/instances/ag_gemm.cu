#include "ag_gemm/gather.cuh"
#include "gemm/sm90/instances.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::ag_gemm::GatherStore, false>>;
