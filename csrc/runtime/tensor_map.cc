#include "runtime/device.h"

namespace flux::runtime {
namespace {

thread_local KeptTensorMaps* kept_maps = nullptr;

// The driver refuses a thread without a context, which a thread of autograd is before its first call of the runtime.
template <class Call>
CUresult with_context(const Call& call) {
  const CUresult status = call();
  if (status != CUDA_ERROR_INVALID_CONTEXT) return status;
  int device;
  FLUX_CUDA_CHECK(cudaGetDevice(&device));
  FLUX_CUDA_CHECK(cudaSetDevice(device));
  return call();
}

void replace_address(CUtensorMap& map, const void* address) {
  using Replace = decltype(&cuTensorMapReplaceAddress);
  static const auto replace = reinterpret_cast<Replace>(driver_function("cuTensorMapReplaceAddress"));
  const CUresult status = with_context([&] { return replace(&map, const_cast<void*>(address)); });
  FLUX_CHECK(status == CUDA_SUCCESS, static_cast<int>(status), address);
}

CUtensorMapDataType type_of(DType dtype) {
  if (is_fp8(dtype)) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (dtype == DType::kFloat32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

CUtensorMapSwizzle swizzle_of(int row_bytes) {
  FLUX_CHECK(row_bytes == 128 || row_bytes == 64 || row_bytes == 32, row_bytes);
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

CUtensorMap encode(const Matrices& matrices, DType dtype, CUtensorMapSwizzle swizzle, int box_columns,
                   int box_rows, int dimensions) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode_tiled = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));

  const Matrix& matrix = matrices.first;
  const auto make = [&] {
    using Size = cuuint64_t;
    const Size sizes[3] = {Size(matrix.columns), Size(matrix.rows), Size(matrices.count)};
    const Size strides[2] = {Size(matrix.row_stride * element_bytes(dtype)),
                             Size(matrices.step * element_bytes(dtype))};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
    const cuuint32_t element_strides[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult status = with_context([&] {
      return encode_tiled(&map, type_of(dtype), dimensions, const_cast<void*>(matrix.data), sizes, strides,
                          box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    });
    FLUX_CHECK(status == CUDA_SUCCESS, static_cast<int>(status), "matrix", matrix.data, matrix.rows,
               matrix.columns, matrix.row_stride, "box", box_columns, box_rows, "matrices", matrices.count,
               matrices.step);
    return map;
  };
  if (kept_maps == nullptr) return make();
  const KeptTensorMaps::Geometry geometry = {
      matrix.rows, matrix.columns, matrix.row_stride, matrices.count,          matrices.step,
      dimensions,  box_columns,    box_rows,          static_cast<int>(dtype), static_cast<int>(swizzle)};
  return kept_maps->next(matrix.data, geometry, make);
}

}  // namespace

KeptTensorMaps::Scope::Scope(KeptTensorMaps& maps) {
  maps.next_ = 0;
  kept_maps = &maps;
}

KeptTensorMaps::Scope::~Scope() { kept_maps = nullptr; }

template <class Make>
CUtensorMap KeptTensorMaps::next(const void* address, const Geometry& geometry, const Make& make) {
  if (next_ == maps_.size()) maps_.push_back({nullptr, {}, {}});
  Kept& kept = maps_[next_++];
  if (kept.address == nullptr || kept.geometry != geometry) {
    kept = {address, geometry, make()};
  } else if (kept.address != address) {
    kept.address = nullptr;  // until the address is replaced
    replace_address(kept.map, address);
    kept.address = address;
  }
  return kept.map;
}

CUtensorMap make_tensor_map(const Matrix& matrix, DType dtype, int box_columns, int box_rows) {
  return encode(shards_of(matrix, 1), dtype, swizzle_of(box_columns * element_bytes(dtype)), box_columns,
                box_rows, /*dimensions=*/2);
}

CUtensorMap make_vector_map(const Matrix& vectors, int box_columns) {
  return encode(shards_of(vectors, 1), DType::kFloat32, CU_TENSOR_MAP_SWIZZLE_NONE, box_columns,
                /*box_rows=*/1, /*dimensions=*/2);
}

CUtensorMap make_tensor_map(const Matrices& matrices, DType dtype, int box_columns, int box_rows) {
  return encode(matrices, dtype, swizzle_of(box_columns * element_bytes(dtype)), box_columns, box_rows,
                /*dimensions=*/3);
}

}  // namespace flux::runtime
