"""Sums on every rank of several nodes: all_reduce and gemm_ar. By whole sums of nodes, by shares of them, or
scattered and gathered. All schedules add what is equal on all ranks before the only rounding behind the sums
of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from flux.calls import front
from flux.comm.nodes.workspace import NodesWorkspace
from flux.fp8.scales import Scales, of_slice
from flux.ops.ways import all_gather as gather
from flux.ops.ways import gemm_rs, reduce_scatter, two_level
from flux.plan.choose import Plan, workspace_plan
from flux.plan.nodes import padded

Tensor = torch.Tensor


def sum_elements(
    workspace: NodesWorkspace,
    plan: Plan,
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    all_reduce: Callable[[Tensor, ProcessGroup, Tensor], None],
) -> None:
    """out = the sum of all ranks' x, plus residual.

    Args:
        all_reduce: (x, group, out) inside a node.
    """
    levels, topology, group = plan.levels, workspace.topology, workspace.group
    assert levels is not None
    if levels.schedule == "node sums":
        added = [] if residual is None else [residual.reshape(1, -1)]

        def whole(node_sum: Tensor) -> None:
            all_reduce(x.reshape(1, -1), workspace.node_group, node_sum)

        two_level.sum_whole(workspace, whole, out.view(1, -1), added)
        return
    # Shares have equal sizes and whole vectors.
    count, room = x.numel(), padded(x.numel(), topology)
    total = out.view(-1) if count == room else out.new_empty(room)
    composed = levels.schedule == "composed"
    p, rank = (topology.world_size, workspace.rank) if composed else (topology.ranks, workspace.local)
    dealt, share = _padded(x, room).view(p, -1), x.new_empty(1, room // p)
    added = [] if residual is None else [_padded(residual, room).view(p, 1, -1)[rank]]
    if composed:
        scattered = workspace_plan(workspace, "reduce_scatter", p, room // p, 0, x.dtype, False)
        if scattered.by_flux:
            reduce_scatter.on_nodes(workspace, scattered, reduce_scatter.Call(dealt, share), added)
        else:
            reduce_scatter.unfused(dealt, group, share)
            add(share, added)
        gather.call(share, group, total.view(p, -1))
    else:

        def node_share(node_sum: Tensor) -> None:
            call = reduce_scatter.Call(dealt, node_sum)
            front.below(reduce_scatter.REDUCE_SCATTER, call, workspace.node_group)

        two_level.sum_whole(workspace, node_share, share, added)
        workspace.inside("the gather of shares")
        gather.call(share, workspace.node_group, total.view(p, -1))
    if count != room:
        out.view(-1).copy_(total[:count])


def _padded(x: Tensor, room: int) -> Tensor:
    """x as `room` elements, zeros behind its own."""
    flat = x.reshape(-1)
    return flat if len(flat) == room else torch.nn.functional.pad(flat, (0, room - len(flat)))


def gemm_and_sum(
    workspace: NodesWorkspace,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    total: Tensor,
    addends: Sequence[Tensor],
    scales: Scales | None,
    gemm_ar: Callable[[Tensor, Tensor, bool, ProcessGroup, Tensor, Scales | None], None],
) -> None:
    """total [m, n] = the sum over ranks of x [m, k] · weightᵀ, plus addends [n] or [m, n].

    Ranks share as many whole rows as they can; sums of nodes are exchanged of the others.

    Args:
        scales: of fp8 operands, canonical.
        gemm_ar: (x, weight, transpose_weight, group, out, scales) inside a node.
    """
    levels, topology = plan.levels, workspace.topology
    assert levels is not None
    transposed, node_group = plan.transpose_weight, workspace.node_group
    composed = levels.schedule == "composed"
    p, rank = (topology.world_size, workspace.rank) if composed else (topology.ranks, workspace.local)
    dealt = 0 if levels.schedule == "node sums" else plan.m - plan.m % p
    if dealt:
        head, share = x[:dealt], total.new_empty(dealt // p, plan.n)
        own = _rows(addends, slice(rank * len(share), (rank + 1) * len(share)))
        theirs = of_slice(scales, plan.m, slice(dealt))
        part = gemm_rs.Call(head, weight, None, transposed, share, theirs)
        if composed:
            facts = (plan.n, plan.k, x.dtype, transposed, plan.scaling)
            scattered = workspace_plan(workspace, "gemm_rs", dealt, *facts)
            if scattered.by_flux:
                gemm_rs.on_nodes(workspace, scattered, part, own)
            else:
                gemm_rs.by_torch(workspace, scattered, part)
                add(share, own)
            gather.call(share, workspace.group, total[:dealt])
        else:

            def node_share(node_sum: Tensor) -> None:
                front.below(gemm_rs.GEMM_RS, part._replace(out=node_sum), node_group)

            two_level.sum_whole(workspace, node_share, share, own)
            workspace.inside("the gather of shares")
            gather.call(share, node_group, total[:dealt])
    if dealt < plan.m:

        def whole(node_sum: Tensor) -> None:
            gemm_ar(x[rest], weight, transposed, node_group, node_sum, of_rest)

        rest = slice(dealt, plan.m)
        of_rest = of_slice(scales, plan.m, rest)
        two_level.sum_whole(workspace, whole, total[rest], _rows(addends, rest))


def _rows(addends: Sequence[Tensor], rows: slice) -> list[Tensor]:
    """The part of addends [n] and [m, n] for some rows."""
    return [addend if addend.dim() == 1 else addend[rows] for addend in addends]


def add(total: Tensor, addends: Sequence[Tensor]) -> None:
    """total += each of the addends."""
    for addend in addends:
        total += addend
