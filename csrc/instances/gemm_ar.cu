#include "gemm/sm90/instances.cuh"
#include "gemm/sm90/launch.cuh"
#include "gemm_ar/exchange_store.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm_ar::ExchangeStore<false>, false>>;
template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm_ar::ExchangeStore<true>, false>>;
