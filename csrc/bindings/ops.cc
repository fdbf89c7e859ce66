// The CUDA ops, registered through libtorch's stable ABI: one binary for every torch from 2.10 on. Schemas, fakes, CPU
// implementations and argument checks are in Python (python/flux/ops). This file only unpacks arguments.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ag_gemm/ag_gemm.h"
#include "bindings/kept_launch.h"
#include "bindings/tensors.h"
#include "gemm/add_norm.h"
#include "gemm/gemm.h"
#include "gemm/quantize.h"
#include "gemm_ar/gemm_ar.h"
#include "gemm_rs/gemm_rs.h"
#include "moe/moe.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/launch_table.h"

namespace flux::bindings {
namespace {

using torch::stable::Tensor;

runtime::Matrix matrix(const Tensor& tensor) {
  FLUX_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1, tensor.dim());
  // The stride of a single row may be any number in torch, but TMA requires a valid one.
  const int64_t row_stride = tensor.size(0) == 1 ? tensor.size(1) : tensor.stride(0);
  return {tensor.data_ptr(), tensor.size(0), tensor.size(1), row_stride};
}

// A matrix of any dtype as a matrix of 2-byte elements, for ops that only copy. Rows are multiples of 16 bytes.
runtime::Matrix words(const Tensor& tensor) {
  runtime::Matrix result = matrix(tensor);
  for (int64_t* extent : {&result.columns, &result.row_stride}) {
    *extent = *extent * static_cast<int64_t>(tensor.element_size()) / gemm::kResultBytes;
  }
  return result;
}

gemm::GemmArgs gemm_args(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         const Tensor& out, bool transpose_weight, int64_t config, int64_t num_sms,
                         const std::optional<Tensor>& scale_x, const std::optional<Tensor>& scale_w,
                         bool fast) {
  gemm::GemmArgs args;
  args.x = matrix(x);
  args.weight = matrix(weight);
  args.transpose_weight = transpose_weight;
  args.out = matrix(out);
  args.bias = bias.has_value() ? bias->data_ptr() : nullptr;
  args.dtype = dtype_of(out);
  args.config = static_cast<int>(config);
  args.num_sms = static_cast<int>(num_sms);
  args.scales = scales_of(x, scale_x, scale_w, fast);
  return args;
}

// The same arguments with other tensors: x, weight, bias and out, and scales.
gemm::GemmArgs at(Addresses addresses, Addresses scales, gemm::GemmArgs args) {
  args.x.data = addresses[0];
  args.weight.data = addresses[1];
  args.bias = addresses[2];
  args.out.data = addresses[3];
  args.scales.x = static_cast<const float*>(scales[0]);
  args.scales.weight = static_cast<const float*>(scales[1]);
  return args;
}

runtime::Matrix at(void* address, runtime::Matrix matrix) {
  matrix.data = address;
  return matrix;
}

void gemm_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
             int64_t config, int64_t num_sms, std::optional<Tensor> scale_x, std::optional<Tensor> scale_w,
             bool fast, bool weight_is_constant, bool swiglu) {
  gemm::GemmArgs args =
      gemm_args(x, weight, bias, out, transpose_weight, config, num_sms, scale_x, scale_w, fast);
  args.weight_is_constant = weight_is_constant;
  args.swiglu = swiglu;
  enqueue(x, addresses_of(x, weight, bias, out, scale_x, scale_w),
          [args](Addresses a, cudaStream_t stream) { gemm::gemm(at(a, a + 4, args), stream); });
}

void gemm_rs_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t copy_epoch, int64_t chunks,
                std::optional<Tensor> staging, bool rounds_own, std::optional<Tensor> scale_x,
                std::optional<Tensor> scale_w, bool fast) {
  enqueue(x, addresses_of(x, weight, bias, out, staging, scale_x, scale_w), copy_epoch,
          [args = gemm_args(x, weight, bias, out, transpose_weight, config, num_sms, scale_x, scale_w, fast),
           &symm = symm_buffer_at(symm_buffer), chunks = static_cast<int>(chunks),
           rounds_own](Addresses a, uint32_t epoch, cudaStream_t stream) {
            gemm_rs::gemm_rs(at(a, a + 5, args), symm, {epoch, chunks, static_cast<char*>(a[4])}, rounds_own,
                             stream);
          });
}

