"""The ways of running flux.all_reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance
from flux._memory import wide_type
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same, Workspace
from flux.ops.norm_and_quant import NONE, End, Made
from flux.ops.ways import all_gather as gather
from flux.ops.ways import exchange, reduce_scatter, two_level
from flux.ops.ways.exchange import Call
from flux.plan.choose import Plan, workspace_plan
from flux.plan.nodes import padded
from flux.plan.sums import VECTOR, split_rows

Tensor = torch.Tensor


def _sizes(call: Call, p: int) -> front.Sizes:
    """Without a norm as one row, so that the column shards of two-shot have equal sizes for any shape."""
    x, end = call.x, call.end
    checks.floating("all_reduce", x)
    if call.residual is not None:
        checks.like("all_reduce", "residual", call.residual, list(x.shape), x)
    n = x.shape[-1] if x.shape else 1
    if end.norm_weight is not None and not x.shape:
        checks.fail("all_reduce", "x", "at least 1 dimension with norm_weight", "0")
    end.check("all_reduce", n, x)
    m, n = (1, x.numel()) if end.norm_weight is None else (x.numel() // n if n else 0, n)
    return list(x.shape), m, n, 0


def _matrices(call: Call, sizes: front.Sizes) -> Call:
    (_, m, n, _), (x, residual, end, out) = sizes, call
    return Call(x.reshape(m, n), None if residual is None else residual.reshape(m, n), end, out.view(m, n))


def _plan(workspace: Workspace, call: Call, sizes: front.Sizes) -> Plan:
    (_, m, n, _), end = sizes, call.end
    op = "all_reduce" if end.norm_weight is None else "all_reduce_norm"
    if _invariance.active():
        matrix = _one_shape(call)
        rows, columns = matrix.x.shape
        parts = split_rows(rows, columns, call.x.dtype)
        if parts and (len(parts) > 1 or matrix.end.norm_weight is not end.norm_weight):
            rows = parts[0].stop
            op, m, n = ("all_reduce", 1, rows) if columns == 1 else (op, rows, columns)
            plan = workspace_plan(workspace, op, m, n, 0, call.x.dtype)
            return replace(plan, way="split") if plan.by_flux else plan
    return workspace_plan(workspace, op, m, n, 0, call.x.dtype)


def _same(call: Call) -> Same:
    _, residual, end, _ = call
    return NOTHING if residual is None and end.norm_weight is None else {"residual": residual, **end.same()}


def _one_shape(call: Call) -> Call:
    """A call that must be batch invariant, such that a part fits in an exchange: rows of whole vectors, of
    which the kernel adds squares in one order; any others as elements, which torch normalises.
    """
    x, residual, end, out = call
    if end.norm_weight is not None and x.shape[1] % VECTOR == 0:
        return call
    return Call(
        x.reshape(-1, 1), None if residual is None else residual.reshape(-1, 1), NONE, out.view(-1, 1)
    )


def split(workspace: Workspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> Any:
    x, residual, end, out = _one_shape(call)
    rows, columns = x.shape
    parts, norms = split_rows(rows, columns, x.dtype), []
    if len(parts) > 1:  # a scale of a whole tensor is of all parts
        end = End(end.norm_weight, end.eps)
    for part in parts:
        some = Call(x[part], None if residual is None else residual[part], end, out[part])
        made = front.run(ALL_REDUCE, some, workspace.group)
        norms += [] if end.norm_weight is None else [made[0]]
    return call.end.of(recipe.out, Made(torch.cat(norms)) if norms else None)


def alone(call: Call) -> None:
    call.out.copy_(call.x if call.residual is None else call.x + call.residual)


def by_torch(workspace: Workspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    x, residual, _, out = call
    if out.numel() == 0:
        return
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    wide = out.dtype if out.is_cuda else wide_type(out.dtype)
    in_place = out.is_cuda and (residual is None or residual.data_ptr() != out.data_ptr())
    total = out if in_place else torch.empty(out.shape, dtype=wide, device=out.device)
    if total.data_ptr() != x.data_ptr():
        total.copy_(x)
    sum_by_torch(total, workspace.group, out, () if residual is None else (residual,))


def sum_by_torch(total: Tensor, group: ProcessGroup, out: Tensor, addends: Sequence[Tensor]) -> None:
    """out = the sum over ranks of `total`, in which it is made, plus addends."""
    dist.all_reduce(total, group=group)
    two_level.add(total, addends)
    if total is not out:
        out.copy_(total)


def nodes(workspace: NodesWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    """By whole sums of nodes, by shares of them, or scattered and gathered; equal addends come last."""
    (x, residual, _, out), levels, topology = call, plan.levels, workspace.topology
    assert levels is not None
    if levels.schedule == "node sums":
        added = [] if residual is None else [residual.reshape(1, -1)]
        two_level.sum_whole(workspace, ALL_REDUCE, Call(x.reshape(1, -1)), out.view(1, -1), added)
        return
    # Shares have equal sizes and whole vectors.
    count, room = x.numel(), padded(x.numel(), topology)
    total = out.view(-1) if count == room else out.new_empty(room)
    composed = levels.schedule == "composed"
    p, rank = (topology.world_size, workspace.rank) if composed else (topology.ranks, workspace.local)
    dealt, share = _padded(x, room).view(p, -1), x.new_empty(1, room // p)
    added = [] if residual is None else [_padded(residual, room).view(p, 1, -1)[rank]]
    part, problem = reduce_scatter.Call(dealt, share), (p, room // p, 0, x.dtype)
    by_shares(workspace, composed, reduce_scatter.REDUCE_SCATTER, part, added, total.view(p, -1), problem)
    if count != room:
        out.view(-1).copy_(total[:count])


def by_shares(
    workspace: NodesWorkspace,
    composed: bool,
    op: front.Collective,
    part: Any,
    addends: Sequence[Tensor],
    whole: Tensor,
    problem: tuple[Any, ...],
) -> None:
    """whole = the sum that `part`, a call of a scattering operator, makes, with addends of this rank's share.
    composed: all ranks have shares, not those of each node. problem: of the scatter, as of workspace_plan.
    """
    group = workspace.group if composed else workspace.node_group
    if not composed:
        two_level.sum_whole(workspace, op, part, part.out, addends)
        workspace.inside("the gather of shares")
    elif (plan := workspace_plan(workspace, op.name, *problem)).by_flux:
        op.ways["nodes"](workspace, plan, part, None, addends)
    else:
        op.ways["torch"](workspace, plan, part, None)
        two_level.add(part.out, addends)
    gather.call(part.out, group, whole)


def _padded(x: Tensor, room: int) -> Tensor:
    """x as `room` elements, zeros behind its own."""
    flat = x.reshape(-1)
    return flat if len(flat) == room else torch.nn.functional.pad(flat, (0, room - len(flat)))


ALL_REDUCE = front.Collective(
    name="all_reduce",
    call=Call,
    end=End,
    sizes=_sizes,
    matrices=_matrices,
    plan=_plan,
    may_be=("x", "residual"),
    same=_same,
    alone=alone,
    ways={
        "torch": by_torch,
        "split": split,
        "kernel": exchange.kernel,
        "protocol": exchange.protocol,
        "nodes": nodes,
    },
    answer=lambda call, made: call.end.of(call.out, made),
    differentiable=False,
)
