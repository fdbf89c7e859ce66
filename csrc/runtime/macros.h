// The only place that asks which compiler reads a header: everything marked FLUX_HD also compiles with plain
// g++, so that tile orders and plans can be enumerated by CPU tests.
#pragma once

#ifdef __CUDACC__
#define FLUX_HD __host__ __device__ __forceinline__
#define FLUX_DEVICE __device__ __forceinline__
#else
#define FLUX_HD inline
#endif
