"""Schedules of calls on several nodes: fused inside each node, exchanged along rails between launches. On
GPUs a transfer runs beside the next launch, which leaves it SMs; no kernel waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flux._memory import wide_type
from flux.calls import front
from flux.comm.nodes.rail import Transfer, shifts
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.topology import Topology
from flux.ops import gemm as plain
from flux.plan.choose import Plan

Tensor = torch.Tensor
# Takes the rows of one launch from a tensor that has as many rows as what is scattered.
Select = Callable[[Tensor], Tensor]
# The most tensors that the kernel adds (csrc/moe/moe.h: kMaxTopK).
_MAX_ADDED = 16


def _leaving(workspace: NodesWorkspace, plan: Plan, flying: bool) -> AbstractContextManager[None]:
    """Launches inside leave SMs to the exchange, if one is on its way."""
    assert plan.levels is not None
    sms = plan.levels.sms if flying else 0
    return plain.leaving_free(sms) if workspace.inner is None else workspace.inner.leaving_free(sms)


def scatter(
    workspace: NodesWorkspace,
    plan: Plan,
    m: int,
    inside: Callable[[Select, Tensor], object],
    out: Tensor,
    addends: Sequence[Tensor] = (),
) -> None:
    """out [m / p, n] = the sum over nodes of what `inside`, a node's ReduceScatter of m rows, makes of this
    rank's rows, and addends. Own rows come last; sums of nodes travel rounded, are added in fp32 in order,
    and rounded once.
    """
    levels, topology = plan.levels, workspace.topology
    assert levels is not None
    nodes, node = topology.nodes, workspace.node
    sums = Sums(nodes, out, addends)
    if levels.schedule == "one launch":
        made = out.new_empty(nodes, *out.shape)
        workspace.inside("the launch for all rows")
        inside(functools.partial(_by_rank, topology), made.flatten(0, 1))
        workspace.wait(workspace.rail.alltoall(made, sums.parts), "exchange 1 of 1")
        sums.write()
        return
    piece = m // topology.world_size // levels.parts
    transfers: list[Transfer] = []
    for to, source in shifts(nodes, node):
        sent = out.new_empty(out.shape)
        for part in range(levels.parts):
            here = slice(part * piece, (part + 1) * piece)
            some = functools.partial(_of_node, topology, to, here if levels.parts > 1 else None)
            workspace.inside(f"the launch for the rows of node {to}")
            with _leaving(workspace, plan, bool(transfers)):
                inside(some, sent[here])
            transfers.append(workspace.rail.swap(sent[here], to, sums.parts[source, here], source))
    workspace.inside("the launch for own rows")
    with _leaving(workspace, plan, True):
        inside(functools.partial(_of_node, topology, node, None), sums.parts[node])
    for i, transfer in enumerate(transfers):
        workspace.wait(transfer, f"exchange {i + 1} of {len(transfers)}")
    sums.write()


def _by_rank(topology: Topology, x: Tensor) -> Tensor:
    """The rows of x [m, ...] in the order of ranks inside their nodes, and then of nodes."""
    shape = (topology.nodes, topology.ranks, x.shape[0] // topology.world_size, *x.shape[1:])
    return x.view(shape).transpose(0, 1).reshape(x.shape)


def _of_node(topology: Topology, node: int, part: slice | None, x: Tensor) -> Tensor:
    """The rows of x [m, ...] of a node; with `part` those rows of each of its ranks."""
    shard = x.shape[0] // topology.world_size
    rows = x.narrow(0, node * topology.ranks * shard, topology.ranks * shard)
    if part is None:
        return rows
    return rows.view(topology.ranks, shard, *x.shape[1:])[:, part].flatten(0, 1)


def gather(
    workspace: NodesWorkspace,
    plan: Plan,
    x: Tensor,
    inside: Callable[[Tensor, Sequence[Tensor]], object],
    outs: Sequence[Tensor],
) -> None:
    """Writes the AllGather of all nodes to outs [p * r, ...], by that of a node, `inside`; own rows first."""
    levels, topology = plan.levels, workspace.topology
    assert levels is not None
    nodes, ranks, node = topology.nodes, topology.ranks, workspace.node
    x = x.contiguous()
    if levels.schedule == "one launch":
        everybody = x.new_empty(nodes, *x.shape)
        workspace.wait(workspace.rail.gather(x, everybody), "exchange 1 of 1")
        made = [out.new_empty(out.shape) for out in outs]
        workspace.inside("the launch for all rows")
        inside(everybody.flatten(0, 1), made)
        for out, rows in zip(outs, made, strict=True):
            by_rank = rows.view(ranks, nodes, x.shape[0], -1).transpose(0, 1)
            out.view(nodes, ranks, x.shape[0], -1).copy_(by_rank)
        return
    steps = shifts(nodes, node)
    arrived = x.new_empty(len(steps), *x.shape)
    transfers = [workspace.rail.swap(x, to, arrived[i], source) for i, (to, source) in enumerate(steps)]

    def launch(rows: Tensor, source: int, flying: bool) -> None:
        workspace.inside(f"the launch for the rows of node {source}")
        count = ranks * x.shape[0]
        with _leaving(workspace, plan, flying):
            inside(rows, [out.narrow(0, source * count, count) for out in outs])

    launch(x, node, True)
    for i, (_, source) in enumerate(steps):
        workspace.wait(transfers[i], f"exchange {i + 1} of {len(steps)}")
        launch(arrived[i], source, i + 1 < len(steps))


def sum_whole(
    workspace: NodesWorkspace, op: front.Collective, call: Any, out: Tensor, addends: Sequence[Tensor]
) -> None:
    """out [m, n] = the sum over nodes of what a node's ranks make by `call`, plus addends."""
    sums = Sums(workspace.topology.nodes, out, addends)
    mine = sums.parts[workspace.node]
    workspace.inside("the sum of the node")
    front.below(op, call._replace(out=mine), workspace.node_group)
    workspace.wait(workspace.rail.gather(mine, sums.parts), "exchange 1 of 1")
    sums.write()