void ag_gemm_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t copy_epoch, int64_t chunk_rows,
                bool reuse, std::optional<Tensor> scale_x, std::optional<Tensor> scale_w, bool fast) {
  enqueue(x, addresses_of(x, weight, bias, out, scale_x, scale_w), copy_epoch,
          [args = gemm_args(x, weight, bias, out, transpose_weight, config, num_sms, scale_x, scale_w, fast),
           &symm = symm_buffer_at(symm_buffer), chunk_rows = static_cast<int>(chunk_rows),
           reuse](Addresses a, uint32_t epoch, cudaStream_t stream) {
            ag_gemm::ag_gemm(at(a, a + 4, args), symm, {epoch, chunk_rows}, reuse, stream);
          });
}

// What a quantisation writes, of [rows, columns]. Its tensors: q, scale, the scale to use if it is given, and scratch
// memory where the scale is made of all elements.
gemm::Quantized quantized(const Tensor& q, const Tensor& scale, int64_t granularity, bool ue8m0,
                          const std::optional<Tensor>& given, const std::optional<Tensor>& parts) {
  FLUX_CHECK(granularity >= 0 && granularity <= static_cast<int>(gemm::Granularity::kBlock), granularity);
  FLUX_CHECK(runtime::is_fp8(dtype_of(q)) && dtype_of(scale) == runtime::DType::kFloat32, granularity);
  FLUX_CHECK(q.is_contiguous() && (!given.has_value() || granularity == 0), granularity);
  const int64_t rows = q.numel() / q.size(q.dim() - 1);
  gemm::Quantized to;
  to.q = q.data_ptr();
  to.given = static_cast<const float*>(address_of(given));
  to.scale_stride = (rows + 3) / 4 * 4;
  to.granularity = static_cast<gemm::Granularity>(granularity);
  to.e5m2 = dtype_of(q) == runtime::DType::kE5M2;
  to.ue8m0 = ue8m0;
  const int64_t floats = parts.has_value() ? parts->numel() : 0;
  FLUX_CHECK(!to.needs_all() || floats >= gemm::kPartsFloats, floats);
  return to;
}

// The same with other tensors.
gemm::Quantized at(Addresses addresses, gemm::Quantized to) {
  to.q = addresses[0];
  to.scales = static_cast<float*>(addresses[1]);
  to.given = static_cast<const float*>(addresses[2]);
  to.parts = static_cast<float*>(addresses[3]);
  return to;
}

// Kernels do not write a scale that is given. The caller gets it in a tensor of its own.
void copy_given_scale(const gemm::Quantized& to, cudaStream_t stream) {
  if (to.given == nullptr) return;
  FLUX_CUDA_CHECK(cudaMemcpyAsync(to.scales, to.given, sizeof(float), cudaMemcpyDeviceToDevice, stream));
}

// x, q: [..., columns], contiguous.
void quantize_op(Tensor x, Tensor q, Tensor scale, int64_t granularity, bool ue8m0,
                 std::optional<Tensor> given, std::optional<Tensor> parts) {
  FLUX_CHECK(x.is_contiguous() && x.numel() == q.numel(), x.numel(), q.numel());
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  enqueue(x, addresses_of(x, q, scale, given, parts),
          [rows, columns, dtype = dtype_of(x), height = x.dim() > 1 ? x.size(x.dim() - 2) : 1,
           to = quantized(q, scale, granularity, ue8m0, given, parts)](Addresses a, cudaStream_t stream) {
            const gemm::Quantized written = at(a + 1, to);
            copy_given_scale(written, stream);
            gemm::quantize({a[0], rows, columns, columns}, dtype, height, written, stream);
          });
}

