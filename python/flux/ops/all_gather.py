"""AllGather alone: the rows of all ranks, as flux.ag_gemm gathers them (arXiv 2406.06858, section 4)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance, _native
from flux._memory import movable, readable, writable
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CopyLaunch, CudaWorkspace, Launch
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same, Workspace
from flux.ops.ways import two_level
from flux.plan.choose import PLANNERS, Plan, PlanInput, carried_by, planned, problem_of

_OP, _AWAITED = repeat.operator(), repeat.operator()
# Copy engines hide nothing if the rows are awaited at once. For shards up to this size they take the host 20
# calls of CUDA and more instead of one launch, and SMs took 8 % less time to 25 % more
# (docs/design/gemm-rs.md#gathered-rows-sms-or-copy-engines).
AWAITED_BY_SMS_BYTES = 16 << 20
BLOCK_M: int = _native.core.tile_configs()[0].block_m


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
        done = calls.call(_OP, _invariance.active(), x, out)
        if done is not None:
            return cast(torch.Tensor, done)
    direct = may_skip_dispatch(x)
    if not direct or out is not None:
        argument_types.check("all_gather", x=x, out=out)
    if out is not None:
        checks.no_backward_through_out("all_gather", x=x, out=out)
    if direct and not needs_grad(x):
        return call(x, resolve_group(group, "all_gather"), out)
    name = group_name(group, "all_gather")
    return cast(torch.Tensor, dispatch(name, x.device, _op, _op_out, (x, name), out))


def awaited(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """all_gather without gradients, for a caller that has nothing to do until the rows are there: SMs send
    larger shards than otherwise.
    """
    if torch.compiler.is_compiling() or not may_skip_dispatch(x):
        return all_gather(x, group=group)
    if (calls := repeat.of(group)) is not None:
        done = calls.call(_AWAITED, _invariance.active(), x, None)
        if done is not None:
            return cast(torch.Tensor, done)
    return call(x, resolve_group(group, "all_gather"), at_once=True)


def reference(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """all_gather with torch only."""
    pg = resolve_group(group, "all_gather")
    checks.all_gather_args("all_gather", x, pg.size())
    plain = movable(x.contiguous())
    gathered = [torch.empty_like(plain) for _ in range(pg.size())]
    dist.all_gather(gathered, plain, group=pg)
    return torch.cat(gathered).view(x.dtype)


def _fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return x.new_empty(checks.all_gather_args("all_gather", x, process_group(group_name).size()))


def _fake_out(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    shape = checks.all_gather_args("all_gather", x, process_group(group_name).size())
    checks.out_arg("all_gather", out, shape, x)


def _eager(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return call(x, process_group(group_name))


def _eager_out(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    call(x, process_group(group_name), out)


def call(
    x: torch.Tensor,
    group: ProcessGroup,
    out: torch.Tensor | None = None,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
    at_once: bool = False,
) -> torch.Tensor:
    """all_gather without gradients and without torch's dispatcher.

    Args:
        also: as in gemm_rs.call.
        within: of the call that this one is a part of, if that is to be known (flux.comm.repeat).
        at_once: the rows are awaited (`awaited`).
    """
    p, op = group.size(), _AWAITED if at_once else _OP
    if within is None and (calls := repeat.of_groups.get(group)) is not None:
        done = calls.call_below(op, _invariance.active(), x, out)
        if done is not None:
            return cast(torch.Tensor, done)
    shape = checks.all_gather_args("all_gather", x, p)
    recipe = repeat.Recipe(op, {"batch_invariant": _invariance.active(), "x": x, "out": out}, within)
    out = checks.output("all_gather", out, shape, x)
    if p == 1:
        return out.copy_(x)
    return registry.in_turn(group, x.device, _among_ranks, x, group, out, also, recipe, at_once)


def _among_ranks(
    x: torch.Tensor,
    group: ProcessGroup,
    out: torch.Tensor,
    also: Same,
    recipe: repeat.Recipe,
    at_once: bool,
) -> torch.Tensor:
    workspace = registry.get(group, x.device, "all_gather")
    plan = gather_plan(workspace, x, at_once=at_once)
    x2, out2 = x, out
    if x.dim() != 2:
        x2, out2 = x.reshape(x.shape[0], plan.k), out.view(plan.m, plan.k)
    with workspace.calling(plan, also) as epoch:
        if not plan.by_flux:
            unfused(x, group, out)
        elif isinstance(workspace, CudaWorkspace):
            recipe.returns(out, "out")
            _fused_cuda(workspace, plan, x2, out2, recipe)
        elif isinstance(workspace, CpuWorkspace):
            _fused_cpu(workspace, plan, epoch, x2, out2)
        else:
            nodes = cast(NodesWorkspace, workspace)

            def inside(rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
                call(rows, nodes.node_group, outs[0])

            two_level.gather(nodes, plan, x2, inside, [out2])
    return out


def gather_plan(workspace: Workspace, x: torch.Tensor, beside: bool = False, at_once: bool = False) -> Plan:
    """The plan of all_gather of x [rows, ...] on a workspace, cached by problem.

    Args:
        beside: a GEMM hides it, so it does not matter what is sooner alone.
        at_once: nothing does (`awaited`).
    """
    rows = x.shape[0]
    m, k = rows * workspace.world_size, x.numel() // rows if rows else 0
    key = ("all_gather", m, k, x.dtype, beside, at_once)
    plan: Plan | None = workspace.plans.get(key)
    if plan is None:
        problem = problem_of(workspace, m, 0, k, x.dtype)
        by_sms = _by_sms(problem) if at_once else None
        plan = PLANNERS["all_gather"](problem) if beside else by_sms or planned("all_gather", problem)
        plan = workspace.plans[key] = carried_by(workspace, plan)
    return plan


def _by_sms(problem: PlanInput) -> Plan | None:
    """The plan of a gather that copy engines would carry, and SMs are to; None for others."""
    shard = problem.m // problem.world_size * problem.k * problem.dtype.itemsize
    if problem.topology is not None or problem.tuning.forced is not None or shard > AWAITED_BY_SMS_BYTES:
        return None
    plan = PLANNERS["all_gather"](problem)
    if not plan.copied:
        return None
    return replace(plan, copied=False, chunk_rows=0, transport=f"{problem.transport}, awaited at once")


def unfused(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    """out = the rows of all ranks, with torch."""
    if out.numel() > 0:
        torch_all_gather()(movable(out), movable(x.contiguous()), group=group)


def torch_all_gather() -> Callable[..., object]:
    """torch's all-gather into one tensor, under the preferred name of this torch version."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def enter(workspace: CudaWorkspace, plan: Plan) -> Launch | CopyLaunch:
    """Context manager of a gather's launches on the current stream. Yields the address of its SymmBuffer and
    copy_epoch, which are arguments of the kernels, as is `chunk_rows`.
    """
    return workspace.enter_copy(plan) if plan.copied_now() else workspace.enter(plan)


