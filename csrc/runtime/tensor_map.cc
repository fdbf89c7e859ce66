#include "runtime/tensor_map.h"

#include "runtime/check.h"
#include "runtime/device.h"

namespace flux::runtime {
namespace {

CUtensorMap encode(const Matrix& matrix, DType dtype, int box_columns, int box_rows, int dimensions,
                   int64_t shards) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode_tiled = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));

  constexpr int kElementBytes = 2;
  const CUtensorMapDataType type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int row_bytes = box_columns * kElementBytes;
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  FLUX_CHECK(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, box_columns);

  const int64_t rows = matrix.rows / shards, row_stride = matrix.row_stride * kElementBytes;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(shards)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride),
                                 static_cast<cuuint64_t>(rows * row_stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode_tiled(&map, type, dimensions, const_cast<void*>(matrix.data), sizes, strides,
                                       box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FLUX_CHECK(status == CUDA_SUCCESS, static_cast<int>(status), "matrix", matrix.data, matrix.rows,
             matrix.columns, matrix.row_stride, "box", box_columns, box_rows, "shards", shards);
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows) {
  return encode(matrix, dtype, box_columns, box_rows, /*dimensions=*/2, /*shards=*/1);
}

CUtensorMap make_sharded_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows,
                                    int shards) {
  return encode(matrix, dtype, box_columns, box_rows, /*dimensions=*/3, shards);
}

}  // namespace flux::runtime
