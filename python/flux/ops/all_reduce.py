"""AllReduce alone, with the sums of flux.gemm_ar; optionally with a residual and RMSNorm."""

from __future__ import annotations

from typing import Any, Required, TypedDict, Unpack, overload

import torch

from flux import _invariance
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.group import GroupLike
from flux.ops import norm_and_quant
from flux.ops.norm_and_quant import Quant
from flux.ops.ways.all_reduce import ALL_REDUCE

Tensor = torch.Tensor
_OP = ALL_REDUCE.number


class _How(TypedDict, total=False):
    group: GroupLike
    residual: Tensor | None
    eps: float | None


# By what is returned: the sum, that and its norm, or what is quantised too.
class Sum(_How, total=False):
    norm_weight: None
    out: Tensor | None


class Normed(_How, total=False):
    norm_weight: Required[Tensor]
    out: None
    quant: None


class Quantised(_How, total=False):
    norm_weight: Required[Tensor]
    out: None
    quant: Required[Quant]
    quant_scale: Tensor | None
    ue8m0: bool
    return_norm: bool


@overload
def all_reduce(x: Tensor, **how: Unpack[Sum]) -> Tensor: ...


@overload
def all_reduce(x: Tensor, **how: Unpack[Normed]) -> tuple[Tensor, Tensor]: ...


@overload
def all_reduce(x: Tensor, **how: Unpack[Quantised]) -> tuple[Tensor, ...]: ...


def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
    quant: Quant | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
) -> Any:
    """The sum of x over all ranks, plus residual once, on every rank. A collective.

    Summed in fp32, in rank order, and rounded once: bitwise equal on all ranks, and repeatable. What does not
    run fused (flux.explain says what, and why) is summed by torch on GPUs, in x's dtype, and rounded before
    the residual is added.

    Args:
        x: any shape, the same on all ranks; bfloat16, float16, float32 or float64. On GPUs bfloat16 and
            float16 of at most 64 MiB and a multiple of 8 elements (in each row, with `norm_weight`) run
            fused.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        residual: x's shape, dtype and device, the same on all ranks.
        norm_weight: [N], dtype and device of x [..., N]: also apply RMSNorm with this weight to the rows of
            the sum.
        eps: of RMSNorm; nothing without `norm_weight`. None: that of fp32 (fp64 for fp64), as in torch.
        out: contiguous tensor of x's shape to write to; not with `norm_weight`. May be x or `residual`.
        quant: with `norm_weight`: quantise the normalised sum to float8_e4m3fn, with "tensor", "row" or
            "group128" scales.
        quant_scale: with "tensor": float32 [1], the scale to use; the same on all ranks.
        ue8m0: round those scales up to powers of two.
        return_norm: also return the normalised sum.

    Returns:
        The sum in x's shape and dtype: a fresh tensor, or `out`. With `norm_weight` a pair of fresh tensors:
        the normalised sum, computed as by flux.gemm_ar, and the sum itself, which is the next residual. With
        `quant` the tuple that flux.gemm_ar returns.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; `out` shares memory with an
            input without being it; or, where the ranks notice, they made different calls.
        CommTimeoutError, RuntimeError: as flux.gemm_ar.

    Example::

        x, residual, norm_weight = torch.ones(4, 64), torch.zeros(4, 64), torch.ones(64)
        normalised, total = flux.all_reduce(x, residual=residual, norm_weight=norm_weight)
        assert (total == p).all() and normalised.shape == (4, 64)
    """
    quantised = norm_and_quant.arguments("all_reduce", quant, quant_scale, ue8m0, return_norm)
    if eps is None:
        eps = checks.norm_eps(x)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, residual, norm_weight, eps, *quantised, out)
        if done is not None:
            return done
    norm_and_quant.check("all_reduce", norm_weight, out, quantised)
    given = {"x": x, "residual": residual, "norm_weight": norm_weight, "eps": eps, "out": out}
    given |= dict(zip(norm_and_quant.NAMES, quantised, strict=False))
    return front.enter(ALL_REDUCE, given, group)


front.register(ALL_REDUCE, "_out", "_norm", "_quant")