// All of one shape [rows, columns] and dtype, but for weight [columns].
void add_norm_op(Tensor total, Tensor residual, Tensor weight, double eps, Tensor out) {
  const int64_t rows = total.size(0), columns = total.size(1);
  for (const Tensor& each : {residual, out}) {
    FLUX_CHECK(each.is_contiguous() && each.size(0) == rows && each.size(1) == columns, rows, columns);
    FLUX_CHECK(dtype_of(each) == dtype_of(total), rows, columns);
  }
  FLUX_CHECK(total.is_contiguous() && weight.is_contiguous() && weight.numel() == columns, rows, columns);
  FLUX_CHECK(dtype_of(weight) == dtype_of(total) && rows < INT32_MAX, rows, columns);
  enqueue(total, addresses_of(total, residual, weight, out),
          [rows = static_cast<int>(rows), columns = static_cast<int>(columns), eps = static_cast<float>(eps),
           dtype = dtype_of(total)](Addresses a, cudaStream_t stream) {
            gemm::add_norm({a[0], a[1], a[2], a[3], rows, columns, eps}, dtype, stream);
          });
}

// Of the norm, [m, n].
gemm::Quantized quantized_norm(const std::optional<Tensor>& q, const std::optional<Tensor>& q_scale,
                               int64_t granularity, bool ue8m0, const std::optional<Tensor>& given,
                               const std::optional<Tensor>& parts, const Tensor& norm) {
  FLUX_CHECK(q.has_value() == q_scale.has_value(), q.has_value());
  if (!q.has_value()) return {};
  FLUX_CHECK(q->numel() == norm.numel(), q->numel());
  return quantized(*q, *q_scale, granularity, ue8m0, given, parts);
}

void gemm_ar_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t mode,
                std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps,
                std::optional<Tensor> residual_out, std::optional<Tensor> q, std::optional<Tensor> q_scale,
                int64_t granularity, bool ue8m0, std::optional<Tensor> quant_scale,
                std::optional<Tensor> parts) {
  const gemm::GemmArgs args =
      gemm_args(x, weight, bias, out, transpose_weight, config, num_sms, std::nullopt, std::nullopt, false);
  enqueue(
      x,
      addresses_of(x, weight, bias, out, residual, norm_weight, residual_out, q, q_scale, quant_scale, parts),
      [args, &symm = symm_buffer_at(symm_buffer), mode = static_cast<runtime::Exchange::Mode>(mode),
       eps = static_cast<float>(eps),
       to = quantized_norm(q, q_scale, granularity, ue8m0, quant_scale, parts, out)](Addresses a,
                                                                                     cudaStream_t stream) {
        const gemm::Quantized written = at(a + 7, to);
        copy_given_scale(written, stream);
        void* const no_scales[2] = {};
        gemm_ar::gemm_ar(
            at(a, no_scales, args),
            {.residual = a[4], .norm_weight = a[5], .eps = eps, .sum_out = a[6], .quantized = written}, symm,
            mode, stream);
      });
}

void all_reduce_op(Tensor x, Tensor out, int64_t symm_buffer, int64_t num_sms, int64_t mode,
                   std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps,
                   std::optional<Tensor> residual_out, std::optional<Tensor> q, std::optional<Tensor> q_scale,
                   int64_t granularity, bool ue8m0, std::optional<Tensor> quant_scale,
                   std::optional<Tensor> parts) {
  enqueue(x, addresses_of(x, out, residual, norm_weight, residual_out, q, q_scale, quant_scale, parts),
          [x = matrix(x), out = matrix(out), dtype = dtype_of(x), &symm = symm_buffer_at(symm_buffer),
           num_sms = static_cast<int>(num_sms), mode = static_cast<runtime::Exchange::Mode>(mode),
           eps = static_cast<float>(eps),
           to = quantized_norm(q, q_scale, granularity, ue8m0, quant_scale, parts, out)](
              Addresses a, cudaStream_t stream) {
            const gemm::Quantized written = at(a + 5, to);
            copy_given_scale(written, stream);
            gemm_ar::all_reduce(
                at(a[0], x), at(a[1], out), dtype,
                {.residual = a[2], .norm_weight = a[3], .eps = eps, .sum_out = a[4], .quantized = written},
                symm, num_sms, mode, stream);
          });
}

