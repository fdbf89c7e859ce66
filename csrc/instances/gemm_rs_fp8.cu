#include "gemm/sm90/launch.cuh"
#include "gemm_rs/store.cuh"

FLUX_KERNELS(flux::gemm::GemmFamily<flux::gemm_rs::SlotStore, true>)
