// The CUDA ops of mixtures of experts; see ops.cc.
#include <torch/csrc/stable/library.h>

#include "bindings/kept_launch.h"
#include "moe/moe.h"

namespace flux::bindings {
namespace {

int32_t* words(void* address) { return static_cast<int32_t*>(address); }
float* floats(void* address) { return static_cast<float*>(address); }

moe::RoutingArrays routing_arrays(Addresses a) {
  return moe::routing_arrays([&](int i) { return a[i]; });
}

// The addresses of two tensors, of the arrays of a routing, and of further tensors.
template <class Others>
std::vector<void*> addresses(const Tensor& first, const Tensor& second, const std::vector<Tensor>& arrays,
                             const Others& others) {
  FLUX_CHECK(arrays.size() == moe::kRoutingArrays, arrays.size());
  std::vector<void*> all = {first.data_ptr(), second.data_ptr()};
  for (const Tensor& array : arrays) all.push_back(array.data_ptr());
  all.insert(all.end(), others.begin(), others.end());
  return all;
}
constexpr int kAfterArrays = 2 + moe::kRoutingArrays;

int extent(const Tensor& tensor, int dimension) { return static_cast<int>(tensor.size(dimension)); }

// weights: [world_size, max_tokens, top_k].
moe::Layout layout_of(const Tensor& weights, int rank, int ep_size, int num_experts) {
  return {extent(weights, 0), rank, ep_size, num_experts, extent(weights, 2), extent(weights, 1)};
}

// ids (int32 or int64) and weights (float32): [tokens, top_k] of this rank, contiguous. arrays: in the order of
// RoutingArrays. all_weights: [world_size, max_tokens, top_k]. symm: null if there is no exchange.
void route_op(Tensor ids, Tensor weights, std::vector<Tensor> arrays, Tensor all_weights, Tensor scratch,
              const SymmBuffer* symm, int rank, int ep_size, int num_experts, int block_m) {
  const moe::Layout layout = layout_of(all_weights, rank, ep_size, num_experts);
  FLUX_CHECK(ids.dim() == 2 && ids.size(1) == layout.top_k, ids.dim());
  FLUX_CHECK(weights.numel() == ids.numel(), weights.numel(), ids.numel());
  FLUX_CHECK(scratch.numel() >= moe::route_scratch_words(layout), scratch.numel());
  const auto tensors = addresses(ids, weights, arrays, addresses_of(all_weights, scratch));
  enqueue(ids, tensors,
          [=, wide = ids.element_size() == sizeof(int64_t), tokens = extent(ids, 0)](Addresses a,
                                                                                     cudaStream_t stream) {
            moe::route(layout, block_m, {a[0], wide, floats(a[1]), tokens}, symm, routing_arrays(a + 2),
                       floats(a[kAfterArrays]), words(a[kAfterArrays + 1]), stream);
          });
}

// products [rows, n], positions and weights [..., top_k], out [..., n].
void combine_op(Tensor products, Tensor positions, Tensor weights, Tensor out) {
  FLUX_CHECK(products.dim() == 2 && products.stride(1) == 1, products.dim());
  const int64_t n = products.size(1), top_k = positions.size(positions.dim() - 1);
  FLUX_CHECK(weights.numel() == positions.numel(), weights.numel(), positions.numel());
  const int64_t tokens = positions.numel() / top_k;
  FLUX_CHECK(out.numel() == tokens * n, out.numel(), tokens, n);
  enqueue(products, addresses_of(products, positions, weights, out),
          [=, rows = products.size(0), stride = products.stride(0), dtype = dtype_of(products)](
              Addresses a, cudaStream_t s) {
            moe::combine({a[0], rows, n, stride}, dtype, words(a[1]), floats(a[2]), tokens,
                         static_cast<int>(top_k), a[3], s);
          });
}

// The rows of a tensor, of which the first offsets[-1] belong to experts, and how many offsets there are.
using Rows = std::pair<moe::ExpertRows, int64_t>;
Rows rows_of(const Tensor& tensor, const Tensor& offsets) {
  FLUX_CHECK(tensor.dim() == 2, tensor.dim());
  return {{nullptr, extent(tensor, 0), extent(tensor, 1), dtype_of(tensor)}, offsets.numel()};
}
moe::ExpertRows at(void* offsets, Rows rows) {
  rows.first.end = words(offsets) + rows.second - 1;
  return rows.first;
}

// Of a contiguous product, of which an activation makes rows.
runtime::Matrix product_of(const Tensor& product, const Tensor& rows) {
  FLUX_CHECK(product.dim() == 2 && product.size(0) == rows.size(0), product.dim(), rows.size(0));
  return {nullptr, product.size(0), product.size(1), product.size(1)};
}
// x [m, n], tokens and scores [rows], out [rows, n].
void gather_rows_op(Tensor x, Tensor tokens, Tensor offsets, Optional scores, Tensor out) {
  FLUX_CHECK(x.dim() == 2 && x.size(1) == out.size(1) && tokens.numel() == out.size(0), x.dim(), x.size(1),
             tokens.numel());
  enqueue(x, addresses_of(x, tokens, offsets, scores, out),
          [rows = rows_of(out, offsets)](Addresses a, cudaStream_t stream) {
            moe::gather_rows(at(a[2], rows), a[0], words(a[1]), floats(a[3]), a[4], stream);
          });
}

// rows and x [rows, n], scores and dots [rows].
void finish_rows_op(Tensor data, Tensor offsets, Optional scores, Optional x, Optional dots) {
  FLUX_CHECK(x.has_value() == dots.has_value(), x.has_value());
  if (x.has_value())
    FLUX_CHECK(x->numel() == data.numel() && dots->numel() == data.size(0), x->numel(), dots->numel());
  enqueue(data, addresses_of(data, offsets, scores, x, dots),
          [rows = rows_of(data, offsets)](Addresses a, cudaStream_t stream) {
            moe::finish_rows(at(a[1], rows), a[0], floats(a[2]), a[3], floats(a[4]), stream);
          });
}

// product [rows, n], out [rows, n], or n / 2 for swiglu.
void activate_rows_op(Tensor product, Tensor offsets, int activation, Tensor out) {
  enqueue(product, addresses_of(product, offsets, out),
          [=, rows = rows_of(out, offsets), product = product_of(product, out)](Addresses a,
                                                                                cudaStream_t stream) {
            moe::activate_rows(at(a[1], rows), activation, at(a[0], product), a[2], stream);
          });
}

// grad as out of activate_rows_op, product and out as its product; scores and dots [rows], or none.
void differentiate(Tensor grad, Tensor product, Tensor offsets, int activation, Tensor out, Optional scores,
                   Optional dots) {
  FLUX_CHECK(out.numel() == product.numel(), out.numel(), product.numel());
  if (scores.has_value())
    FLUX_CHECK(scores->numel() == grad.size(0) && dots->numel() == grad.size(0), scores->numel(),
               dots->numel());
  enqueue(grad, addresses_of(grad, product, offsets, out, scores, dots),
          [=, rows = rows_of(grad, offsets), product = product_of(product, grad)](Addresses a,
                                                                                  cudaStream_t stream) {
            moe::activation_grad(at(a[2], rows), activation, a[0], at(a[1], product), a[3],
                                 {floats(a[4]), a[0], floats(a[5])}, stream);
          });
}
void activation_grad_op(Tensor grad, Tensor product, Tensor offsets, int activation, Tensor out) {
  differentiate(grad, product, offsets, activation, out, std::nullopt, std::nullopt);
}
void finish_activation_op(Tensor data, Tensor product, Tensor offsets, Tensor scores, int activation,
                          Tensor out, Tensor dots) {
  differentiate(data, product, offsets, activation, out, scores, dots);
}

// Of each expert [n, k]: the rows or the columns are contiguous. Those of a single expert may be any step apart.
runtime::Matrices weights_of(const Tensor& weight, bool transposed) {
  const int64_t rows = weight.size(transposed ? 2 : 1), stride = weight.stride(transposed ? 2 : 1);
  const int64_t experts = weight.size(0), step = experts > 1 ? weight.stride(0) : rows * stride;
  return {{weight.data_ptr(), rows, weight.size(transposed ? 1 : 2), stride}, experts, step};
}

// The arguments that all grouped GEMMs share. x [m, k] and out [num_rows, ...] are contiguous; weight [experts, n, k].
moe::GroupedGemmArgs grouped_args(const Tensor& x, const Tensor& weight, const Tensor& out, int config,
                                  int num_sms, const Optional& scale_x, const Optional& scale_w, bool fast) {
  moe::GroupedGemmArgs args = {};
  args.x = {x.data_ptr(), x.numel() / x.size(1), x.size(1), x.size(1)};
  args.transpose_weight = weight.stride(2) != 1;
  args.weight = weights_of(weight, args.transpose_weight);
  args.num_rows = extent(out, 0);
  args.dtype = dtype_of(out);
  args.config = config;
  args.num_sms = num_sms;
  args.scales = scales_of(x, scale_x, scale_w, fast);
  // One for each expert, for each row of its weight, or for each of its blocks.
  if (args.is_fp8()) {
    args.scales.weight_step = scale_w->dim() == 2 ? 1 : 0;
    FLUX_CHECK(args.scales.blocks == (scale_w->dim() == 3), scale_w->dim());
  }
  return args;
}

// The same arguments with tensors; scales: of x and weight.
moe::GroupedGemmArgs at(void* x, void* weight, void* out, Addresses scales, moe::GroupedGemmArgs args) {
  args.x.data = x;
  args.weight.first.data = weight;
  args.out = out;
  args.scales.x = floats(scales[0]);
  args.scales.weight = floats(scales[1]);
  return args;
}

// x [m, k], weight [experts, n, k], out [num_rows, n or n / 2].
void grouped_gemm_op(Tensor x, Tensor weight, Tensor offsets, Optional rows, int activation, Tensor out,
                     Tensor schedule, int config, int num_sms, Optional scale_x, Optional scale_w,
                     bool fast) {
  moe::GroupedGemmArgs args = grouped_args(x, weight, out, config, num_sms, scale_x, scale_w, fast);
  args.activation = activation;
  FLUX_CHECK(schedule.numel() >= moe::schedule_words(args.num_rows, args.experts()), schedule.numel());
  enqueue(x, addresses_of(x, weight, offsets, rows, out, schedule, scale_x, scale_w),
          [args](Addresses a, cudaStream_t stream) mutable {
            args.offsets = words(a[2]);
            args.rows = words(a[3]);
            args.schedule = words(a[5]);
            moe::grouped_gemm(at(a[0], a[1], a[4], a + 6, args), stream);
          });
}

// grad [m, n], x [m, k], out [experts, n, k]. Of grad and x the rows, of out those of each expert may lie apart.
void grouped_wgrad_op(Tensor grad, Tensor x, Tensor offsets, Tensor out, int choice, int num_sms) {
  moe::GroupedWgradArgs args = {};
  args.grad = {nullptr, grad.size(0), grad.size(1), grad.stride(0)};
  args.x = {nullptr, x.size(0), x.size(1), x.stride(0)};
  args.out = weights_of(out, /*transposed=*/false);
  args.adds = dtype_of(out) == runtime::DType::kFloat32;
  args.dtype = dtype_of(x);
  args.choice = choice;
  args.num_sms = num_sms;
  FLUX_CHECK(offsets.numel() == args.out.count + 1, offsets.numel(), args.out.count);
  enqueue(x, addresses_of(grad, x, offsets, out), [args](Addresses a, cudaStream_t stream) mutable {
    args.grad.data = a[0];
    args.x.data = a[1];
    args.offsets = words(a[2]);
    args.out.first.data = a[3];
    moe::grouped_wgrad(args, stream);
  });
}

// x [tokens, k], weight [local experts, n, k], out [max_rows, n or n / 2].
void ag_scatter_gemm_op(Tensor x, Tensor weight, std::vector<Tensor> arrays, int ep_size, int num_experts,
                        int top_k, int max_tokens, int activation, Tensor out, const SymmBuffer* symm,
                        int config, int num_sms, Optional scale_x, Optional scale_w, bool fast) {
  const moe::Layout layout = {symm->world_size, symm->rank, ep_size, num_experts, top_k, max_tokens};
  moe::GroupedGemmArgs args = grouped_args(x, weight, out, config, num_sms, scale_x, scale_w, fast);
  args.activation = activation;
  enqueue(x, addresses(x, weight, arrays, addresses_of(out, scale_x, scale_w)),
          [=](Addresses a, cudaStream_t stream) {
            moe::ag_scatter_gemm(at(a[0], a[1], a[kAfterArrays], a + kAfterArrays + 1, args), layout,
                                 routing_arrays(a + 2), *symm, stream);
          });
}

// x [max_rows, k], weight [local experts, n, k], weights [world_size, max_tokens, top_k], products
// [max_rows, n], out [tokens, n], all but weight contiguous.
void gemm_gather_rs_op(Tensor x, Tensor weight, std::vector<Tensor> arrays, Tensor weights, int ep_size,
                       int num_experts, Tensor products, Tensor out, const SymmBuffer* symm, int config,
                       int tiles_per_chunk, int communication_ctas, int num_sms, Optional scale_x,
                       Optional scale_w, bool fast) {
  const moe::Layout layout = layout_of(weights, symm->rank, ep_size, num_experts);
  const auto args = grouped_args(x, weight, products, config, num_sms, scale_x, scale_w, fast);
  enqueue(x, addresses(x, weight, arrays, addresses_of(weights, products, out, scale_x, scale_w)),
          [=, tokens = extent(out, 0)](Addresses a, cudaStream_t stream) {
            void* const* const b = a + kAfterArrays;
            moe::gemm_gather_rs(at(a[0], a[1], b[1], b + 3, args),
                                {floats(b[0]), b[2], tokens, tiles_per_chunk, communication_ctas}, layout,
                                routing_arrays(a + 2), *symm, stream);
          });
}

}  // namespace
}  // namespace flux::bindings

STABLE_TORCH_LIBRARY_IMPL(flux, CUDA, m) {
  m.impl("_moe_route", TORCH_BOX(&flux::bindings::route_op));
  m.impl("_moe_combine", TORCH_BOX(&flux::bindings::combine_op));
  m.impl("_moe_gather_rows", TORCH_BOX(&flux::bindings::gather_rows_op));
  m.impl("_moe_finish_rows", TORCH_BOX(&flux::bindings::finish_rows_op));
  m.impl("_moe_activate_rows", TORCH_BOX(&flux::bindings::activate_rows_op));
  m.impl("_moe_finish_activation", TORCH_BOX(&flux::bindings::finish_activation_op));
  m.impl("_moe_activation_grad", TORCH_BOX(&flux::bindings::activation_grad_op));
  m.impl("_moe_ag_scatter_gemm", TORCH_BOX(&flux::bindings::ag_scatter_gemm_op));
  m.impl("_moe_gemm_gather_rs", TORCH_BOX(&flux::bindings::gemm_gather_rs_op));
  m.impl("_grouped_gemm", TORCH_BOX(&flux::bindings::grouped_gemm_op));
  m.impl("_grouped_wgrad", TORCH_BOX(&flux::bindings::grouped_wgrad_op));
}