// x: what this rank has for each, [world_size, rows, n], of which each [rows, n] is contiguous.
void reduce_scatter_int8_op(Tensor x, Tensor out, int64_t symm_buffer, int64_t num_sms, bool rounds_own) {
  const auto& symm = symm_buffer_at(symm_buffer);
  FLUX_CHECK(x.dim() == 3 && x.size(0) == symm.world_size && x.stride(2) == 1, x.dim());
  FLUX_CHECK(x.size(1) == out.size(0) && x.size(2) == out.size(1), x.size(1), out.size(0));
  FLUX_CHECK(x.stride(1) == x.size(2) && dtype_of(x) == dtype_of(out), x.stride(1));
  enqueue(x, addresses_of(x, out),
          [owner_stride = x.stride(0), out = matrix(out), dtype = dtype_of(x), &symm,
           num_sms = static_cast<int>(num_sms), rounds_own](Addresses a, cudaStream_t stream) {
            gemm_ar::reduce_scatter_int8(a[0], owner_stride, at(a[1], out), dtype, symm, num_sms, rounds_own,
                                         stream);
          });
}

void all_gather_op(Tensor x, Tensor out, int64_t symm_buffer, int64_t copy_epoch, int64_t chunk_rows,
                   bool begun) {
  enqueue(
      x, addresses_of(x, out), copy_epoch,
      [x = words(x), out = words(out), &symm = symm_buffer_at(symm_buffer),
       chunk_rows = static_cast<int>(chunk_rows), begun](Addresses a, uint32_t epoch, cudaStream_t stream) {
        ag_gemm::all_gather(at(a[0], x), at(a[1], out), symm, {epoch, chunk_rows}, begun, stream);
      });
}

void begin_all_gather_op(Tensor x, int64_t symm_buffer, int64_t copy_epoch, int64_t chunk_rows) {
  enqueue(x, addresses_of(x), copy_epoch,
          [x = words(x), &symm = symm_buffer_at(symm_buffer), chunk_rows = static_cast<int>(chunk_rows)](
              Addresses a, uint32_t epoch, cudaStream_t stream) {
            ag_gemm::begin_all_gather(at(a[0], x), symm, {epoch, chunk_rows}, stream);
          });
}

// scale_x, gathered_scale: of fp8 rows, as scales_of describes them.
void collect_op(Tensor x, Tensor gathered, int64_t symm_buffer, int64_t copy_epoch,
                std::optional<Tensor> scale_x, std::optional<Tensor> gathered_scale) {
  ag_gemm::CollectedScales scales;
  FLUX_CHECK(scale_x.has_value() == gathered_scale.has_value(), scale_x.has_value());
  if (scale_x.has_value()) {
    const gemm::Scales own = scales_of(x, scale_x, scale_x, /*fast=*/false);
    scales.own = {own.x, own.blocks ? 1 : own.x_step, own.x_stride};
    scales.columns = own.blocks ? static_cast<int>(scale_x->size(1)) : 1;
  }
  enqueue(x, addresses_of(x, gathered, scale_x, gathered_scale), copy_epoch,
          [x = words(x), gathered = words(gathered), &symm = symm_buffer_at(symm_buffer), scales](
              Addresses a, uint32_t epoch, cudaStream_t stream) mutable {
            scales.own.data = static_cast<const float*>(a[2]);
            scales.out = static_cast<float*>(a[3]);
            ag_gemm::collect(at(a[0], x), at(a[1], gathered), symm, epoch, scales, stream);
          });
}

void prepare_op() { runtime::Kernels::load_all(); }

