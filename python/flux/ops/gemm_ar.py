"""GEMM+AllReduce: x · weightᵀ summed over ranks, on every rank; optionally with a residual and RMSNorm."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import torch

from flux import _invariance
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.group import GroupLike, resolve_group
from flux.fp8.scales import Accumulate
from flux.ops import gemm as plain
from flux.ops import norm_and_quant
from flux.ops.all_reduce import Normed, Quantised, Sum, all_reduce
from flux.ops.norm_and_quant import Quant
from flux.ops.norm_and_quant import rms_norm as rms_norm
from flux.ops.norm_and_quant import row_norm as row_norm
from flux.ops.ways.gemm_ar import GEMM_AR

Tensor = torch.Tensor
_OP = GEMM_AR.number


class _How(TypedDict, total=False):
    transpose_weight: bool
    scale_x: Tensor | None
    scale_w: Tensor | None
    out_dtype: torch.dtype | None
    accumulate: Accumulate


class _Sum(Sum, _How): ...


class _Normed(Normed, _How): ...


class _Quantised(Quantised, _How): ...


@overload
def gemm_ar(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Sum]) -> Tensor: ...


@overload
def gemm_ar(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Normed]
) -> tuple[Tensor, Tensor]: ...


@overload
def gemm_ar(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Quantised]
) -> tuple[Tensor, ...]: ...


def gemm_ar(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
    quant: Quant | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
) -> Any:
    """Sum over ranks of x · weightᵀ, plus bias and residual once, on every rank. A collective.

    Each rank's product is accumulated in fp32 and rounded to the result's dtype. Those p products are summed
    in fp32, in rank order; then bias and residual are added and the sum is rounded, once. So results are
    bitwise equal on all ranks, and repeatable. What does not run in one kernel (flux.explain says what, and
    why), and a single rank, may round before the residual is added, and not round the products.

    Args:
        x: [..., K/p]; bfloat16 or float16 for the kernel, float32 and float64 go through torch on GPUs. With
            scales float8_e4m3fn or float8_e5m2.
        weight: [N, K/p] as in nn.Linear, or [K/p, N] with `transpose_weight`; dtype and device of x. With
            scales float8_e4m3fn, K in one piece.
        bias: [N], dtype of the result and device of x, the same on all ranks.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K/p, N].
        residual: [..., N], dtype of the result and device of x, the same on all ranks.
        norm_weight: [N], dtype of the result and device of x: also apply RMSNorm with this weight to the rows
            of the sum.
        eps: of RMSNorm; nothing without `norm_weight`. None: that of fp32 (fp64 for fp64), as in torch.
        out: contiguous [..., N] to write to; not with `norm_weight`. May be `residual`.
        scale_x: of this rank's x: one entry, one a row ([..., 1]), or one for 128 of K; alike on all ranks.
        scale_w: of its weight: one entry, one for each column ([N]), or one for each 128 by 128.
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32; the same on all ranks.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast"), on all ranks.
        quant: with `norm_weight`: quantise the normalised sum to float8_e4m3fn as flux.quantize does, with
            "tensor", "row" or "group128" scales.
        quant_scale: with "tensor": float32 [1], the scale to use (static quantisation); the same on all
            ranks.
        ue8m0: round those scales up to powers of two.
        return_norm: also return the normalised sum.

    Returns:
        [..., N] in x's dtype, with scales in `out_dtype`, the sum: a fresh tensor, or `out`. With
        `norm_weight` a pair of fresh tensors, normalised = sum * rsqrt(mean(sum², over N) + eps) *
        norm_weight, computed in fp32 from the rounded sum and rounded once, and the sum itself, which is the
        next residual. With `quant` a tuple of the quantised normalised sum, its scales as of flux.quantize,
        the sum, and with `return_norm` the normalised sum.

    Raises:
        TypeError, CommTimeoutError, RuntimeError: as flux.gemm_rs.
        ValueError: as flux.gemm_rs; or an argument needs a gradient in grad mode.

    Example::

        x, weight = torch.randn(4, 64), torch.randn(32, 64)  # [M, K/p], [N, K/p]
        residual, norm_weight = torch.zeros(4, 32), torch.ones(32)
        normalised, total = flux.gemm_ar(x, weight, residual=residual, norm_weight=norm_weight)
        assert normalised.shape == total.shape == (4, 32)  # [M, N], the same on all ranks
    """
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    quantised = norm_and_quant.arguments("gemm_ar", quant, quant_scale, ue8m0, return_norm)
    if eps is None:
        eps = checks.norm_eps(x)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        options = (residual, norm_weight, eps, *quantised, out, *scaling)
        done = calls.call(_OP, _invariance.active(), x, weight, bias, transpose_weight, *options)
        if done is not None:
            return done
    norm_and_quant.check("gemm_ar", norm_weight, out, quantised)
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "transpose_weight": transpose_weight}
    given |= {"out": out, "residual": residual, "norm_weight": norm_weight, "eps": eps}
    given |= zip(norm_and_quant.NAMES, quantised, strict=False)
    return front.enter(GEMM_AR, given, group, scaling=scaling)


def serving(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: GroupLike,
) -> tuple[Tensor, Tensor]:
    """gemm_ar with a norm, of a model that only serves: in a CUDA graph the next kernel loads early."""
    pg = resolve_group(group, "gemm_ar")
    if bias is None and x.shape[0] <= plain.SERVED_TOKENS:
        product = plain.serving(x, weight)
    else:
        product = torch.nn.functional.linear(x, weight, bias if pg.rank() == 0 else None)
    return all_reduce(product, group=pg, residual=residual, norm_weight=norm_weight, eps=eps)


front.register(GEMM_AR, "_out", "_norm", "_quant", casts=True)
