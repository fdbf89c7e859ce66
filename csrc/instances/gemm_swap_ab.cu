#include "gemm/sm90/launch_swap_ab.cuh"

FLUX_KERNELS(flux::gemm::SwapAbFamily<flux::gemm::LocalOutput, false>)