// ---- kept launches ---------------------------------------------------------------------------------------------

bool succeeded(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();  // nobody else must see it
  return result == cudaSuccess;
}

// It is unknown of a legacy stream while another thread captures.
bool is_not_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return succeeded(cudaStreamIsCapturing(stream, &status)) && status == cudaStreamCaptureStatusNone;
}

bool ready(int32_t device, void** stream) {
  return runtime::current_device() == device &&
         aoti_torch_get_current_cuda_stream(device, stream) == AOTI_TORCH_SUCCESS &&
         is_not_captured(static_cast<cudaStream_t>(*stream));
}

// The device is the current one, and one thread at a time is here (LaunchOrder), so one event serves every change of
// streams: a wait is for its last record before the wait.
bool follow(int32_t device, void* last, void* next) {
  static cudaEvent_t events[runtime::kMaxDevices] = {};
  cudaEvent_t& event = events[device];
  return is_not_captured(static_cast<cudaStream_t>(last)) &&
         (event != nullptr || succeeded(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) &&
         succeeded(cudaEventRecord(event, static_cast<cudaStream_t>(last))) &&
         succeeded(cudaStreamWaitEvent(static_cast<cudaStream_t>(next), event, 0));
}

const char* run(void* launch, void* const* addresses, uint32_t copy_epoch, void* stream) {
  static thread_local std::string message;
  auto& kept = *static_cast<KeptLaunch*>(launch);
  try {
    const runtime::KeptTensorMaps::Scope scope(kept.maps);
    kept.run(addresses, copy_epoch, static_cast<cudaStream_t>(stream));
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

void drop(void* launch) { delete static_cast<KeptLaunch*>(launch); }

int64_t launch_table_op() {
  static constexpr runtime::LaunchTable table = {&ready, &follow, &run, &drop};
  return reinterpret_cast<int64_t>(&table);
}

using Kept = std::vector<std::unique_ptr<KeptLaunch>>;

void keep_op() {
  static thread_local Kept kept;
  kept.clear();
  keeper = &kept;
}

std::vector<int64_t> kept_op() {
  FLUX_CHECK(keeper != nullptr, "nothing was kept");
  std::vector<int64_t> handles;
  for (auto& launch : *keeper) handles.push_back(reinterpret_cast<int64_t>(launch.release()));
  keeper = nullptr;
  return handles;
}

}  // namespace
}  // namespace flux::bindings

STABLE_TORCH_LIBRARY_IMPL(flux, CUDA, m) {
  m.impl("_gemm", TORCH_BOX(&flux::bindings::gemm_op));
  m.impl("_gemm_rs", TORCH_BOX(&flux::bindings::gemm_rs_op));
  m.impl("_ag_gemm", TORCH_BOX(&flux::bindings::ag_gemm_op));
  m.impl("_gemm_ar", TORCH_BOX(&flux::bindings::gemm_ar_op));
  m.impl("_all_reduce", TORCH_BOX(&flux::bindings::all_reduce_op));
  m.impl("_reduce_scatter_int8", TORCH_BOX(&flux::bindings::reduce_scatter_int8_op));
  m.impl("_all_gather", TORCH_BOX(&flux::bindings::all_gather_op));
  m.impl("_begin_all_gather", TORCH_BOX(&flux::bindings::begin_all_gather_op));
  m.impl("_collect", TORCH_BOX(&flux::bindings::collect_op));
  m.impl("_quantize", TORCH_BOX(&flux::bindings::quantize_op));
  m.impl("_add_norm", TORCH_BOX(&flux::bindings::add_norm_op));
}

// No tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(flux, CompositeExplicitAutograd, m) {
  m.impl("_prepare", TORCH_BOX(&flux::bindings::prepare_op));
  m.impl("_launch_table", TORCH_BOX(&flux::bindings::launch_table_op));
  m.impl("_keep", TORCH_BOX(&flux::bindings::keep_op));
  m.impl("_kept", TORCH_BOX(&flux::bindings::kept_op));
}
