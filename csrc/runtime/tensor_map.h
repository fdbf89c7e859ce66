// TMA descriptors of row-major matrices.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <vector>

#include "runtime/check.h"

namespace flux::runtime {

enum class DType { kBFloat16, kFloat16, kFloat32, kE4M3, kE5M2 };
constexpr bool is_fp8(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; }
constexpr int element_bytes(DType dtype) { return is_fp8(dtype) ? 1 : dtype == DType::kFloat32 ? 4 : 2; }

// Which of the two types of 16 bits; the kernels have no third.
inline bool is_bfloat16(DType dtype) {
  FLUX_CHECK(dtype == DType::kBFloat16 || dtype == DType::kFloat16, static_cast<int>(dtype));
  return dtype == DType::kBFloat16;
}

struct Matrix {
  const void* data;
  int64_t rows, columns;
  int64_t row_stride;  // in elements; the last dimension is contiguous
};

// A matrix of the same shape elsewhere.
inline Matrix at(const void* address, const Matrix& like) {
  return {address, like.rows, like.columns, like.row_stride};
}

// A box is stored row by row, with the swizzle of the row's size: 32, 64 or 128 bytes. Outside the matrix are zeros.
CUtensorMap make_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows);

// Tensor map of fp32 vectors, one in each row of the matrix. A box is a part of one of them, not swizzled.
CUtensorMap make_vector_map(const Matrix& vectors, int box_columns);

// `count` matrices of equal sizes, one every `step` elements.
struct Matrices {
  Matrix first;
  int64_t count, step;
};

// Their tensor map. The number of the matrix is the third coordinate, so a box does not cross from one into the next.
CUtensorMap make_tensor_map(const Matrices& matrices, DType dtype, int box_columns, int box_rows);

// A matrix whose rows are `count` shards of equal height.
inline Matrices shards_of(const Matrix& matrix, int count) {
  const int64_t rows = matrix.rows / count;
  return {{matrix.data, rows, matrix.columns, matrix.row_stride}, count, rows * matrix.row_stride};
}

// The tensor maps of a launch that is repeated with other tensors of the same sizes: mostly, only addresses change.
class KeptTensorMaps {
 public:
  // While it lives, tensor maps that this thread makes are kept, or taken from those kept, in their order.
  class Scope {
   public:
    explicit Scope(KeptTensorMaps& maps);
    ~Scope();
    Scope(const Scope&) = delete;
  };

  using Geometry = std::array<int64_t, 10>;  // what a map is made of, besides its address
  template <class Make>
  CUtensorMap next(const void* address, const Geometry& geometry, const Make& make);

 private:
  struct Kept {
    const void* address;
    Geometry geometry;
    CUtensorMap map;
  };
  std::vector<Kept> maps_;
  size_t next_ = 0;
};

}  // namespace flux::runtime
