"""AllGather+GEMM: the gathered rows of all ranks · weightᵀ of each rank (arXiv 2406.06858, section 4)."""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar, Unpack, overload

import torch

from flux import _invariance
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.group import GroupLike, group_name, process_group
from flux.fp8.scales import Accumulate
from flux.ops.ways import ag_gemm as ways
from flux.ops.ways.ag_gemm import AG_GEMM, Biases, Tensors

Tensor = torch.Tensor
_OP = AG_GEMM.number


class _How(TypedDict, total=False):
    group: GroupLike
    transpose_weight: bool
    out_dtype: torch.dtype | None
    accumulate: Accumulate


Each = TypeVar("Each")  # what a call has for each weight: one of it, or a list


# By what is returned: products, also what was gathered, or that and its scales.
class _Products(_How, Generic[Each], total=False):
    return_gathered: Literal[False]
    out: Each | None
    scale_x: Tensor | None
    scale_w: Each | None


class _Gathered(_How, Generic[Each], total=False):
    return_gathered: Required[Literal[True]]
    out: Each | None


class _Scaled(_Gathered[Each]):
    scale_x: Tensor
    scale_w: Each


@overload
def ag_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Products[Tensor]]
) -> Tensor: ...


@overload
def ag_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Gathered[Tensor]]
) -> tuple[Tensor, Tensor]: ...


@overload
def ag_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Unpack[_Scaled[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def ag_gemm(
    x: Tensor, weight: Tensors, bias: Biases | None = None, **how: Unpack[_Products[Tensors]]
) -> list[Tensor]: ...


@overload
def ag_gemm(
    x: Tensor, weight: Tensors, bias: Biases | None = None, **how: Unpack[_Gathered[Tensors]]
) -> tuple[list[Tensor], Tensor]: ...


@overload
def ag_gemm(
    x: Tensor, weight: Tensors, bias: Biases | None = None, **how: Unpack[_Scaled[Tensors]]
) -> tuple[list[Tensor], Tensor, Tensor]: ...


def ag_gemm(
    x: Tensor,
    weight: Tensor | Tensors,
    bias: Tensor | None | Biases = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    return_gathered: bool = False,
    out: Tensor | Tensors | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Tensors | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
) -> Any:
    """The rows of all p ranks, gathered, · weightᵀ plus bias: each rank its N/p columns. A collective.

    Accumulated in fp32 and rounded once; results are bitwise repeatable, and those of flux.gemm for the same
    tile shape.

    Args:
        x: [M/p, K], or with more leading dimensions, of which the first is gathered; the same shape on all
            ranks. bfloat16 or float16 for the kernel; float32 and float64 go through torch on GPUs. With
            scales float8_e4m3fn or float8_e5m2.
        weight: [N/p, K] as in nn.Linear, or [K, N/p] with `transpose_weight`; dtype and device of x, with
            scales float8_e4m3fn. Or a list of those, for which x is gathered once.
        bias: [N/p], dtype of the result and device of x. For a list of weights: a list with one entry, which
            may be None, for each.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K, N/p].
        return_gathered: also return the gathered x, without another communication.
        out: contiguous [M, ..., N/p] to write to; for a list of weights a list of those.
        scale_x: of this rank's x: one entry, one a row ([..., 1]), or one for 128 of K; alike on all ranks.
        scale_w: of the weight: one entry, one for each column ([N/p]), or one for each 128 by 128; for a list
            of weights a list.
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32; the same on all ranks.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast"), on all ranks.

    Returns:
        [M, ..., N/p] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`; for a list of
        weights a list of them. With `return_gathered` a tuple of that and the gathered x [M, ..., K], a fresh
        tensor; with scales also theirs, [M, ..., 1] or [M, ..., K / 128].

    Raises:
        TypeError, CommTimeoutError, RuntimeError: as flux.gemm_rs.
        ValueError: as flux.gemm_rs; or two of `out` share memory.

    Example::

        x, gate, up = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32, 64)
        hidden, gathered = flux.ag_gemm(x, [gate, up], return_gathered=True)
        assert [h.shape for h in hidden] == [(8 * p, 32)] * 2  # [M, N/p] for each weight
    """
    many = isinstance(weight, (list, tuple))
    count = len(weight) if many else None
    checks.list_like("ag_gemm", "bias", bias, count)
    checks.list_like("ag_gemm", "out", out, count)
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if scaling:
        checks.list_like("ag_gemm", "scale_w", scale_w, count)
        scaling = (scaling[0], scale_w if many or scale_w is None else [scale_w], *scaling[2:])
    weights: Any = weight if many else (weight,)
    biases: Any = () if bias is None else bias if many else (bias,)
    outs: Any = None if out is None else list(out) if many else [out]
    answer = functools.partial(_answer, count, return_gathered)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        flat = (scaling[0], *(scaling[1] or ()), *scaling[2:]) if scaling else ()
        options = (transpose_weight, return_gathered, *(outs or (None,)), *flat)
        done = calls.call(_OP, _invariance.active(), x, len(weights), *weights, *biases, *options)
        if done is not None:
            return answer(done)
    given = {"x": x, "weight": weights, "bias": biases, "transpose_weight": transpose_weight}
    given |= {"return_gathered": return_gathered, "out": outs}
    return front.enter(AG_GEMM, given, group, _complete, answer, scaling)


def _answer(count: int | None, return_gathered: bool, done: Any) -> Any:
    """What ag_gemm returns: one result, or a list for a list of `count` weights; then what was gathered."""
    if isinstance(done, Tensor):
        return done if count is None else [done]
    product = done[0] if count is None else list(done[:count])
    return (product, *done[count or 1 :]) if return_gathered else product


def _complete(given: dict[str, Any], group: GroupLike) -> None:
    """Adds to arguments of checked types what torch's operator needs."""
    x, weights, biases = given["x"], given["weight"], given["bias"]
    if front.needs_grad(*biases):  # torch gives no gradients to the tensors of a list that contains None
        axis = -1 if given["transpose_weight"] else 0
        given["bias"] = [
            x.new_zeros(weight.shape[axis]) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
    if given["out"] is not None and given["return_gathered"]:
        p, call = process_group(group_name(group, "ag_gemm")).size(), AG_GEMM.call_of(dict(given))
        AG_GEMM.sizes(call, p)
        given["out"] += ways.new_gathered(x, [x.shape[0] * p, *x.shape[1:]], call.scales)


front.register(AG_GEMM, "_out", casts=True)
