// The CUDA ops of mixtures of experts; see ops.cc.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "bindings/tensors.h"
#include "moe/moe.h"
#include "runtime/check.h"

namespace flux::bindings {
namespace {

using torch::stable::Tensor;

int32_t* words(const Tensor& tensor) { return static_cast<int32_t*>(tensor.data_ptr()); }

moe::RoutingArrays routing_arrays(const std::vector<Tensor>& arrays) {
  FLUX_CHECK(arrays.size() == moe::kRoutingArrays, arrays.size());
  return moe::routing_arrays([&](int i) { return arrays[i].data_ptr(); });
}

// ids (int32 or int64) and weights (float32): [tokens, top_k] of this rank, contiguous. arrays: in the order of
// RoutingArrays. all_weights: [world_size, max_tokens, top_k]. symm_buffer: 0 if there is no exchange.
void route_op(Tensor ids, Tensor weights, std::vector<Tensor> arrays, Tensor all_weights, Tensor scratch,
              int64_t symm_buffer, int64_t rank, int64_t ep_size, int64_t num_experts, int64_t block_m) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  const moe::RoutingArrays out = routing_arrays(arrays);
  const auto size = [&](int i) { return static_cast<int>(all_weights.size(i)); };
  const moe::Layout layout = {
      size(0), static_cast<int>(rank), static_cast<int>(ep_size), static_cast<int>(num_experts), size(2),
      size(1)};
  FLUX_CHECK(ids.dim() == 2 && ids.size(1) == layout.top_k, ids.dim());
  FLUX_CHECK(weights.numel() == ids.numel(), weights.numel(), ids.numel());
  FLUX_CHECK(scratch.numel() >= moe::route_scratch_words(layout), scratch.numel());
  const moe::OwnChoices own = {ids.data_ptr(), ids.element_size() == sizeof(int64_t),
                               static_cast<const float*>(weights.data_ptr()), static_cast<int>(ids.size(0))};
  moe::route(layout, static_cast<int>(block_m), own,
             symm_buffer != 0 ? &symm_buffer_at(symm_buffer) : nullptr, out,
             static_cast<float*>(all_weights.data_ptr()), words(scratch), current_stream(ids));
}

// products [rows, n], positions and weights [..., top_k], out [..., n].
void combine_op(Tensor products, Tensor positions, Tensor weights, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(products.get_device_index());
  FLUX_CHECK(products.dim() == 2 && products.stride(1) == 1, products.dim());
  const int64_t n = products.size(1), top_k = positions.size(positions.dim() - 1);
  FLUX_CHECK(weights.numel() == positions.numel(), weights.numel(), positions.numel());
  const int64_t tokens = positions.numel() / top_k;
  FLUX_CHECK(out.numel() == tokens * n, out.numel(), tokens, n);
  moe::combine({products.data_ptr(), products.size(0), n, products.stride(0)}, dtype_of(products),
               words(positions), static_cast<const float*>(weights.data_ptr()), tokens,
               static_cast<int>(top_k), out.data_ptr(), current_stream(products));
}

runtime::Matrix rows_of(const Tensor& tensor, int64_t columns) {
  return {tensor.data_ptr(), tensor.numel() / columns, columns, columns};
}

// The arguments that all grouped GEMMs share. x [m, k], weight [experts, n, k], out [num_rows, ...], all contiguous.
moe::GroupedGemmArgs grouped_args(const Tensor& x, const Tensor& weight, const Tensor& out, int64_t config,
                                  int64_t num_sms, const std::optional<Tensor>& scale_x,
                                  const std::optional<Tensor>& scale_w, bool fast) {
  moe::GroupedGemmArgs args = {};
  args.x = rows_of(x, x.size(1));
  args.weight = rows_of(weight, x.size(1));
  args.experts = static_cast<int>(weight.size(0));
  args.num_rows = static_cast<int>(out.size(0));
  args.out = out.data_ptr();
  args.dtype = dtype_of(out);
  args.config = static_cast<int>(config);
  args.num_sms = static_cast<int>(num_sms);
  args.scales = scales_of(x, scale_x, scale_w, fast);
  // One for each expert, for each row of its weight, or for each of its blocks.
  if (args.is_fp8()) {
    args.scales.weight_step = scale_w->dim() == 2 ? 1 : 0;
    FLUX_CHECK(args.scales.blocks == (scale_w->dim() == 3), scale_w->dim());
  }
  return args;
}

moe::Layout layout_of(const runtime::SymmBuffer& symm, int64_t ep_size, int64_t num_experts, int64_t top_k,
                      int64_t max_tokens) {
  return {symm.world_size,           symm.rank,
          static_cast<int>(ep_size), static_cast<int>(num_experts),
          static_cast<int>(top_k),   static_cast<int>(max_tokens)};
}

// x [m, k], weight [experts, n, k], out [num_rows, n or n / 2], all contiguous.
void grouped_gemm_op(Tensor x, Tensor weight, Tensor offsets, std::optional<Tensor> rows, int64_t activation,
                     Tensor out, Tensor schedule, int64_t config, int64_t num_sms,
                     std::optional<Tensor> scale_x, std::optional<Tensor> scale_w, bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  moe::GroupedGemmArgs args = grouped_args(x, weight, out, config, num_sms, scale_x, scale_w, fast);
  args.offsets = words(offsets);
  args.rows = rows.has_value() ? words(*rows) : nullptr;
  args.activation = static_cast<int>(activation);
  FLUX_CHECK(schedule.numel() >= moe::schedule_words(args.num_rows, args.experts), schedule.numel());
  args.schedule = words(schedule);
  moe::grouped_gemm(args, current_stream(x));
}

// x [tokens, k], weight [local experts, n, k], out [max_rows, n or n / 2], all contiguous.
void ag_scatter_gemm_op(Tensor x, Tensor weight, std::vector<Tensor> arrays, int64_t ep_size,
                        int64_t num_experts, int64_t top_k, int64_t max_tokens, int64_t activation,
                        Tensor out, int64_t symm_buffer, int64_t config, int64_t num_sms,
                        std::optional<Tensor> scale_x, std::optional<Tensor> scale_w, bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const runtime::SymmBuffer& symm = symm_buffer_at(symm_buffer);
  const moe::Layout layout = layout_of(symm, ep_size, num_experts, top_k, max_tokens);
  moe::GroupedGemmArgs args = grouped_args(x, weight, out, config, num_sms, scale_x, scale_w, fast);
  args.activation = static_cast<int>(activation);
  moe::ag_scatter_gemm(args, layout, routing_arrays(arrays), symm, current_stream(x));
}

// x [max_rows, k], weight [local experts, n, k], weights [world_size, max_tokens, top_k], products
// [max_rows, n], out [tokens, n], all contiguous.
void gemm_gather_rs_op(Tensor x, Tensor weight, std::vector<Tensor> arrays, Tensor weights, int64_t ep_size,
                       int64_t num_experts, Tensor products, Tensor out, int64_t symm_buffer, int64_t config,
                       int64_t tiles_per_chunk, int64_t communication_ctas, int64_t num_sms,
                       std::optional<Tensor> scale_x, std::optional<Tensor> scale_w, bool fast) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const runtime::SymmBuffer& symm = symm_buffer_at(symm_buffer);
  const moe::Layout layout = layout_of(symm, ep_size, num_experts, weights.size(2), weights.size(1));
  const moe::GroupedGemmArgs args =
      grouped_args(x, weight, products, config, num_sms, scale_x, scale_w, fast);
  const moe::CombineArgs combine = {static_cast<const float*>(weights.data_ptr()), out.data_ptr(),
                                    static_cast<int>(out.size(0)), static_cast<int>(tiles_per_chunk),
                                    static_cast<int>(communication_ctas)};
  moe::gemm_gather_rs(args, combine, layout, routing_arrays(arrays), symm, current_stream(x));
}

}  // namespace
}  // namespace flux::bindings

STABLE_TORCH_LIBRARY_IMPL(flux, CUDA, m) {
  m.impl("_moe_route", TORCH_BOX(&flux::bindings::route_op));
  m.impl("_moe_combine", TORCH_BOX(&flux::bindings::combine_op));
  m.impl("_moe_ag_scatter_gemm", TORCH_BOX(&flux::bindings::ag_scatter_gemm_op));
  m.impl("_moe_gemm_gather_rs", TORCH_BOX(&flux::bindings::gemm_gather_rs_op));
  m.impl("_grouped_gemm", TORCH_BOX(&flux::bindings::grouped_gemm_op));
}
