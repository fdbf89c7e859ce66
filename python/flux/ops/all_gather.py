"""AllGather alone: the rows of all ranks, as flux.ag_gemm gathers them (arXiv 2406.06858, section 4)."""

from __future__ import annotations

from typing import cast

import torch

from flux import _invariance
from flux.calls import front
from flux.comm import repeat
from flux.comm.group import GroupLike, resolve_group
from flux.ops.ways.all_gather import ALL_GATHER, Call

_OP = ALL_GATHER.number


def all_gather(x: torch.Tensor, *, group: GroupLike = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of all ranks, in rank order. A collective.

    Args:
        x: [rows, ...], the same shape on all ranks; bfloat16, float16, float32 or float64. On GPUs a row of a
            multiple of 16 bytes travels by flux, others through torch.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        out: contiguous [p * rows, ...] to write to.

    Returns:
        [p * rows, ...] for p ranks: a fresh tensor, or `out`.

    Raises:
        TypeError, ValueError, CommTimeoutError, RuntimeError: as flux.ag_gemm.

    Example::

        rows = flux.all_gather(torch.full((2, 64), float(rank)))
        assert rows.shape == (2 * p, 64) and rows[2 * rank, 0] == rank
    """
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, out, False)
        if done is not None:
            return cast(torch.Tensor, done)
    return cast(torch.Tensor, front.enter(ALL_GATHER, {"x": x, "out": out}, group))


def awaited(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """all_gather without gradients, for a caller that waits: SMs send larger shards than otherwise."""
    if torch.compiler.is_compiling() or not front.may_skip_dispatch(x):
        return all_gather(x, group=group)
    if (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, None, True)
        if done is not None:
            return cast(torch.Tensor, done)
    call = Call(x, None, True)
    return cast(torch.Tensor, front.run(ALL_GATHER, call, resolve_group(group, "all_gather")))


front.register(ALL_GATHER, "_out")
