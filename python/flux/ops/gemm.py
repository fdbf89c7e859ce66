"""Plain GEMM: x · weightᵀ + bias. The baseline of the fused operators, and their result on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flux import _invariance
from flux.comm import cuda
from flux.ops import _check, _gate, _invariant
from flux.ops._library import library, may_skip_dispatch, needs_grad
from flux.ops._tensors import aligned, readable_if_any, wide_type, writable
from flux.ops.plan import Plan, PlanInput, planned
from flux.tuning import store

_plans: dict[tuple[Any, ...], Plan] = {}
_left_free = 0  # SMs, by leaving_free


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transpose_weight: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias, accumulated in fp32 and rounded once.

    Args:
        x: [..., K], bfloat16 or float16 for the kernel; float32 and float64 go through torch.
        weight: [N, K] as in nn.Linear, or [K, N] with `transpose_weight`; dtype and device of x.
        bias: [N], dtype and device of x.
        transpose_weight: weight is [K, N].
        out: contiguous [..., N] to write to.

    Returns:
        [..., N] in x's dtype: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out`; or `out` shares memory
            with an input.

    Example::

        x, weight, bias = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
        assert flux.gemm(x, weight, bias).shape == (8, 32)
    """
    direct = may_skip_dispatch(x, weight, bias)
    if not direct or out is not None:
        _gate.check("gemm", x=x, weight=weight, bias=bias, transpose_weight=transpose_weight, out=out)
    if out is not None:
        _check.no_backward_through_out("gemm", x=x, weight=weight, bias=bias, out=out)
    elif direct and needs_grad(x, weight, bias):
        direct = False
    if out is None:
        result: torch.Tensor = (_cuda if direct else _op)(x, weight, bias, transpose_weight)
        return result
    (_cuda_out if direct else _op_out)(x, weight, bias, transpose_weight, out)
    return out


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, transpose_weight: bool = False
) -> torch.Tensor:
    """gemm with torch only: product and bias in fp32 (float64: in float64), rounded once."""
    shape, m, _, k = _check.gemm_args("gemm", x, weight, bias, transpose_weight)
    wide = wide_type(x.dtype)
    w = weight if transpose_weight else weight.t()
    total = _invariant.product(x.reshape(m, k).to(wide), w.to(wide))
    if bias is not None:
        total += bias.to(wide)
    # A fresh tensor, and to autograd no view: the caller may change it in place.
    result: torch.Tensor = torch.ops.aten._unsafe_view(total.to(x.dtype), shape)
    return result


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transpose_weight: bool
) -> torch.Tensor:
    shape, _, _, _ = _check.gemm_args("gemm", x, weight, bias, transpose_weight)
    return x.new_empty(shape)


def _fake_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
) -> None:
    shape, _, _, _ = _check.gemm_args("gemm", x, weight, bias, transpose_weight)
    _check.out_arg("gemm", out, shape, x)


def _cpu_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
) -> None:
    _fake_out(x, weight, bias, transpose_weight, out)
    _check.separate("gemm", "out", out, x, weight, bias)
    out.copy_(reference(x, weight, bias, transpose_weight))


def _cuda(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transpose_weight: bool
) -> torch.Tensor:
    shape, m, n, k = _check.gemm_args("gemm", x, weight, bias, transpose_weight)
    out = x.new_empty(*shape)
    launch(x, weight, bias, transpose_weight, out, m, n, k)
    return out


def _cuda_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
) -> None:
    shape, m, n, k = _check.gemm_args("gemm", x, weight, bias, transpose_weight)
    launch(x, weight, bias, transpose_weight, _check.output("gemm", out, shape, x, weight, bias), m, n, k)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
) -> None:
    """Writes the product of checked arguments, x [..., k], to out [..., n]."""
    if x.is_cuda:
        m = math.prod(x.shape[:-1])
        launch(x, weight, bias, transpose_weight, out, m, out.shape[-1], x.shape[-1])
    else:
        out.copy_(reference(x, weight, bias, transpose_weight))


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
    m: int,
    n: int,
    k: int,
) -> None:
    """Runs checked arguments on a GPU: in the kernel, or with torch if the kernel does not support them."""
    key = (m, n, k, x.dtype, transpose_weight, x.device, _invariance.active())
    plan = _plans.get(key)
    if plan is None:
        num_sms = _sms(x.device)
        why_not, tuning = cuda.why_not(x.device), store.local(x.device)
        plan = _plans[key] = planned(
            "gemm",
            PlanInput(
                "cuda", m, n, k, x.dtype, transpose_weight, why_not=why_not, num_sms=num_sms, tuning=tuning
            ),
        )
    _invariant.require(plan)
    x2 = x if x.dim() == 2 else x.reshape(m, k)
    out2 = out if out.dim() == 2 else out.view(m, n)
    if not plan.fused:
        unfused(x2, weight, bias, transpose_weight, out2)
        return
    target = writable(out2)
    _kernel(
        aligned(x2),
        aligned(weight),
        readable_if_any(bias),
        target,
        transpose_weight,
        plan.choice,
        _sms(x.device) - _left_free if _left_free else 0,
    )
    if target is not out2:
        out2.copy_(target)


@contextmanager
def leaving_free(sms: int) -> Iterator[None]:
    """Launches inside leave that many SMs to the work of others, such as NCCL's."""
    global _left_free
    kept, _left_free = _left_free, sms
    try:
        yield
    finally:
        _left_free = kept


def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def unfused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transpose_weight: bool,
    out: torch.Tensor,
) -> None:
    """out [m, n] = x [m, k] · weight + bias with torch."""
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
