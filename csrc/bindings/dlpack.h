// The part of DLPack's C exchange API (version 1) that _core uses: what a Python tensor is, without calls of Python.
#pragma once

#include <cstdint>

namespace flux::dlpack {

constexpr uint32_t kMajor = 1;
constexpr const char* kCapsule = "dlpack_exchange_api";

struct Version {
  uint32_t major, minor;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;  // of an element
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* py_object, Tensor* out);  // -1: a Python exception is set. May be null.
  void* current_work_stream;
};

}  // namespace flux::dlpack
