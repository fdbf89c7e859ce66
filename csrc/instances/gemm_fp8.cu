#include "gemm/sm90/launch_swap_ab.cuh"

FLUX_KERNELS(flux::gemm::GemmFamily<flux::gemm::LocalStore, true>)
FLUX_KERNELS(flux::gemm::GemmFamily<flux::gemm::SplitStore, true>)
FLUX_KERNELS(flux::gemm::SwapAbFamily<flux::gemm::LocalOutput, true>)
