#include "gemm/sm90/launch.cuh"

FLUX_KERNELS(flux::gemm::GemmFamily<flux::gemm::SplitStore, false>)
