"""The ways of running flux.all_gather."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _native
from flux._memory import movable, readable, writable
from flux.calls import checks, front
from flux.comm import repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same, Workspace
from flux.ops.ways import two_level
from flux.plan.choose import PLANNERS, Plan, carried_by, planned, problem_of

# Copy engines hide nothing if the rows are awaited at once. For shards up to this size they take the host 20
# calls of CUDA and more instead of one launch, and SMs took 8 % less time to 25 % more
# (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines).
AWAITED_BY_SMS_BYTES = 16 << 20
# Torch's all-gather into one tensor, under the preferred name of this torch version.
torch_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
BLOCK_M: int = _native.core.tile_configs()[0].block_m


class Call(NamedTuple):
    """The arguments of flux.all_gather. at_once: its caller has nothing to do until the rows are there."""

    x: torch.Tensor
    out: Any = None  # of ways: a tensor
    at_once: bool = False


def call(
    x: torch.Tensor,
    group: ProcessGroup,
    out: torch.Tensor | None = None,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
) -> torch.Tensor:
    """all_gather as a part of another operator: see front.below."""
    return cast(torch.Tensor, front.below(ALL_GATHER, Call(x, out), group, also, within))


def _sizes(call: Call, p: int) -> front.Sizes:
    shape = checks.rows_args("all_gather", call.x, p, gathers=True)
    return shape, shape[0], 0, math.prod(shape[1:])


def _matrices(call: Call, sizes: front.Sizes) -> Call:
    (_, m, _, k), (x, out, _) = sizes, call
    return call if x.dim() == 2 else call._replace(x=x.reshape(x.shape[0], k), out=out.view(m, k))


def gather_plan(workspace: Workspace, x: torch.Tensor, beside: bool = False, at_once: bool = False) -> Plan:
    """The plan of all_gather of x [rows, ...]. beside: a GEMM hides it. at_once: nothing does (`awaited`)."""
    rows, p = x.shape[0], workspace.world_size
    problem = problem_of(workspace, rows * p, 0, x.numel() // rows if rows else 0, x.dtype)
    by_kernel = problem.topology is None and problem.tuning.forced in (None, "kernel")
    fits = at_once and by_kernel and x.numel() * x.dtype.itemsize <= AWAITED_BY_SMS_BYTES
    plan = PLANNERS["all_gather"](problem) if beside or fits else planned("all_gather", problem)
    if fits and plan.copied:
        transport = f"{problem.transport}, awaited at once"
        plan = replace(plan, copied=False, chunk_rows=0, transport=transport)
    elif fits and not beside:
        plan = planned("all_gather", problem)
    return carried_by(workspace, plan)


def unfused(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    """out = the rows of all ranks, with torch."""
    if out.numel() > 0:
        torch_all_gather(movable(out), movable(x.contiguous()), group=group)


def kernel(workspace: CudaWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    source, target = readable(call.x), writable(call.out)
    with workspace.enter(plan) as (address, epoch):
        options = (address, epoch, plan.chunk_rows if epoch else 0, False)
        enqueue = functools.partial(_kernel, source, target, *options)
        enqueue()
    front.remember("_all_gather", recipe, enqueue, workspace, by_copy_engine=epoch > 0)
    if target is not call.out:
        call.out.copy_(target)


def protocol(workspace: CpuWorkspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> None:
    arrivals = Arrivals(workspace, plan, call.x)
    for step in range(plan.world_size):
        source = (workspace.rank + step) % plan.world_size
        arrivals.copy_to(call.out, source)


def nodes(workspace: NodesWorkspace, plan: Plan, whole: Call, recipe: repeat.Recipe) -> None:

    def inside(rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        call(rows, workspace.node_group, outs[0])

    two_level.gather(workspace, plan, whole.x, inside, [whole.out])


class Arrivals:
    """One gather of the CPU path: sends this rank's rows block by block, and receives the peers' rows."""

    def __init__(self, workspace: CpuWorkspace, plan: Plan, x: torch.Tensor) -> None:
        self._workspace, self._x = workspace, x
        self._layout = _native.core.ag_gemm_layout(plan.m, x.shape[1], plan.world_size)
        rank = workspace.rank
        for block, rows in enumerate(self._blocks()):
            for step in range(1, plan.world_size):
                owner = (rank + step) % plan.world_size
                self._slot_rows(owner, rank, rows).copy_(x[rows])
                workspace.signal(owner, block)

    def block(self, source: int, block: int) -> torch.Tensor:
        """Waits for block number `block` of one rank's rows, and returns it."""
        rank, first = self._workspace.rank, block * BLOCK_M
        rows = slice(first, min(first + BLOCK_M, self._layout.rows))
        if source == rank:
            return self._x[rows]
        self._workspace.wait(source, block, block)
        return self._slot_rows(rank, source, rows)

    def copy_to(self, out: torch.Tensor, source: int) -> None:
        start = source * self._layout.rows
        for block, rows in enumerate(self._blocks()):
            out[start + rows.start : start + rows.stop] = self.block(source, block)

    def _blocks(self) -> Iterator[slice]:
        rows = self._layout.rows
        return (slice(first, min(first + BLOCK_M, rows)) for first in range(0, rows, BLOCK_M))

    def _slot_rows(self, owner: int, source: int, rows: slice) -> torch.Tensor:
        offset = self._layout.offset(self._layout.slot_index(source, owner), rows.start)
        return self._workspace.slot(owner, offset, (rows.stop - rows.start, self._x.shape[1]), self._x.dtype)


ALL_GATHER = front.Collective(
    name="all_gather",
    call=Call,
    sizes=_sizes,
    matrices=_matrices,
    plan=lambda workspace, call, sizes: gather_plan(workspace, call.x, at_once=call.at_once),
    ways={
        "torch": lambda workspace, plan, call, _: unfused(call.x, workspace.group, call.out),
        "kernel": kernel,
        "protocol": protocol,
        "nodes": nodes,
    },
)
_kernel: Any = torch.ops.flux._all_gather.default
