"""ReduceScatter alone: each rank gets its rows of the sum of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance
from flux._memory import wide_type
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import group as groups
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same
from flux.ops.ways import int8_sum, two_level
from flux.ops.ways.exchange import run_fused
from flux.plan.choose import Plan, require, workspace_plan

_OP = repeat.operator()


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
    if wire is None and not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        done = calls.call(_OP, _invariance.active(), x, out)
        if done is not None:
            return cast(torch.Tensor, done)
    direct = may_skip_dispatch(x)
    if not direct or out is not None or wire is not None:
        argument_types.check("reduce_scatter", x=x, out=out, wire=wire)
        int8_sum.check("reduce_scatter", wire, x.dtype)
    if out is not None:
        checks.no_backward_through_out("reduce_scatter", x=x, out=out)
    direct = direct and not needs_grad(x)
    name = group_name(group, "reduce_scatter")
    fn, fn_out = (_eager, _eager_out) if direct else (_op, _op_out)
    last = () if wire is None else (wire,)
    return cast(torch.Tensor, dispatch(name, x.device, fn, fn_out, (x, name), out, last))


def reference(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """reduce_scatter with torch only: gathered, summed in fp32 (or float64) in rank order, rounded once."""
    pg = resolve_group(group, "reduce_scatter")
    rows, *_ = checks.reduce_scatter_args("reduce_scatter", x, pg.size())
    wide = wide_type(x.dtype)
    gathered = [torch.empty(x.shape, dtype=wide, device=x.device) for _ in range(pg.size())]
    dist.all_gather(gathered, x.to(wide).contiguous(), group=pg)
    total = torch.zeros_like(gathered[0])
    for other in gathered:
        total += other
    return total[pg.rank() * rows :][:rows].to(x.dtype)


def _fake(x: torch.Tensor, group_name: str, wire: str | None = None) -> torch.Tensor:
    int8_sum.check("reduce_scatter", wire, x.dtype)
    return x.new_empty(checks.reduce_scatter_args("reduce_scatter", x, process_group(group_name).size()))


def _fake_out(x: torch.Tensor, group_name: str, out: torch.Tensor, wire: str | None = None) -> None:
    int8_sum.check("reduce_scatter", wire, x.dtype)
    shape = checks.reduce_scatter_args("reduce_scatter", x, process_group(group_name).size())
    checks.out_arg("reduce_scatter", out, shape, x)


def _eager(x: torch.Tensor, group_name: str, wire: str | None = None) -> torch.Tensor:
    group = process_group(group_name)
    if wire is None and (calls := repeat.of_groups.get(group)) is not None:
        done = calls.call_below(_OP, _invariance.active(), x, None)
        if done is not None:
            return cast(torch.Tensor, done)
    out = _fake(x, group_name, wire)
    run(x, group, out, wire=wire)
    return out


def _eager_out(x: torch.Tensor, group_name: str, out: torch.Tensor, wire: str | None = None) -> None:
    _fake_out(x, group_name, out, wire)
    checks.separate("reduce_scatter", "out", out, x)
    run(x, process_group(group_name), out, out, wire)


def run(
    x: torch.Tensor,
    group: ProcessGroup,
    out: torch.Tensor,
    given_out: torch.Tensor | None = None,
    wire: str | None = None,
) -> None:
    """reduce_scatter of checked arguments, without gradients and without torch's dispatcher. given_out:
    `out`, if the caller gave it.
    """
    if group.size() == 1:
        out.copy_(x)
        return
    if wire is not None:
        registry.in_turn(group, x.device, _over_wire, x, group, out, wire)
        return
    registry.in_turn(group, x.device, sum_of, x, group, out, NOTHING, recipe_of(x, given_out))


def recipe_of(
    x: torch.Tensor, out: torch.Tensor | None, within: repeat.Recipe | None = None
) -> repeat.Recipe:
    """How a call is repeated. within: of the call that this one is a part of."""
    return repeat.Recipe(_OP, {"batch_invariant": _invariance.active(), "x": x, "out": out}, within)


def sum_of(
    x: torch.Tensor,
    group: ProcessGroup,
    out: torch.Tensor,
    also: Same,
    recipe: repeat.Recipe | None = None,
) -> None:
    """reduce_scatter among several ranks, in their turn. also: as in gemm_rs.call."""
    workspace = registry.get(group, x.device, "reduce_scatter")
    # Treated as one row for each rank, so that only its length must be a multiple of the vectors.
    plan = workspace_plan(workspace, "reduce_scatter", group.size(), out.numel(), 0, x.dtype, False)
    require(plan)
    with workspace.calling(plan, also) as epoch:
        if not plan.by_flux:
            unfused(x, group, out)
        elif isinstance(workspace, NodesWorkspace):
            two_level_sum(workspace, plan, x.reshape(group.size(), -1), out.view(1, -1))
        else:
            fused = cast(CpuWorkspace | CudaWorkspace, workspace)
            tensors = (x.reshape(plan.m, plan.n), out.view(1, plan.n))
            run_fused(fused, plan, epoch, *tensors, repeated=None if recipe is None else (recipe, out))


def _over_wire(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor, wire: str) -> None:
    workspace = registry.get(group, x.device, "reduce_scatter")
    p, n = group.size(), x.shape[-1] if x.dim() > 1 else out.numel()
    rows = out.numel() // n if n else 0
    plan = workspace_plan(workspace, "reduce_scatter", p, out.numel(), 0, x.dtype, False)
    plan = int8_sum.planned(plan, workspace, rows, n)
    with workspace.calling(plan, int8_sum.same(wire)):
        int8_sum.sum_into(out.view(rows, n), x.reshape(p, rows, n), workspace, plan)


def two_level_sum(
    workspace: NodesWorkspace,
    plan: Plan,
    x: torch.Tensor,
    out: torch.Tensor,
    addends: Sequence[torch.Tensor] = (),
) -> None:
    """reduce_scatter of x [p, n] on several nodes, out [1, n], plus addends [n]."""

    def inside(some: two_level.Select, node_sum: torch.Tensor) -> None:
        run(some(x), workspace.node_group, node_sum, node_sum)

    two_level.scatter(workspace, plan, x.shape[0], inside, out, addends)


def by_torch(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    """out = this rank's rows of the sum of all ranks' x, with torch, whatever flux's plan would be."""
    unfused(x, process_group(group_name), out)


def unfused(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    """out = this rank's rows of the sum of all ranks' x, with torch."""
    if out.numel() == 0:
        return
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    wide = out.dtype if out.is_cuda else wide_type(out.dtype)
    total = out if out.dtype == wide else torch.empty(out.shape, dtype=wide)
    groups.reduce_scatter()(total, x.to(wide).contiguous(), group=group)
    if total is not out:
        out.copy_(total)


for _device in ("CPU", "CUDA"):
    library.impl("reduce_scatter", _eager, _device)
    library.impl("reduce_scatter_out", _eager_out, _device)
torch.library.register_fake("flux::reduce_scatter", _fake, lib=library)
torch.library.register_fake("flux::reduce_scatter_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.reduce_scatter.default
_op_out: Any = torch.ops.flux.reduce_scatter_out.default
