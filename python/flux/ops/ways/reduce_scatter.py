"""The ways of running flux.reduce_scatter: torch, an exchange of contributions or of int8, and on nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux._memory import wide_type
from flux.calls import checks, front
from flux.comm import group as groups
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.ops.ways import exchange, int8_sum, two_level
from flux.plan.choose import Plan, workspace_plan

Tensor = torch.Tensor


class Call(NamedTuple):
    x: Tensor
    out: Any = None  # of ways: a tensor
    wire: str | None = None


def _sizes(call: Call, p: int) -> front.Sizes:
    int8_sum.check("reduce_scatter", call.wire, call.x.dtype)
    shape = checks.rows_args("reduce_scatter", call.x, p)
    # Treated as one row for each rank, so that only its length must be a multiple of the vectors.
    return shape, p, math.prod(shape), 0


def _matrices(call: Call, sizes: front.Sizes) -> Call:
    shape, p, n, _ = sizes
    if call.wire is not None:
        columns = shape[-1] if len(shape) > 1 and n else n
        rows = n // columns if n else 1
        return call._replace(x=call.x.reshape(p, rows, columns), out=call.out.view(rows, columns))
    return call._replace(x=call.x.reshape(p, n), out=call.out.view(1, n))


def _plan(workspace: Workspace, call: Call, sizes: front.Sizes) -> Plan:
    _, p, n, _ = sizes
    plan = workspace_plan(workspace, "reduce_scatter", p, n, 0, call.x.dtype, False)
    if call.wire is None:
        return plan
    # As int8, sums with torch are batch invariant too.
    return replace(int8_sum.planned(plan, workspace, *call.out.shape), batch_invariant=False)


def unfused(x: Tensor, group: ProcessGroup, out: Tensor, addends: Sequence[Tensor] = ()) -> None:
    """out = this rank's rows of the sum of all ranks' x, with torch, plus addends."""
    if out.numel() == 0:
        return
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    wide = out.dtype if out.is_cuda else wide_type(out.dtype)
    total = out if out.dtype == wide else torch.empty(out.shape, dtype=wide)
    groups.reduce_scatter(total, x.to(wide).contiguous(), group=group)
    two_level.add(total, addends)
    if total is not out:
        out.copy_(total)


def run(workspace: Any, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    if call.wire is not None:
        int8_sum.sum_into(call.out, call.x, workspace, plan)
    elif not plan.by_flux:
        unfused(call.x, workspace.group, call.out)
    else:
        way = exchange.kernel if isinstance(workspace, CudaWorkspace) else exchange.protocol
        way(workspace, plan, exchange.Call(call.x, out=call.out), recipe)


def nodes(
    workspace: NodesWorkspace, plan: Plan, call: Call, recipe: Any, addends: Sequence[Tensor] = ()
) -> None:
    """addends: [n], which are added, too."""

    def inside(some: two_level.Select, node_sum: Tensor) -> None:
        front.below(REDUCE_SCATTER, Call(some(call.x), node_sum), workspace.node_group)

    two_level.scatter(workspace, plan, call.x.shape[0], inside, call.out, addends)


REDUCE_SCATTER = front.Collective(
    name="reduce_scatter",
    call=Call,
    sizes=_sizes,
    matrices=_matrices,
    plan=_plan,
    same=lambda call: int8_sum.same(call.wire),
    ways={"torch": run, "kernel": run, "protocol": run, "nodes": nodes},
)