def chunk_rows(plan: Plan, epoch: int) -> int:
    """Rows for each signal of the copy engines; 0 if SMs send."""
    return plan.chunk_rows if epoch else 0


def _fused_cuda(
    workspace: CudaWorkspace,
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor,
    recipe: repeat.Recipe,
) -> None:
    source, target = readable(x), writable(out)
    with enter(workspace, plan) as (address, epoch):
        options = (address, epoch, chunk_rows(plan, epoch), False)
        enqueue = functools.partial(_kernel, source, target, *options)
        enqueue()
    if target is out and recipe.in_place(x=source):
        used = [recipe.number("x"), *recipe.results]
        workspace.remember(recipe, enqueue, [used], by_copy_engine=epoch > 0)
    if target is not out:
        out.copy_(target)


def _fused_cpu(workspace: CpuWorkspace, plan: Plan, epoch: int, x: torch.Tensor, out: torch.Tensor) -> None:
    arrivals = Arrivals(workspace, plan, epoch, x)
    for step in range(plan.world_size):
        source = (workspace.rank + step) % plan.world_size
        arrivals.copy_to(out, source)


class Arrivals:
    """One gather of the CPU path: sends this rank's rows block by block, and receives the peers' rows."""

    def __init__(self, workspace: CpuWorkspace, plan: Plan, epoch: int, x: torch.Tensor) -> None:
        self._workspace = workspace
        self._plan = plan
        self._epoch = epoch
        self._x = x
        self._layout = _native.core.ag_gemm_layout(plan.m, x.shape[1], plan.world_size)
        rank = workspace.rank
        for block, rows in enumerate(self._blocks()):
            for step in range(1, plan.world_size):
                owner = (rank + step) % plan.world_size
                self._slot_rows(owner, rank, rows).copy_(x[rows])
                workspace.signal(owner, self._layout.slot_index(rank, owner), block, epoch)

    def block(self, source: int, block: int) -> torch.Tensor:
        """Waits for block number `block` of one rank's rows, and returns it."""
        rank, first = self._workspace.rank, block * BLOCK_M
        rows = slice(first, min(first + BLOCK_M, self._layout.rows))
        if source == rank:
            return self._x[rows]
        slot = self._layout.slot_index(source, rank)
        self._workspace.wait(self._plan.op, source, slot, block, block)
        return self._slot_rows(rank, source, rows)

    def copy_to(self, out: torch.Tensor, source: int) -> None:
        """Copies the rows of one rank to their position in `out`."""
        start = source * self._layout.rows
        for block, rows in enumerate(self._blocks()):
            out[start + rows.start : start + rows.stop] = self.block(source, block)

    def _blocks(self) -> Iterator[slice]:
        rows = self._layout.rows
        return (slice(first, min(first + BLOCK_M, rows)) for first in range(0, rows, BLOCK_M))

    def _slot_rows(self, owner: int, source: int, rows: slice) -> torch.Tensor:
        dtype, k = self._x.dtype, self._x.shape[1]
        # The layout counts in 2-byte elements.
        offset = self._layout.offset(self._layout.slot_index(source, owner), rows.start) * dtype.itemsize // 2
        count = rows.stop - rows.start
        return self._workspace.slot(owner, self._epoch, offset, count * k, dtype).view(count, k)


for _device in ("CPU", "CUDA"):
    library.impl("all_gather", _eager, _device)
    library.impl("all_gather_out", _eager_out, _device)
torch.library.register_fake("flux::all_gather", _fake, lib=library)
torch.library.register_fake("flux::all_gather_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.all_gather.default
_op_out: Any = torch.ops.flux.all_gather_out.default
_kernel: Any = torch.ops.flux._all_gather.default
