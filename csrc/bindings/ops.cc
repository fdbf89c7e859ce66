// The CUDA ops, registered through libtorch's stable ABI: one binary for every torch from 2.10 on. Only unpacks
// arguments: schemas, fakes, CPU implementations and checks are in Python (python/flux/ops).
#include <torch/csrc/stable/library.h>

#include "bindings/kept_launch.h"
#include "operators.h"
#include "runtime/launch_table.h"

namespace flux::bindings {
namespace {

runtime::Matrix matrix(const Tensor& tensor) {
  FLUX_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1, tensor.dim());
  // The stride of a single row may be any number in torch, but TMA requires a valid one.
  const int64_t row_stride = tensor.size(0) == 1 ? tensor.size(1) : tensor.stride(0);
  return {tensor.data_ptr(), tensor.size(0), tensor.size(1), row_stride};
}

// A matrix of any dtype as a matrix of 2-byte elements, for ops that only copy. Rows are multiples of 16 bytes.
runtime::Matrix words(const Tensor& tensor) {
  runtime::Matrix result = matrix(tensor);
  for (int64_t* extent : {&result.columns, &result.row_stride})
    *extent = *extent * static_cast<int64_t>(tensor.element_size()) / gemm::kResultBytes;
  return result;
}

gemm::GemmArgs gemm_args(const Tensor& x, const Tensor& weight, const Tensor& out, bool transpose_weight,
                         int config, int num_sms, const Optional& scale_x = {}, const Optional& scale_w = {},
                         bool fast = false) {
  return {matrix(x),   matrix(weight),   transpose_weight,
          matrix(out), /*bias=*/nullptr, dtype_of(out),
          config,      num_sms,          scales_of(x, scale_x, scale_w, fast)};
}

// The same arguments with tensors: x, weight, bias and out, and scales.
gemm::GemmArgs at(Addresses addresses, Addresses scales, gemm::GemmArgs args) {
  args.x.data = addresses[0];
  args.weight.data = addresses[1];
  args.bias = addresses[2];
  args.out.data = addresses[3];
  args.scales.x = static_cast<const float*>(scales[0]);
  args.scales.weight = static_cast<const float*>(scales[1]);
  return args;
}

void gemm_op(Tensor x, Tensor weight, Optional bias, Tensor out, bool transpose_weight, int config,
             int num_sms, Optional scale_x, Optional scale_w, bool fast, bool weight_is_constant,
             bool swiglu) {
  auto args = gemm_args(x, weight, out, transpose_weight, config, num_sms, scale_x, scale_w, fast);
  args.weight_is_constant = weight_is_constant;
  args.swiglu = swiglu;
  enqueue(x, addresses_of(x, weight, bias, out, scale_x, scale_w),
          [args](Addresses a, cudaStream_t stream) { gemm::gemm(at(a, a + 4, args), stream); });
}

void gemm_rs_op(Tensor x, Tensor weight, Optional bias, Tensor out, bool transpose_weight,
                const SymmBuffer* symm, int config, int num_sms, uint32_t copy_epoch, int chunks,
                Optional staging, bool rounds_own, Optional scale_x, Optional scale_w, bool fast) {
  const auto args = gemm_args(x, weight, out, transpose_weight, config, num_sms, scale_x, scale_w, fast);
  enqueue(x, addresses_of(x, weight, bias, out, staging, scale_x, scale_w), copy_epoch,
          [=](Addresses a, uint32_t epoch, cudaStream_t stream) {
            gemm_rs::gemm_rs(at(a, a + 5, args), *symm, {epoch, chunks, static_cast<char*>(a[4])}, rounds_own,
                             stream);
          });
}

void ag_gemm_op(Tensor x, Tensor weight, Optional bias, Tensor out, bool transpose_weight,
                const SymmBuffer* symm, int config, int num_sms, uint32_t copy_epoch, int chunk_rows,
                bool reuse, Optional scale_x, Optional scale_w, bool fast) {
  const auto args = gemm_args(x, weight, out, transpose_weight, config, num_sms, scale_x, scale_w, fast);
  enqueue(x, addresses_of(x, weight, bias, out, scale_x, scale_w), copy_epoch,
          [=](Addresses a, uint32_t epoch, cudaStream_t stream) {
            ag_gemm::ag_gemm(at(a, a + 4, args), *symm, {epoch, chunk_rows}, reuse, stream);
          });
}

// What a quantisation writes. Its tensors: q, scale, the given scale, and scratch memory where all elements count.
gemm::Quantized quantized(const Tensor& q, const Tensor& scale, int granularity, bool ue8m0,
                          const Optional& given, const Optional& parts) {
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

// The same with other tensors. Kernels do not write a scale that is given: the caller gets it in a tensor of its own.
gemm::Quantized at(Addresses addresses, gemm::Quantized to, cudaStream_t stream) {
  to.q = addresses[0];
  to.scales = static_cast<float*>(addresses[1]);
  to.given = static_cast<const float*>(addresses[2]);
  to.parts = static_cast<float*>(addresses[3]);
  if (to.given != nullptr)
    FLUX_CUDA_CHECK(cudaMemcpyAsync(to.scales, to.given, sizeof(float), cudaMemcpyDeviceToDevice, stream));
  return to;
}

// x, q: [..., columns], contiguous.
void quantize_op(Tensor x, Tensor q, Tensor scale, int granularity, bool ue8m0, Optional given,
                 Optional parts) {
  FLUX_CHECK(x.is_contiguous() && x.numel() == q.numel(), x.numel(), q.numel());
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  const int64_t height = x.dim() > 1 ? x.size(x.dim() - 2) : 1;
  enqueue(x, addresses_of(x, q, scale, given, parts),
          [=, dtype = dtype_of(x), to = quantized(q, scale, granularity, ue8m0, given, parts)](
              Addresses a, cudaStream_t stream) {
            gemm::quantize({a[0], rows, columns, columns}, dtype, height, at(a + 1, to, stream), stream);
          });
}

// All of one shape [rows, columns] and dtype, but for weight [columns].
void add_norm_op(Tensor total, Tensor residual, Tensor weight, double eps, Tensor out) {
  const int64_t rows = total.size(0), columns = total.size(1);
  const runtime::DType dtype = dtype_of(total);
  for (const Tensor& each : {residual, out}) {
    FLUX_CHECK(each.is_contiguous() && each.size(0) == rows && each.size(1) == columns, rows, columns);
    FLUX_CHECK(dtype_of(each) == dtype, rows, columns);
  }
  FLUX_CHECK(total.is_contiguous() && weight.is_contiguous() && weight.numel() == columns, rows, columns);
  FLUX_CHECK(dtype_of(weight) == dtype && rows < INT32_MAX, rows, columns);
  enqueue(total, addresses_of(total, residual, weight, out), [=](Addresses a, cudaStream_t stream) {
    gemm::add_norm(
        {a[0], a[1], a[2], a[3], static_cast<int>(rows), static_cast<int>(columns), static_cast<float>(eps)},
        dtype, stream);
  });
}

// What comes after a sum. Its tensors: residual, norm_weight, the sum where `out` is its norm, and those of `quantized`.
gemm_ar::Extras extras(const Optional& q, const Optional& q_scale, int granularity, bool ue8m0,
                       const Optional& given, const Optional& parts, double eps, const Tensor& norm) {
  FLUX_CHECK(q.has_value() == q_scale.has_value(), q.has_value());
  gemm_ar::Extras extras = {};
  extras.eps = static_cast<float>(eps);
  if (!q.has_value()) return extras;
  FLUX_CHECK(q->numel() == norm.numel(), q->numel());
  extras.quantized = quantized(*q, *q_scale, granularity, ue8m0, given, parts);
  return extras;
}

gemm_ar::Extras at(Addresses addresses, gemm_ar::Extras extras, cudaStream_t stream) {
  extras.residual = addresses[0];
  extras.norm_weight = addresses[1];
  extras.sum_out = addresses[2];
  extras.quantized = at(addresses + 3, extras.quantized, stream);
  return extras;
}

void gemm_ar_op(Tensor x, Tensor weight, Optional bias, Tensor out, bool transpose_weight,
                const SymmBuffer* symm, int config, int num_sms, runtime::Exchange::Mode mode,
                Optional residual, Optional norm_weight, double eps, Optional residual_out, Optional q,
                Optional q_scale, int granularity, bool ue8m0, Optional quant_scale, Optional parts) {
  enqueue(
      x,
      addresses_of(x, weight, bias, out, residual, norm_weight, residual_out, q, q_scale, quant_scale, parts),
      [=, args = gemm_args(x, weight, out, transpose_weight, config, num_sms),
       then = extras(q, q_scale, granularity, ue8m0, quant_scale, parts, eps, out)](Addresses a,
                                                                                    cudaStream_t stream) {
        void* const no_scales[2] = {};
        gemm_ar::gemm_ar(at(a, no_scales, args), at(a + 4, then, stream), *symm, mode, stream);
      });
}

void all_reduce_op(Tensor x, Tensor out, const SymmBuffer* symm, int num_sms, runtime::Exchange::Mode mode,
                   Optional residual, Optional norm_weight, double eps, Optional residual_out, Optional q,
                   Optional q_scale, int granularity, bool ue8m0, Optional quant_scale, Optional parts) {
  enqueue(x, addresses_of(x, out, residual, norm_weight, residual_out, q, q_scale, quant_scale, parts),
          [=, x = matrix(x), out = matrix(out), dtype = dtype_of(x),
           then = extras(q, q_scale, granularity, ue8m0, quant_scale, parts, eps, out)](Addresses a,
                                                                                        cudaStream_t stream) {
            gemm_ar::all_reduce(at(a[0], x), at(a[1], out), dtype, at(a + 2, then, stream), *symm, num_sms,
                                mode, stream);
          });
}

// x: what this rank has for each, [world_size, rows, n], of which each [rows, n] is contiguous.
void reduce_scatter_int8_op(Tensor x, Tensor out, const SymmBuffer* symm, int num_sms, bool rounds_own) {
  FLUX_CHECK(x.dim() == 3 && x.size(0) == symm->world_size && x.stride(2) == 1, x.dim());
  FLUX_CHECK(x.size(1) == out.size(0) && x.size(2) == out.size(1), x.size(1), out.size(0));
  FLUX_CHECK(x.stride(1) == x.size(2) && dtype_of(x) == dtype_of(out), x.stride(1));
  enqueue(x, addresses_of(x, out),
          [=, owner_stride = x.stride(0), out = matrix(out), dtype = dtype_of(x)](Addresses a,
                                                                                  cudaStream_t stream) {
            gemm_ar::reduce_scatter_int8(a[0], owner_stride, at(a[1], out), dtype, *symm, num_sms, rounds_own,
                                         stream);
          });
}

void all_gather_op(Tensor x, Tensor out, const SymmBuffer* symm, uint32_t copy_epoch, int chunk_rows,
                   bool begun) {
  enqueue(x, addresses_of(x, out), copy_epoch,
          [=, x = words(x), out = words(out), rows = begun ? ag_gemm::Rows::kBegun : ag_gemm::Rows::kToSend](
              Addresses a, uint32_t epoch, cudaStream_t stream) {
            ag_gemm::all_gather(at(a[0], x), at(a[1], out), *symm, {epoch, chunk_rows}, rows, {}, stream);
          });
}

void begin_all_gather_op(Tensor x, const SymmBuffer* symm, uint32_t copy_epoch, int chunk_rows) {
  enqueue(x, addresses_of(x), copy_epoch,
          [=, x = words(x)](Addresses a, uint32_t epoch, cudaStream_t stream) {
            ag_gemm::begin_all_gather(at(a[0], x), *symm, {epoch, chunk_rows}, stream);
          });
}

// scale_x, gathered_scale: of fp8 rows, as scales_of describes them.
void collect_op(Tensor x, Tensor gathered, const SymmBuffer* symm, uint32_t copy_epoch, Optional scale_x,
                Optional gathered_scale) {
  ag_gemm::CollectedScales scales;
  FLUX_CHECK(scale_x.has_value() == gathered_scale.has_value(), scale_x.has_value());
  if (scale_x.has_value()) {
    const gemm::Scales own = scales_of(x, scale_x, scale_x, /*fast=*/false);
    scales.own = {own.x, own.blocks ? 1 : own.x_step, own.x_stride};
    scales.columns = own.blocks ? static_cast<int>(scale_x->size(1)) : 1;
  }
  enqueue(x, addresses_of(x, gathered, scale_x, gathered_scale), copy_epoch,
          [=, x = words(x), gathered = words(gathered)](Addresses a, uint32_t epoch,
                                                        cudaStream_t stream) mutable {
            scales.own.data = static_cast<const float*>(a[2]);
            scales.out = static_cast<float*>(a[3]);
            ag_gemm::all_gather(at(a[0], x), at(a[1], gathered), *symm, {epoch, 0}, ag_gemm::Rows::kHere,
                                scales, stream);
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

// The device is the current one, and one thread at a time is here (LaunchOrder): one event is enough.
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
