"""GEMM+ReduceScatter: x · weightᵀ summed over ranks, each keeping its rows (arXiv 2406.06858, section 4)."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch

from flux import _invariance
from flux.calls import argument_types, checks, front
from flux.comm import repeat
from flux.comm.group import GroupLike, resolve_group
from flux.fp8 import scales as fp8
from flux.ops import gemm as plain
from flux.ops.reduce_scatter import reduce_scatter
from flux.ops.ways import int8_sum
from flux.ops.ways.gemm_rs import GEMM_RS

_OP = GEMM_RS.number


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    out: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
    wire: Literal["int8"] | None = None,
) -> torch.Tensor:
    """Sum over ranks of x · weightᵀ, of which each of p ranks gets M/p rows, plus bias once. A collective.

    Accumulated in fp32. What ranks send each other is rounded to the result's dtype; the sum is taken in
    fp32, in rank order, and rounded once: results are bitwise repeatable.

    Args:
        x: [M, K/p], or with more leading dimensions, of which the first is scattered; bfloat16 or float16 for
            the kernel, float32 and float64 go through torch on GPUs. With scales
            float8_e4m3fn or float8_e5m2.
        weight: [N, K/p] as in nn.Linear, or [K/p, N] with `transpose_weight`; dtype and device of x. With
            scales float8_e4m3fn, K in one piece.
        bias: [N], dtype of the result and device of x; each rank adds it to its own rows.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K/p, N].
        out: contiguous [M/p, ..., N] to write to.
        scale_x: of this rank's x: one entry, one a row ([..., 1]), or one for 128 of K; alike on all ranks.
        scale_w: of its weight: one entry, one for each column ([N]), or one for each 128 by 128.
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32; the same on all ranks.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast"), on all ranks.
        wire: "int8": flux.gemm, then contributions travel as int8, half the bytes; each errs by up to 1/254
            of the largest of its 128 elements.

    Returns:
        [M/p, ..., N] in x's dtype, with scales in `out_dtype`: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or needs a gradient in a call with `out` or scales; `out` shares
            memory with an input; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, weight = torch.randn(8 * p, 64), torch.randn(32, 64)  # [M, K/p], [N, K/p]
        out = flux.gemm_rs(x, weight)
        assert out.shape == (8, 32)  # [M/p, N]
    """
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if wire is None and not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, weight, bias, transpose_weight, out, *scaling)
        if done is not None:
            return cast(torch.Tensor, done)
    given = {"x": x, "weight": weight, "bias": bias, "transpose_weight": transpose_weight, "out": out}
    if wire is not None:
        return _over_wire(given | dict(zip(fp8.NAMES, scaling, strict=False)), group, wire)
    return cast(torch.Tensor, front.enter(GEMM_RS, given, group, scaling=scaling))


def _over_wire(given: dict[str, Any], group: GroupLike, wire: Literal["int8"]) -> torch.Tensor:
    """flux.gemm, then flux.reduce_scatter. given: arguments of gemm_rs by name."""
    x, weight, bias, transpose_weight, out = (given[name] for name in checks.Product._fields[:5])
    if not torch.compiler.is_compiling():  # compiled, flux.gemm and flux.reduce_scatter check
        argument_types.check("gemm_rs", **given, wire=wire)
        call, read = GEMM_RS.call_of(dict(given)), {"x": x, "weight": weight, "bias": bias}
        shape, *_ = GEMM_RS.sizes(call, resolve_group(group, "gemm_rs").size())
        int8_sum.check("gemm_rs", wire, fp8.result_dtype(x, call.scales))
        if call.scales is not None:
            factors = {"scale_x": call.scales.x, "scale_w": call.scales.w}
            checks.no_backward("gemm_rs", checks.WITH_SCALES, **read, **factors)
        if out is not None:
            checks.out_arg("gemm_rs", out, shape, x, scales=call.scales)
            checks.separate("gemm_rs", "out", out, *read.values())
            checks.no_backward("gemm_rs", checks.THROUGH_OUT, **read, out=out)
    of_scales = {name: given[name] for name in fp8.NAMES if name in given}
    partial = plain.gemm(x, weight, transpose_weight=transpose_weight, **of_scales)
    result = reduce_scatter(partial, group=group, out=out, wire=wire)
    if bias is None:
        return result
    return result + bias.to(result.dtype) if out is None else result.add_(bias)


front.register(GEMM_RS, "_out", casts=True)
