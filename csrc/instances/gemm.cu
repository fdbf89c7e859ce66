#include "gemm/sm90/instances.cuh"
#include "gemm/sm90/launch.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm::LocalStore, false>>;
