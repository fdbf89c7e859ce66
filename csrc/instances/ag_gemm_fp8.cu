#include "ag_gemm/gather.cuh"
#include "gemm/sm90/launch.cuh"

FLUX_KERNELS(flux::gemm::GemmFamily<flux::ag_gemm::ScaledGatherStore, true>)
