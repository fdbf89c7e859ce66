"""Schemas of all torch operators of flux; those with `_` are kernels. With ``Library.impl``, as the dispatch
of ``custom_op`` takes too much host time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Run = TypeVar("Run", bound=Callable[..., Any])
_torch_library: Any = torch.library  # not typed
library: Any = _torch_library.Library("flux", "FRAGMENT")


def implement(name: str, run: Run, fake: Callable[..., Any], on_gpu: Run | None = None) -> Run:
    """Registers what an operator is on CPUs and GPUs, and on tensors without data; returns the operator."""
    library.impl(name, run, "CPU")
    library.impl(name, on_gpu or run, "CUDA")
    torch.library.register_fake(f"flux::{name}", fake, lib=library)
    return cast(Run, getattr(torch.ops.flux, name).default)


define = library.define
public = functools.partial(define, tags=(torch.Tag.pt2_compliant_tag,))

_X = "Tensor x, Tensor weight, Tensor? bias"
# biases: empty, or one for each weight. Results: one for each weight, then the gathered x if requested, and
# with scales those of its rows.
_XS = "Tensor x, Tensor[] weights, Tensor?[] biases, bool transpose_weight"
# Of torch operators of several weights, the names of arguments that public functions have other names for.
PUBLIC_NAMES = {"weights": "weight", "biases": "bias", "outs": "out"}

# Of fp8 operands.
_HOW = "ScalarType? out_dtype=None, str accumulate='promoted'"
_SCALES = f"Tensor? scale_x=None, Tensor? scale_w=None, {_HOW}"

public("quantize(Tensor x, str quant, Tensor? scale, bool ue8m0, ScalarType dtype) -> (Tensor, Tensor)")
public(f"gemm({_X}, bool transpose_weight, {_SCALES}) -> Tensor")
public(f"gemm_out({_X}, bool transpose_weight, Tensor(a!) out, {_SCALES}) -> ()")
public(f"gemm_rs({_X}, bool transpose_weight, str group_name, {_SCALES}) -> Tensor")
public(f"gemm_rs_out({_X}, bool transpose_weight, str group_name, Tensor(a!) out, {_SCALES}) -> ()")

_AG = f"{_XS}, bool return_gathered, str group_name"
_AG_SCALES = f"Tensor? scale_x=None, Tensor[]? scale_w=None, {_HOW}"
public(f"ag_gemm({_AG}, {_AG_SCALES}) -> Tensor[]")
public(f"ag_gemm_out({_AG}, Tensor(a!)[] outs, {_AG_SCALES}) -> ()")
# gemm_rs, and a concurrent all_gather of `rows`.
public(
    "gemm_rs_with_gather(Tensor x, Tensor weight, bool transpose_weight, Tensor rows, str group_name)"
    " -> (Tensor, Tensor)"
)
public("all_gather(Tensor x, str group_name) -> Tensor")
public("all_gather_out(Tensor x, str group_name, Tensor(a!) out) -> ()")

_AR = f"{_X}, bool transpose_weight, Tensor? residual"
_NORM = "Tensor norm_weight, float eps"
_QUANT = "str quant, Tensor? quant_scale, bool ue8m0, bool return_norm"
public(f"gemm_ar({_AR}, str group_name, {_SCALES}) -> Tensor")
public(f"gemm_ar_out({_AR}, str group_name, Tensor(a!) out, {_SCALES}) -> ()")
# Returns the normalised sum and the sum.
public(f"gemm_ar_norm({_AR}, {_NORM}, str group_name, {_SCALES}) -> (Tensor, Tensor)")
# Returns fp8 of the normalised sum, its scales, the sum, and with return_norm the normalised sum.
public(f"gemm_ar_quant({_AR}, {_NORM}, str group_name, {_QUANT}, {_SCALES}) -> Tensor[]")
_SUM = "Tensor x, Tensor? residual"
public(f"all_reduce({_SUM}, str group_name) -> Tensor")
public(f"all_reduce_out({_SUM}, str group_name, Tensor(a!) out) -> ()")
public(f"all_reduce_norm({_SUM}, {_NORM}, str group_name) -> (Tensor, Tensor)")
public(f"all_reduce_quant({_SUM}, {_NORM}, str group_name, {_QUANT}) -> Tensor[]")
# wire: how contributions travel, see flux/ops/ways/int8_sum.py.
public("reduce_scatter(Tensor x, str group_name, str? wire=None) -> Tensor")
public("reduce_scatter_out(Tensor x, str group_name, Tensor(a!) out, str? wire=None) -> ()")

# Gradients of weights: see wgrad.py.
public("wgrad_accum(Tensor grad_output, Tensor x, Tensor(a!) main_grad) -> ()")

# Mixture of experts (flux/moe). routing: the tensors of a flux.moe.Routing.
public(
    f"grouped_gemm(Tensor x, Tensor weight, Tensor offsets, Tensor? rows, str? activation, {_SCALES})"
    " -> Tensor"
)
public(
    "moe_route(Tensor topk_ids, Tensor topk_weights, int num_experts, int ep_size, int max_tokens, "
    "str group_name, int? max_node_tokens) -> Tensor[]"
)
public(
    "moe_tokens_of_rows(Tensor rows, Tensor incoming, int ep_size, int max_tokens, str group_name) -> Tensor"
)
# Gradients of all experts' weights [E, N, K]: see wgrad.py.
_GROUPED_WGRAD = "Tensor grad_output, Tensor x, Tensor offsets"
public(f"grouped_wgrad({_GROUPED_WGRAD}) -> Tensor")
public(f"grouped_wgrad_accum({_GROUPED_WGRAD}, Tensor(a!) main_grad) -> ()")
# Between GEMMs: see moe/rows.py. Without x, finish_rows returns no dot products, but an empty tensor.
public("moe_gather_rows(Tensor x, Tensor tokens, Tensor offsets, Tensor? scores) -> Tensor")
public("moe_finish_rows(Tensor(a!) rows, Tensor offsets, Tensor? scores, Tensor? x) -> Tensor")
public(
    "moe_finish_activation(Tensor(a!) rows, Tensor product, Tensor offsets, Tensor scores, str activation)"
    " -> (Tensor, Tensor)"
)
public("moe_activate_rows(Tensor product, Tensor offsets, str activation) -> Tensor")
public("moe_activation_grad(Tensor grad, Tensor product, Tensor offsets, str activation) -> Tensor")
# The two layers.
_LAYER = (
    "Tensor x, Tensor weight, Tensor[] routing, int num_experts, int ep_size, int max_tokens, "
    f"int num_tokens, str? activation, str group_name, {_SCALES}, str? wire=None"
)
public(f"moe_ag_scatter_gemm({_LAYER}) -> Tensor")
public(f"moe_gemm_gather_rs({_LAYER}) -> Tensor")

# scale_x, scale_w: of fp8 operands, else none. Vectors of one fp32 scale, or of one for each row of x and of
# the weight; or block scales: of x [m, k / 128], its columns one after the other, padded to four rows; of the
# weight [n / 128, k / 128]. Of experts: [e], [e, n] or [e, n / 128, k / 128]. fast: sums may stay in the
# tensor cores. The result has the dtype of `out`.
_FP8 = "Tensor? scale_x=None, Tensor? scale_w=None, bool fast=False"
# config < 0: the cost model chooses. num_sms 0: all SMs. copy_epoch 0: the SMs of the launch send, and the
# device counts the epochs; otherwise copy engines send, and this is the epoch, which the host counts.
# weight_is_constant, swiglu: as in csrc/operators.h.
define(
    f"_gemm({_X}, Tensor(a!) out, bool transpose_weight, int config, int num_sms, {_FP8}, "
    "bool weight_is_constant=False, bool swiglu=False) -> ()"
)
define(
    f"_gemm_rs({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms, "
    f"int copy_epoch, int chunks, Tensor? staging, bool rounds_own=False, {_FP8}) -> ()"
)
# Of granularity 0 (one scale for all of x), 1 (one for each row), 2 (for 128 elements of a row) or 3 (for 128
# x 128 of a matrix). q_scale: as flux.quantize returns it. scale: of granularity 0, the scale to use, which
# is copied to `q_scale`. parts: scratch memory of granularity 0 without such a scale, of
# _core.QUANTIZE_SCRATCH_FLOATS.
define(
    "_quantize(Tensor x, Tensor(a!) q, Tensor(b!) q_scale, int granularity, bool ue8m0, Tensor? scale, "
    "Tensor(c!)? parts) -> ()"
)
# total += residual, and `out` the RMSNorm of its rows.
define("_add_norm(Tensor(a!) total, Tensor residual, Tensor weight, float eps, Tensor(b!) out) -> ()")
# With q: the normalised sum is quantised to e4m3, too. quant_scale: as `scale` above.
_QUANTISED = (
    "Tensor(c!)? q=None, Tensor(d!)? q_scale=None, int granularity=-1, bool ue8m0=False, "
    "Tensor? quant_scale=None, Tensor(e!)? parts=None"
)
# mode (csrc/runtime/symm_buffer.h): 0 one-shot, 1 two-shot. With norm_weight, `out` is the normalised sum,
# and residual_out the sum.
define(
    f"_gemm_ar({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms, "
    f"int mode, Tensor? residual, Tensor? norm_weight, float eps, Tensor(b!)? residual_out, {_QUANTISED})"
    " -> ()"
)
# With scatter (mode 2), `out` is this rank's shard of the rows. Otherwise as _gemm_ar.
define(
    "_all_reduce(Tensor x, Tensor(a!) out, int symm_buffer, int num_sms, int mode, Tensor? residual=None, "
    f"Tensor? norm_weight=None, float eps=0.0, Tensor(b!)? residual_out=None, {_QUANTISED}) -> ()"
)
# Of x [ranks, rows, n], whose contributions travel as int8. rounds_own: so does what a rank has for itself.
define("_reduce_scatter_int8(Tensor x, Tensor(a!) out, int symm_buffer, int num_sms, bool rounds_own) -> ()")
# Gathering kernels: copy engines signal every chunk_rows rows. reuse: multiply the rows that the previous
# launch has gathered by another weight. _collect copies these rows to a tensor of the user.
define(
    f"_ag_gemm({_X}, Tensor(a!) out, bool transpose_weight, int symm_buffer, int config, int num_sms, "
    f"int copy_epoch, int chunk_rows, bool reuse, {_FP8}) -> ()"
)
# begun: _begin_all_gather has already enqueued the copies; other kernels may have been launched since.
define(
    "_all_gather(Tensor x, Tensor(a!) out, int symm_buffer, int copy_epoch, int chunk_rows, bool begun) -> ()"
)
define("_begin_all_gather(Tensor x, int symm_buffer, int copy_epoch, int chunk_rows) -> ()")
# gathered_scale, with scale_x: the scales of the gathered rows, one column after the other.
define(
    "_collect(Tensor x, Tensor(a!) gathered, int symm_buffer, int copy_epoch, Tensor? scale_x=None, "
    "Tensor(b!)? gathered_scale=None) -> ()"
)
# activation: 0 for none, else 1 + index in grouped_gemm.ACTIVATIONS. schedule: int32 scratch memory.
define(
    "_grouped_gemm(Tensor x, Tensor weight, Tensor offsets, Tensor? rows, int activation, Tensor(a!) out, "
    f"Tensor(b!) schedule, int config, int num_sms, {_FP8}) -> ()"
)
# out: fp32, to which is added, or of the operands' type. choice: as in csrc/moe/moe.h.
define(f"_grouped_wgrad({_GROUPED_WGRAD}, Tensor(a!) out, int choice, int num_sms) -> ()")
# ids, weights: of this rank. arrays, all_weights: results (flux.moe.Routing). symm_buffer 0: no exchange.
define(
    "_moe_route(Tensor ids, Tensor weights, Tensor(a!)[] arrays, Tensor(b!) all_weights, "
    "Tensor(c!) scratch, int symm_buffer, int rank, int ep_size, int num_experts, int block_m) -> ()"
)
# arrays: as for _moe_route. products: scratch memory for the result of the GEMM.
define(
    "_moe_ag_scatter_gemm(Tensor x, Tensor weight, Tensor[] arrays, int ep_size, int num_experts, "
    "int top_k, int max_tokens, int activation, Tensor(a!) out, int symm_buffer, int config, int num_sms, "
    f"{_FP8}) -> ()"
)
define(
    "_moe_gemm_gather_rs(Tensor x, Tensor weight, Tensor[] arrays, Tensor weights, int ep_size, "
    "int num_experts, Tensor(a!) products, Tensor(b!) out, int symm_buffer, int config, "
    f"int tiles_per_chunk, int communication_ctas, int num_sms, {_FP8}) -> ()"
)
define("_moe_combine(Tensor products, Tensor positions, Tensor weights, Tensor(a!) out) -> ()")
# activation: as for _grouped_gemm, and there is one.
define("_moe_gather_rows(Tensor x, Tensor tokens, Tensor offsets, Tensor? scores, Tensor(a!) out) -> ()")
define("_moe_finish_rows(Tensor(a!) rows, Tensor offsets, Tensor? scores, Tensor? x, Tensor(b!)? dots) -> ()")
define("_moe_activate_rows(Tensor product, Tensor offsets, int activation, Tensor(a!) out) -> ()")
define(
    "_moe_finish_activation(Tensor(a!) rows, Tensor product, Tensor offsets, Tensor scores, int activation, "
    "Tensor(b!) out, Tensor(c!) dots) -> ()"
)
define(
    "_moe_activation_grad(Tensor grad, Tensor product, Tensor offsets, int activation, Tensor(a!) out) -> ()"
)
# Loads every kernel.
define("_prepare() -> ()")
# Kept launches (csrc/runtime/launch_table.h): after _keep, this thread's kernel operators keep their launches
# instead of enqueueing them, until _kept returns the handles.
define("_launch_table() -> int")
define("_keep() -> ()")
define("_kept() -> int[]")
