"""Sums of a matrix over ranks (csrc/runtime/symm_buffer.h): the CPU path, and the op without a GEMM."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flux import _native
from flux._memory import readable, readable_if_any, wide_type, writable
from flux.calls import front
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.repeat import Recipe
from flux.comm.workspace import round_up
from flux.ops.norm_and_quant import NONE, End, Made
from flux.plan.choose import Plan
from flux.plan.sums import VECTOR

Tensor = torch.Tensor
_Mode: Any = _native.core.ExchangeMode
# Signal words of a peer: its contribution has arrived; its result has arrived.
_CONTRIBUTION, _RESULT = 0, 1


def sum_over_ranks(
    workspace: CpuWorkspace, plan: Plan, matrix: Tensor, out: Tensor, addends: Sequence[Tensor]
) -> None:
    """Writes the sum of all ranks' matrices [m, n] to `out` (scatter: this rank's rows), plus addends."""
    rank, p, dtype, mode = workspace.rank, workspace.world_size, plan.result_dtype, _Mode(plan.mode)
    layout = _native.core.exchange(plan.m, round_up(plan.n, VECTOR), p, mode)

    def rows(owner: int) -> slice:
        """Rows that a rank sums: all, or its shard (scatter)."""
        first = layout.first_row(owner)
        return slice(first, first + layout.slot_rows)

    def columns(owner: int) -> slice:
        """Columns that a rank sums: all, or its shard, which may be empty (two-shot)."""
        first = layout.first_column(owner)
        # The padding of the last vector belongs to no rank.
        return slice(first, max(first, min(first + layout.columns_of(owner), plan.n)))

    def contribution(owner: int, source: int) -> Tensor:
        offset = layout.contribution(source, owner, layout.first_row(owner), layout.first_column(owner))
        slot = workspace.slot(owner, offset, (layout.slot_rows, layout.slot_columns), dtype)
        return slot[:, : columns(owner).stop - columns(owner).start]

    def results(of: int) -> Tensor:
        """The part of a rank's area to which owners write their sums (two-shot)."""
        return workspace.slot(of, layout.result(0, 0), (plan.m, layout.n), dtype)

    for step in range(1, p + 1):  # own matrix last
        owner = (rank + step) % p
        contribution(owner, rank).copy_(matrix[rows(owner), columns(owner)])
        workspace.signal(owner, _CONTRIBUTION)
    workspace.agree()
    mine = columns(rank)
    total = torch.zeros_like(matrix[rows(rank), mine], dtype=wide_type(matrix.dtype))
    if total.numel() > 0:
        for source in range(p):
            workspace.wait(source, _CONTRIBUTION, 0)
            total += contribution(rank, source)
        for addend in addends:
            total += addend[..., mine]
    if mode != _Mode.TWO_SHOT:
        out.copy_(total)
        return
    for peer in range(p):
        results(peer)[:, mine] = total
        workspace.signal(peer, _RESULT)
    for owner in range(p):
        workspace.wait(owner, _RESULT, 0)
        out[:, columns(owner)] = results(rank)[:, columns(owner)]


class Call(NamedTuple):
    """The arguments of flux.all_reduce, what follows the sum in one."""

    x: Tensor
    residual: Tensor | None = None
    end: End = NONE
    out: Any = None  # of ways: a tensor


def protocol(workspace: CpuWorkspace, plan: Plan, call: Call, recipe: Any = None) -> None:
    """out = the sum of all ranks' x [m, n], or this rank's rows of it; plus residual [m, n]."""
    addends = () if call.residual is None else (call.residual,)
    sum_over_ranks(workspace, plan, call.x, call.out, addends)


def kernel(workspace: CudaWorkspace, plan: Plan, call: Call, recipe: Recipe | None = None) -> Made | None:
    """The same in one launch. Returns what that makes of the sum besides."""
    x, residual, end, out = call
    source, target = readable(x), writable(out)  # before the call: copies may run out of memory
    made = end.in_kernel("all_reduce", target)
    first, second = (target, None) if made is None else (made.normalised, target)
    extras = (readable_if_any(residual), readable_if_any(end.norm_weight), end.eps, second)
    quantised = end.for_kernel(made)
    with workspace.enter(plan) as (symm_buffer, _):
        options = (symm_buffer, workspace.num_sms, plan.mode)
        enqueue = functools.partial(_kernel, source, first, *options, *extras, **quantised)
        enqueue()
    if recipe is not None and (end.quant is None or quantised):
        front.remember("_all_reduce", recipe, enqueue, workspace, end.by_kernel_name(recipe.out, made))
    if target is not out:
        out.copy_(target)
    return made


_kernel: Any = torch.ops.flux._all_reduce.default
