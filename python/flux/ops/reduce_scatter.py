"""ReduceScatter alone: each rank gets its rows of the sum of all ranks' tensors."""

from __future__ import annotations

from typing import Literal, cast

import torch

from flux import _invariance
from flux.calls import front
from flux.comm import repeat
from flux.comm.group import GroupLike, process_group
from flux.ops.ways.reduce_scatter import REDUCE_SCATTER, unfused

_OP = REDUCE_SCATTER.number


def reduce_scatter(
    x: torch.Tensor,
    *,
    group: GroupLike = None,
    out: torch.Tensor | None = None,
    wire: Literal["int8"] | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of x over all ranks. A collective.

    Summed in fp32, in rank order, and rounded once: repeatable, and what flux.all_reduce gives for these
    rows. What does not run fused (flux.explain says what, and why) is summed by torch on GPUs, in x's dtype.
    The gradient of x is that of the result, gathered.

    Args:
        x: [M, ...], the same shape on all ranks, M a multiple of their number p; bfloat16, float16, float32
            or float64. On GPUs bfloat16 and float16 of a multiple of 8 p elements and at most 64 MiB run
            fused.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        out: contiguous [M/p, ...] to write to; not in grad mode if x needs a gradient.
        wire: "int8": what ranks send each other is rounded to int8 with one scale for each 128 elements of a
            row, about half the bytes; the same on all ranks. A contribution errs by up to 1/254 of the
            largest of its 128 elements (docs/fp8.md). For bfloat16, float16 and float32; on GPUs in a kernel
            if the last dimension is a multiple of 8.

    Returns:
        [M/p, ...] in x's dtype: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit; `out` shares memory with x; or, where the ranks notice, they
            made different calls.
        CommTimeoutError, RuntimeError: as flux.gemm_rs.

    Example::

        rows = flux.reduce_scatter(torch.ones(2 * p, 64))
        assert rows.shape == (2, 64) and (rows == p).all()
    """
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, out, wire)
        if done is not None:
            return cast(torch.Tensor, done)
    given = {"x": x, "out": out} | ({} if wire is None else {"wire": wire})
    return cast(torch.Tensor, front.enter(REDUCE_SCATTER, given, group))


def by_torch(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    """out = this rank's rows of the sum of all ranks' x, with torch, whatever flux's plan would be."""
    unfused(x, process_group(group_name), out)


front.register(REDUCE_SCATTER, "_out")
