// The CUDA ops, registered through libtorch's stable ABI: one binary for every torch from 2.10 on. Schemas, fakes, CPU
// implementations and argument checks are in Python (python/flux/ops). This file only unpacks arguments.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "ag_gemm/ag_gemm.h"
#include "bindings/tensors.h"
#include "gemm/gemm.h"
#include "gemm/quantize.h"
#include "gemm_ar/gemm_ar.h"
#include "gemm_rs/gemm_rs.h"
#include "moe/moe.h"
#include "runtime/check.h"

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
                         const gemm::Scales& scales) {
  gemm::GemmArgs args;
  args.x = matrix(x);
  args.weight = matrix(weight);
  args.transpose_weight = transpose_weight;
  args.out = matrix(out);
  args.bias = bias.has_value() ? bias->data_ptr() : nullptr;
  args.dtype = dtype_of(out);
  args.config = static_cast<int>(config);
  args.num_sms = static_cast<int>(num_sms);
  args.scales = scales;
  return args;
}

void gemm_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
             int64_t config, int64_t num_sms, std::optional<Tensor> scale_x, std::optional<Tensor> scale_w,
             bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  gemm::gemm(gemm_args(x, weight, bias, out, transpose_weight, config, num_sms,
                       scales_of(x, scale_x, scale_w, fast)),
             current_stream(x));
}

void gemm_rs_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t copy_epoch, int64_t chunks,
                std::optional<Tensor> staging, bool rounds_own, std::optional<Tensor> scale_x,
                std::optional<Tensor> scale_w, bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const gemm_rs::Transport transport = {
      static_cast<uint32_t>(copy_epoch), static_cast<int>(chunks),
      staging.has_value() ? static_cast<char*>(staging->data_ptr()) : nullptr};
  gemm_rs::gemm_rs(gemm_args(x, weight, bias, out, transpose_weight, config, num_sms,
                             scales_of(x, scale_x, scale_w, fast)),
                   symm_buffer_at(symm_buffer), transport, rounds_own, current_stream(x));
}

void ag_gemm_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t copy_epoch, int64_t chunk_rows,
                bool reuse, std::optional<Tensor> scale_x, std::optional<Tensor> scale_w, bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  ag_gemm::ag_gemm(gemm_args(x, weight, bias, out, transpose_weight, config, num_sms,
                             scales_of(x, scale_x, scale_w, fast)),
                   symm_buffer_at(symm_buffer),
                   {static_cast<uint32_t>(copy_epoch), static_cast<int>(chunk_rows)}, reuse,
                   current_stream(x));
}

// What a quantisation writes. Its scratch memory may be freed when its launches are enqueued: torch gives it only to
// later work of the stream.
struct Quantisation {
  gemm::Quantized to;
  std::optional<Tensor> scratch;

  // given: the scale to use for a whole tensor, or null.
  Quantisation(const Tensor& q, const Tensor& scale, int64_t granularity, bool ue8m0, const void* given) {
    FLUX_CHECK(granularity >= 0 && granularity <= static_cast<int>(gemm::Granularity::kBlock), granularity);
    FLUX_CHECK(runtime::is_fp8(dtype_of(q)) && dtype_of(scale) == runtime::DType::kFloat32, granularity);
    FLUX_CHECK(given == nullptr || granularity == 0, granularity);
    const int64_t rows = q.numel() / q.size(q.dim() - 1);
    to.q = q.data_ptr();
    to.scales = static_cast<float*>(scale.data_ptr());
    to.given = static_cast<const float*>(given);
    to.scale_stride = (rows + 3) / 4 * 4;
    to.granularity = static_cast<gemm::Granularity>(granularity);
    to.e5m2 = dtype_of(q) == runtime::DType::kE5M2;
    to.ue8m0 = ue8m0;
    if (!to.needs_all()) return;
    const std::vector<int64_t> floats = {gemm::kPartsFloats};
    scratch = torch::stable::new_empty(scale, floats);
    to.parts = static_cast<float*>(scratch->data_ptr());
  }
};

// x, q: [..., columns], contiguous. static_scale: `scale` is given, and not written.
void quantize_op(Tensor x, Tensor q, Tensor scale, int64_t granularity, bool ue8m0, bool static_scale) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  FLUX_CHECK(x.is_contiguous() && q.is_contiguous() && x.numel() == q.numel(), x.numel(), q.numel());
  const int64_t columns = x.size(x.dim() - 1), rows = x.numel() / columns;
  const Quantisation quantisation(q, scale, granularity, ue8m0, static_scale ? scale.data_ptr() : nullptr);
  gemm::quantize({x.data_ptr(), rows, columns, columns}, dtype_of(x), x.dim() > 1 ? x.size(x.dim() - 2) : 1,
                 quantisation.to, current_stream(x));
}

gemm_ar::Extras extras_of(const std::optional<Tensor>& residual, const std::optional<Tensor>& norm_weight,
                          double eps, const std::optional<Tensor>& sum_out,
                          const std::optional<Quantisation>& quantisation) {
  return {residual.has_value() ? residual->data_ptr() : nullptr,
          norm_weight.has_value() ? norm_weight->data_ptr() : nullptr, static_cast<float>(eps),
          sum_out.has_value() ? sum_out->data_ptr() : nullptr,
          quantisation.has_value() ? quantisation->to : gemm::Quantized()};
}

