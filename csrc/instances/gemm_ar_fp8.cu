#include "gemm/sm90/instances.cuh"
#include "gemm/sm90/launch.cuh"
#include "gemm/sm90/launch_swap_ab.cuh"
#include "gemm_ar/exchange_store.cuh"

template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm_ar::ExchangeStore<false>, true>>;
template class flux::gemm::KernelTable<flux::gemm::GemmFamily<flux::gemm_ar::ExchangeStore<true>, true>>;
template class flux::gemm::KernelTable<flux::gemm::SwapAbFamily<flux::gemm::ExchangeOutput, true>>;
