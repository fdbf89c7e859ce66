// TMA descriptors of row-major matrices of 16-bit elements.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flux::runtime {

enum class DType { kBFloat16, kFloat16 };

struct Matrix {
  const void* data;
  int64_t rows, columns;
  int64_t row_stride;  // in elements; the last dimension is contiguous
};

// A box of box_columns x box_rows lands in shared memory row by row, 16-byte pieces swizzled within the row's
// box_columns * 2 = 32, 64 or 128 bytes. What lies outside the matrix is read as zero and not written.
CUtensorMap make_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows);

// The same for a matrix whose rows are `shards` shards of equal height, with the shard as third coordinate: a
// box does not reach from one shard into the next.
CUtensorMap make_sharded_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows,
                                    int shards);

}  // namespace flux::runtime
