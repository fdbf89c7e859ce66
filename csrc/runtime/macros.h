// The only header that depends on the compiler. What is marked FLUX_HD also compiles with g++: tests enumerate it.
#pragma once

#ifdef __CUDACC__
#define FLUX_HD __host__ __device__ __forceinline__
#define FLUX_DEVICE __device__ __forceinline__
#else
#define FLUX_HD inline
#endif
