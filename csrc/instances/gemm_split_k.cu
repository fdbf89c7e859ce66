#include "gemm/sm90/instances.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm::SplitStore, false>>;