// Of the norm, [m, n].
std::optional<Quantisation> quantisation_of(const std::optional<Tensor>& q,
                                            const std::optional<Tensor>& q_scale, int64_t granularity,
                                            bool ue8m0, const std::optional<Tensor>& quant_scale,
                                            const Tensor& norm) {
  FLUX_CHECK(q.has_value() == q_scale.has_value(), q.has_value());
  if (!q.has_value()) return std::nullopt;
  FLUX_CHECK(q->is_contiguous() && q->numel() == norm.numel(), q->numel());
  return Quantisation(*q, *q_scale, granularity, ue8m0,
                      quant_scale.has_value() ? quant_scale->data_ptr() : nullptr);
}

void gemm_ar_op(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, bool transpose_weight,
                int64_t symm_buffer, int64_t config, int64_t num_sms, int64_t mode,
                std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps,
                std::optional<Tensor> residual_out, std::optional<Tensor> scale_x,
                std::optional<Tensor> scale_w, bool fast, std::optional<Tensor> q,
                std::optional<Tensor> q_scale, int64_t granularity, bool ue8m0,
                std::optional<Tensor> quant_scale) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const auto quantisation = quantisation_of(q, q_scale, granularity, ue8m0, quant_scale, out);
  gemm_ar::gemm_ar(gemm_args(x, weight, bias, out, transpose_weight, config, num_sms,
                             scales_of(x, scale_x, scale_w, fast)),
                   extras_of(residual, norm_weight, eps, residual_out, quantisation),
                   symm_buffer_at(symm_buffer), static_cast<runtime::Exchange::Mode>(mode),
                   current_stream(x));
}

void all_reduce_op(Tensor x, Tensor out, int64_t symm_buffer, int64_t num_sms, int64_t mode,
                   std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double eps,
                   std::optional<Tensor> residual_out, std::optional<Tensor> q, std::optional<Tensor> q_scale,
                   int64_t granularity, bool ue8m0, std::optional<Tensor> quant_scale) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const auto quantisation = quantisation_of(q, q_scale, granularity, ue8m0, quant_scale, out);
  gemm_ar::all_reduce(matrix(x), matrix(out), dtype_of(x),
                      extras_of(residual, norm_weight, eps, residual_out, quantisation),
                      symm_buffer_at(symm_buffer), static_cast<int>(num_sms),
                      static_cast<runtime::Exchange::Mode>(mode), current_stream(x));
}

void all_gather_op(Tensor x, Tensor out, int64_t symm_buffer, int64_t copy_epoch, int64_t chunk_rows,
                   bool begun) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  ag_gemm::all_gather(words(x), words(out), symm_buffer_at(symm_buffer),
                      {static_cast<uint32_t>(copy_epoch), static_cast<int>(chunk_rows)}, begun,
                      current_stream(x));
}

void begin_all_gather_op(Tensor x, int64_t symm_buffer, int64_t copy_epoch, int64_t chunk_rows) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  ag_gemm::begin_all_gather(words(x), symm_buffer_at(symm_buffer),
                            {static_cast<uint32_t>(copy_epoch), static_cast<int>(chunk_rows)},
                            current_stream(x));
}

// scale_x, gathered_scale: of fp8 rows, as scales_of describes them.
void collect_op(Tensor x, Tensor gathered, int64_t symm_buffer, int64_t copy_epoch,
                std::optional<Tensor> scale_x, std::optional<Tensor> gathered_scale) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  ag_gemm::CollectedScales scales;
  FLUX_CHECK(scale_x.has_value() == gathered_scale.has_value(), scale_x.has_value());
  if (scale_x.has_value()) {
    const gemm::Scales own = scales_of(x, scale_x, scale_x, /*fast=*/false);
    scales.own = {own.x, own.blocks ? 1 : own.x_step, own.x_stride};
    scales.columns = own.blocks ? static_cast<int>(scale_x->size(1)) : 1;
    scales.out = static_cast<float*>(gathered_scale->data_ptr());
  }
  ag_gemm::collect(words(x), words(gathered), symm_buffer_at(symm_buffer), static_cast<uint32_t>(copy_epoch),
                   scales, current_stream(x));
}

void prepare_op() {
  gemm::prepare();
  gemm_rs::prepare();
  ag_gemm::prepare();
  gemm_ar::prepare();
  gemm::prepare_quantize();
  moe::prepare_route();
  moe::prepare_grouped_gemm();
  moe::prepare_ag_scatter_gemm();
  moe::prepare_gemm_gather_rs();
  moe::prepare_combine();
}

}  // namespace
}  // namespace flux::bindings

STABLE_TORCH_LIBRARY_IMPL(flux, CUDA, m) {
  m.impl("_gemm", TORCH_BOX(&flux::bindings::gemm_op));
  m.impl("_gemm_rs", TORCH_BOX(&flux::bindings::gemm_rs_op));
  m.impl("_ag_gemm", TORCH_BOX(&flux::bindings::ag_gemm_op));
  m.impl("_gemm_ar", TORCH_BOX(&flux::bindings::gemm_ar_op));
  m.impl("_all_reduce", TORCH_BOX(&flux::bindings::all_reduce_op));
  m.impl("_all_gather", TORCH_BOX(&flux::bindings::all_gather_op));
  m.impl("_begin_all_gather", TORCH_BOX(&flux::bindings::begin_all_gather_op));
  m.impl("_collect", TORCH_BOX(&flux::bindings::collect_op));
  m.impl("_quantize", TORCH_BOX(&flux::bindings::quantize_op));
}

// No tensor argument to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(flux, CompositeExplicitAutograd, m) {
  m.impl("_prepare", TORCH_BOX(&flux::bindings::prepare_op));
}
