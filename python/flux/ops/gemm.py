"""Plain GEMM: x · weightᵀ + bias. The baseline of the fused operators, and their result on one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from flux import _invariance, _native
from flux._memory import aligned, readable_if_any, writable
from flux.calls import argument_types, checks
from flux.calls.dispatch import may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import cuda, repeat
from flux.fp8 import scales as fp8
from flux.fp8.scales import Scales
from flux.fp8.torch_product import scaled_mm
from flux.fp8.wide_product import product
from flux.measured import files
from flux.plan.choose import Plan, PlanInput, planned, require

_plans: dict[tuple[Any, ...], Plan] = {}
_OP = repeat.operator()
_left_free = 0  # SMs, by leaving_free
_ALIGNED = 8  # elements in 16 bytes
# Of a model that serves: with more tokens, kernels that load weights early win nothing.
SERVED_TOKENS = 64


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transpose_weight: bool = False,
    out: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> torch.Tensor:
    """x · weightᵀ + bias, accumulated in fp32 and rounded once.

    With scales, x and weight are fp8: each block's sum of products is multiplied by the scales of its row and
    column and added in fp32, then the bias is added.

    Args:
        x: [..., K], bfloat16 or float16 for the kernel; float32 and float64 go through torch. With scales
            float8_e4m3fn or float8_e5m2.
        weight: [N, K] as in nn.Linear, or [K, N] with `transpose_weight`; dtype and device of x. With scales
            float8_e4m3fn, K in one piece: stride(1) == 1, or with `transpose_weight` stride(0) == 1.
        bias: [N], dtype of the result and device of x.
        transpose_weight: weight is [K, N].
        out: contiguous [..., N] to write to.
        scale_x: float32 (or float8_e8m0fnu) factors of x: one entry, one for each row ([..., 1]), or one for
            each 128 of K ([..., K / 128]; column-major, with M rounded up to 4, it is not copied).
        scale_w: of weight: one entry, one for each column ([N], [1, N] or [N, 1]), or with block scales of x
            one for each 128 by 128 block, [N / 128, K / 128], with `transpose_weight` [K / 128, N / 128].
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32.
        accumulate: with scales: "promoted" adds the tensor core's sums of each 128 of K in fp32, or of
            each 256 if scales are not of blocks. "fast" leaves them in the tensor core, which keeps 13 bits
            of them; not with block scales.

    Returns:
        [..., N] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out` or scales; or `out`
            shares memory with an input.

    Example::

        x, weight, bias = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
        assert flux.gemm(x, weight, bias).shape == (8, 32)
        (q, scale_x), (w, scale_w) = flux.quantize(x, "row"), flux.quantize(weight, "row")
        assert flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w).dtype == torch.bfloat16
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if not torch.compiler.is_compiling():
        given = (_OP, _invariance.active(), x, weight, bias, out, transpose_weight, *scaling)
        done: torch.Tensor | None = repeat.without_group().call(*given)
        if done is not None:
            return done
    direct = may_skip_dispatch(x, weight, bias, *scaling[:2])
    tensors = {"x": x, "weight": weight, "bias": bias}
    if not direct or out is not None or scaling:
        of_scales = fp8.named(scale_x, scale_w, out_dtype, accumulate)
        argument_types.check("gemm", **tensors, transpose_weight=transpose_weight, out=out, **of_scales)
    if scaling:
        fp8.no_backward("gemm", **tensors, scale_x=scale_x, scale_w=scale_w)
    if out is not None:
        checks.no_backward_through_out("gemm", **tensors, out=out)
    elif direct and needs_grad(x, weight, bias):
        direct = False
    if out is None:
        result: torch.Tensor = (_cuda if direct else _op)(x, weight, bias, transpose_weight, *scaling)
        return result
    (_cuda_out if direct else _op_out)(x, weight, bias, transpose_weight, out, *scaling)
    return out


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    transpose_weight: bool = False,
    *scaling: Any,
) -> torch.Tensor:
    """gemm with torch only: product and bias in fp32 (float64: in float64), rounded once. scaling: scale_x,
    scale_w, out_dtype and accumulate.
    """
    scales = fp8.given("gemm", *scaling)
    shape, m, _, k = checks.gemm_args("gemm", x, weight, bias, transpose_weight, scales=scales)
    weight, transpose_weight, scales = fp8.canonical(weight, transpose_weight, scales)
    total = product(x.reshape(m, k), weight, transpose_weight, scales)
    if bias is not None:
        total += bias.to(total.dtype)
    # A fresh tensor, and to autograd no view: the caller may change it in place.
    rounded = total.to(fp8.result_dtype(x, scales))
    result: torch.Tensor = torch.ops.aten._unsafe_view(rounded, shape)
    return result


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transpose_weight: bool, *scaling: Any
) -> torch.Tensor:
    scales = fp8.given("gemm", *scaling)
    shape, _, _, _ = checks.gemm_args("gemm", x, weight, bias, transpose_weight, scales=scales)
    return x.new_empty(shape, dtype=fp8.result_dtype(x, scales))


def _fake_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    *scaling: Any,
) -> None:
    scales = fp8.given("gemm", *scaling)
    shape, _, _, _ = checks.gemm_args("gemm", x, weight, bias, transpose_weight, scales=scales)
    checks.out_arg("gemm", out, shape, x, scales=scales)


def _cpu_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    *scaling: Any,
) -> None:
    _fake_out(x, weight, bias, transpose_weight, out, *scaling)
    checks.separate("gemm", "out", out, x, weight, bias, *scaling[:2])
    out.copy_(reference(x, weight, bias, transpose_weight, *scaling))


def _cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transpose_weight: bool, *scaling: Any
) -> torch.Tensor:
    scales = fp8.given("gemm", *scaling)
    recipe = _recipe(x, weight, bias, transpose_weight, None, scales)
    done: torch.Tensor | None = repeat.without_group().call_below(*recipe.given)
    if done is not None:
        return done
    shape, m, n, k = checks.gemm_args("gemm", x, weight, bias, transpose_weight, scales=scales)
    out = checks.output("gemm", None, shape, x, scales=scales)
    launch(x, weight, bias, transpose_weight, out, m, n, k, scales, recipe)
    return out


def _cuda_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    *scaling: Any,
) -> None:
    scales = fp8.given("gemm", *scaling)
    shape, m, n, k = checks.gemm_args("gemm", x, weight, bias, transpose_weight, scales=scales)
    out = checks.output("gemm", out, shape, x, weight, bias, scales=scales)
    recipe = _recipe(x, weight, bias, transpose_weight, out, scales)
    launch(x, weight, bias, transpose_weight, out, m, n, k, scales, recipe)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    scales: Scales | None = None,
    within: repeat.Recipe | None = None,
) -> None:
    """Writes the product of checked arguments, x [..., k], to out [..., n]. within: of the call that this one
    is a part of (flux.comm.repeat).
    """
    if x.is_cuda:
        m, recipe = math.prod(x.shape[:-1]), None
        if within is not None:
            recipe = _recipe(x, weight, bias, transpose_weight, out, scales, within)
        launch(x, weight, bias, transpose_weight, out, m, out.shape[-1], x.shape[-1], scales, recipe)
    else:
        out.copy_(reference(x, weight, bias, transpose_weight, *(scales or ())))


def _recipe(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor | None,
    scales: Scales | None,
    within: repeat.Recipe | None = None,
) -> repeat.Recipe:
    """How a call is repeated. within: of the call that this one is a part of."""
    given = {"batch_invariant": _invariance.active(), "x": x, "weight": weight, "bias": bias, "out": out}
    given |= {"transpose_weight": transpose_weight, **fp8.by_name(scales)}
    return repeat.Recipe(_OP, given, within)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    m: int,
    n: int,
    k: int,
    scales: Scales | None = None,
    recipe: repeat.Recipe | None = None,
    weight_is_constant: bool = False,
) -> None:
    """Runs checked arguments on a GPU: in the kernel, or with torch if the kernel does not support them.

    Args:
        recipe: of the call, if it is to be known (flux.comm.repeat).
        weight_is_constant: as of the kernel.
    """
    x2 = x if x.dim() == 2 else x.reshape(m, k)
    weight, transpose_weight, scales = fp8.canonical(weight, transpose_weight, scales)
    scaling = None if scales is None else scales.of_product(k)
    key = (m, n, k, x.dtype, transpose_weight, x.device, _invariance.active(), scaling)
    plan = _plans.get(key)
    if plan is None:
        num_sms = _sms(x.device)
        why_not, tuning = cuda.why_not(x.device), files.local(x.device)
        problem = PlanInput("cuda", m, n, k, x.dtype, transpose_weight, why_not=why_not, num_sms=num_sms)
        plan = _plans[key] = planned("gemm", replace(problem, tuning=tuning, scaling=scaling))
    require(plan)
    out2 = out if out.dim() == 2 else out.view(m, n)
    if not plan.by_flux:
        unfused(x2, weight, bias, transpose_weight, out2, scales)
        return
    target = writable(out2)
    operands = (aligned(x2), aligned(weight), readable_if_any(bias), target)
    num_sms = _sms(x.device) - _left_free if _left_free else 0
    scaled = fp8.for_kernel(x, scales)
    how = (transpose_weight, plan.choice, num_sms)
    enqueue = functools.partial(_kernel, *operands, *how, weight_is_constant=weight_is_constant, **scaled)
    enqueue()
    read = dict(zip(("x", "weight", "bias"), operands, strict=False)) | scaled
    if recipe is not None and target is out2 and recipe.in_place(**read):
        written = recipe.returns(out, "out")
        used = [*recipe.numbers("x", "weight", "bias"), written, *recipe.numbers("scale_x", "scale_w")]
        repeat.remember(repeat.without_group(), recipe, enqueue, [used])
    if target is not out2:
        out2.copy_(target)


def serving(x: torch.Tensor, weight: torch.Tensor, *, swiglu: bool = False) -> torch.Tensor:
    """x · weightᵀ of few rows, in a model that only serves. In a CUDA graph, the kernel begins to load the
    weight before those in front of it have ended.

    Args:
        x: [..., K].
        weight: [N, K], contiguous.
        swiglu: the first half of the result's columns is a gate: returns silu(gate) * others, [..., N / 2].
    """
    shape, m, n, k = checks.gemm_args("gemm", x, weight, None, False)
    is_constant = in_graph(x)
    if swiglu:
        choice = _gating_choice(m, n, k, x) if x.is_cuda else -1
        if choice < 0:
            gate, others = serving(x, weight).chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * others
        out = checks.output("gemm", None, [*shape[:-1], n // 2], x)
        operands = (aligned(x.reshape(m, k)), aligned(weight), None, out.view(m, n // 2))
        _kernel(*operands, False, choice, 0, swiglu=True, weight_is_constant=is_constant)
        return out
    out = checks.output("gemm", None, shape, x)
    if x.is_cuda:
        launch(x, weight, None, False, out, m, n, k, weight_is_constant=is_constant)
    else:
        out.copy_(reference(x, weight))
    return out


def in_graph(x: torch.Tensor) -> bool:
    """Whether a CUDA graph of a model that only serves is captured: none of its kernels writes a weight."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _gating_choice(m: int, n: int, k: int, x: torch.Tensor) -> int:
    """Packed choice of a tile that has columns of a gate and of what it gates; -1: there is none."""
    sizes = n % (2 * _ALIGNED) == k % _ALIGNED == 0
    if not sizes or x.dtype not in (torch.bfloat16, torch.float16) or cuda.why_not(x.device):
        return -1
    return _gating(m, n, k, _sms(x.device))


@functools.cache
def _gating(m: int, n: int, k: int, num_sms: int) -> int:
    found = _native.core.select_gemm(m, n, k, False, num_sms, swiglu=True)
    return int(found.packed) if found.split > 0 else -1


@contextmanager
def leaving_free(sms: int) -> Iterator[None]:
    """Launches inside leave that many SMs to the work of others, such as NCCL's."""
    global _left_free
    calls = repeat.without_group()
    kept, _left_free = _left_free, sms
    calls.paused = bool(sms)  # its launches take all SMs
    try:
        yield
    finally:
        _left_free = kept
        calls.paused = bool(kept)


def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def unfused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    scales: Scales | None = None,
) -> None:
    """out [m, n] = x [m, k] · weight + bias with torch. scales: canonical."""
    if scales is not None:
        scaled_mm(x, weight, bias, scales, out)
        return
    w = weight if transpose_weight else weight.t()
    if bias is None:
        torch.mm(x, w, out=out)
    else:
        torch.addmm(bias, x, w, out=out)


library.impl("gemm", reference, "CPU")
library.impl("gemm", _cuda, "CUDA")
library.impl("gemm_out", _cpu_out, "CPU")
library.impl("gemm_out", _cuda_out, "CUDA")
torch.library.register_fake("flux::gemm", _fake, lib=library)
torch.library.register_fake("flux::gemm_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.gemm.default
_op_out: Any = torch.ops.flux.gemm_out.default
_kernel: Any = torch.ops.flux._gemm.default
