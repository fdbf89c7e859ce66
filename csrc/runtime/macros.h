// The only header that depends on the compiler. Functions marked FLUX_HD also compile with g++, so that CPU tests can
// enumerate tile orders and plans.
#pragma once

#ifdef __CUDACC__
#define FLUX_HD __host__ __device__ __forceinline__
#define FLUX_DEVICE __device__ __forceinline__
#else
#define FLUX_HD inline
#endif
