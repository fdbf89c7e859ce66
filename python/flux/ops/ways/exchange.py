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
# Signal words of a peer: its contribution has arrived; its result has arrived.
_CONTRIBUTION, _RESULT = 0, 1


def sum_over_ranks(
    workspace: CpuWorkspace, plan: Plan, matrix: Tensor, out: Tensor, addends: Sequence[Tensor]
) -> None:
    """Writes the sum of all ranks' matrices [m, n] to `out` (scatter: this rank's rows), plus addends."""
    exchange = _Exchange(workspace, plan)
    rank, p = workspace.rank, workspace.world_size
    for step in range(1, p + 1):  # own matrix last
        owner = (rank + step) % p
        share = matrix[exchange.rows(owner), exchange.columns(owner)]
        exchange.contribution(owner, rank).copy_(share)
        workspace.signal(owner, _CONTRIBUTION)
    workspace.agree()
    mine = exchange.columns(rank)
    total = torch.zeros_like(matrix[exchange.rows(rank), mine], dtype=wide_type(matrix.dtype))
    if total.numel() > 0:
        for source in range(p):
            workspace.wait(source, _CONTRIBUTION, 0)
            total += exchange.contribution(rank, source)
        for addend in addends:
            total += addend[..., mine]
    if not exchange.two_shot:
        out.copy_(total)
        return
    for peer in range(p):
        exchange.results(peer)[:, mine] = total
        workspace.signal(peer, _RESULT)
    for owner in range(p):
        columns = exchange.columns(owner)
        workspace.wait(owner, _RESULT, 0)
        out[:, columns] = exchange.results(rank)[:, columns]


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


class _Exchange:
    """The exchange areas of one call."""

    def __init__(self, workspace: CpuWorkspace, plan: Plan) -> None:
        self._workspace, self._plan = workspace, plan
        mode = _native.core.ExchangeMode(plan.mode)
        self.two_shot = mode == _native.core.ExchangeMode.TWO_SHOT
        self._layout = _native.core.exchange(plan.m, round_up(plan.n, VECTOR), plan.world_size, mode)

    def rows(self, owner: int) -> slice:
        """Rows that a rank sums: all, or its shard (scatter)."""
        first = self._layout.first_row(owner)
        return slice(first, first + self._layout.slot_rows)

    def columns(self, owner: int) -> slice:
        """Columns that a rank sums: all, or its shard, which may be empty (two-shot)."""
        first = self._layout.first_column(owner)
        # The padding of the last vector belongs to no rank.
        return slice(first, max(first, min(first + self._layout.columns_of(owner), self._plan.n)))

    def contribution(self, owner: int, source: int) -> Tensor:
        layout, columns = self._layout, self.columns(owner)
        offset = layout.contribution(source, owner, layout.first_row(owner), layout.first_column(owner))
        slot = self._area(owner, offset, layout.slot_rows, layout.slot_columns)
        return slot[:, : columns.stop - columns.start]

    def results(self, rank: int) -> Tensor:
        """The part of a rank's area to which owners write their sums (two-shot)."""
        return self._area(rank, self._layout.result(0, 0), self._plan.m, self._layout.n)

    def _area(self, rank: int, offset: int, rows: int, columns: int) -> Tensor:
        return self._workspace.slot(rank, offset, (rows, columns), self._plan.result_dtype)


_kernel: Any = torch.ops.flux._all_reduce.default
