// Markers of functions, and checks.
#pragma once

#include <sstream>
#include <stdexcept>

// What is marked FLUX_HD also compiles with g++: tests enumerate it.
#ifdef __CUDACC__
#define FLUX_HD __host__ __device__ __forceinline__
#define FLUX_DEVICE __device__ __forceinline__
#else
#define FLUX_HD inline
#endif

namespace flux::runtime {

// An invariant of the native code does not hold. Python has already checked the user's arguments, so this is a bug in
// flux or an error of the driver. The message contains the values.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Values>
[[noreturn]] void fail(const char* file, int line, const char* what, const Values&... values) {
  std::ostringstream out;
  out << "flux: " << what;
  ((out << " " << values), ...);
  out << " (" << file << ":" << line << ")";
  throw Error(out.str());
}

}  // namespace flux::runtime

#define FLUX_CHECK(condition, ...)                                                        \
  do {                                                                                    \
    if (!(condition)) ::flux::runtime::fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

#define FLUX_CUDA_CHECK(call)                                                        \
  do {                                                                               \
    const cudaError_t status_ = (call);                                              \
    if (status_ != cudaSuccess) {                                                    \
      cudaGetLastError(); /* or the next call would be taken to have failed */       \
      ::flux::runtime::fail(__FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
    }                                                                                \
  } while (0)