def add(total: Tensor, addends: Sequence[Tensor]) -> None:
    for addend in addends:
        total += addend


class Sums:
    """Sums of nodes, `parts` [nodes, m, n], to be filled, and what else is added to them."""

    def __init__(self, nodes: int, out: Tensor, addends: Sequence[Tensor]) -> None:
        self._out, self._addends = out, addends
        rows, columns = out.shape
        self._extra = sum(addend.numel() // columns for addend in addends) if columns else 0
        self._all = out.new_empty(nodes * rows + self._extra, columns)
        self.parts = self._all[: nodes * rows].view(nodes, rows, columns)

    def write(self) -> None:
        """out = the sum of the parts in order, then of addends, in fp32 (fp64 for fp64), rounded once."""
        out, count = self._out, self.parts.shape[0] + len(self._addends)
        fits = out.shape[1] % 8 == 0 and count <= _MAX_ADDED and out.data_ptr() % 16 == 0
        if out.is_cuda and fits and out.dtype in (torch.bfloat16, torch.float16):
            self._by_kernel()
            return
        total = torch.zeros(out.shape, dtype=wide_type(out.dtype), device=out.device)
        add(total, [*self.parts, *self._addends])
        out.copy_(total)

    def _by_kernel(self) -> None:
        """The sum over the choices of a token, of a mixture of experts, is such a sum with weights of 1."""
        nodes, rows, _ = self.parts.shape
        first, shapes = nodes * rows, []
        for addend in self._addends:
            count = 1 if addend.dim() == 1 else rows
            self._all[first : first + count] = addend
            first += count
            shapes.append(count)
        _combine(self._all, *_positions(nodes, rows, tuple(shapes), self._out.device), self._out)


@functools.lru_cache(maxsize=256)
def _positions(nodes: int, rows: int, extra: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which rows of Sums each row of the result adds, int32 [rows, nodes + extra], and their weights."""
    every = torch.arange(rows, dtype=torch.int32)
    columns, first = [node * rows + every for node in range(nodes)], nodes * rows
    for count in extra:
        columns.append(first + (every if count == rows and count > 1 else every * 0))
        first += count
    positions = torch.stack(columns, 1).to(device)
    return positions, torch.ones(positions.shape, dtype=torch.float32, device=device)


_combine: Any = torch.ops.flux._moe_combine.default
