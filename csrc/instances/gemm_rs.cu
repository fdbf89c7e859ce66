#include "gemm/sm90/instances.cuh"
#include "gemm_rs/store.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm_rs::SlotStore, false>>;
