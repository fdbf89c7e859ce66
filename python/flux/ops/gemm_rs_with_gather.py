"""GEMM+ReduceScatter while copy engines gather rows of another tensor, as AllGather+GEMM's backward does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from flux._memory import readable
from flux.calls import checks, front
from flux.calls.checks import Product
from flux.comm import registry, repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, process_group
from flux.comm.workspace import NOTHING, Workspace
from flux.ops import gemm as plain
from flux.ops.ways import all_gather as gather
from flux.ops.ways import gemm_rs as scatter
from flux.plan.choose import Plan, Planned, workspace_plan

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def gemm_rs_with_gather(
    x: Tensor, weight: Tensor, rows: Tensor, *, group: GroupLike = None, transpose_weight: bool = False
) -> Pair:
    """flux.gemm_rs(x, weight) and flux.all_gather(rows), the second beside the first. A collective.

    Shards of 8 MiB and more go beside the GEMM, by copy engine. Smaller ones come after it, and in a CUDA
    graph all do. Returns [M/p, ..., N] and [p * rows, ...], fresh tensors.
    """
    given = {"x": x, "weight": weight, "transpose_weight": transpose_weight, "rows": rows}
    return cast(Pair, front.enter(BOTH, given, group))


class Call(NamedTuple):
    """The arguments of gemm_rs_with_gather. out: the sum and the gathered rows."""

    x: Tensor
    weight: Tensor
    transpose_weight: bool
    rows: Tensor
    out: Any = None


def _sizes(call: Call, p: int) -> front.Sizes:
    shape, *sizes = checks.gemm_args("gemm_rs", Product(*call[:2], None, call.transpose_weight), p)
    m, n, k = sizes
    return (shape, checks.rows_args("all_gather", call.rows, p, gathers=True)), m, n, k


def _planned(workspace: Workspace, m: int, n: int, k: int, transpose_weight: bool, rows: Tensor) -> Plan:
    """The plan of the GEMM; with those of both, if copy engines can gather while SMs send tiles."""
    key = ("beside", m, n, k, transpose_weight, rows.shape, rows.dtype)
    found: Planned | None = workspace.plans.get(key)
    if found is None:
        scattering = workspace_plan(workspace, "gemm_rs", m, n, k, rows.dtype, transpose_weight)
        parts: tuple[Plan, ...] = ()
        if scattering.way == "kernel" and isinstance(workspace, CudaWorkspace):
            gathering = gather.gather_plan(workspace, rows, beside=True)
            if gathering.by_flux and gathering.copied:
                # Otherwise copy engines might already send the tiles.
                parts = (replace(scattering, copied=False), gathering)
        found = workspace.plans[key] = Planned(replace(scattering, way="beside", parts=parts))
    return found.plan


def _both(workspace: Workspace, plan: Plan, call: Call, recipe: repeat.Recipe) -> Pair:
    """Both calls, without a call of another thread in between."""
    x, weight, transpose_weight, rows, (total, gathered) = call
    scattering = Product(x, weight, None, transpose_weight, total)
    if plan.parts and plan.parts[1].copied_now():
        assert isinstance(workspace, CudaWorkspace)
        x, total = x.reshape(plan.m, plan.k), total.view(-1, plan.n)
        with workspace.calling(plan.parts[0], NOTHING):
            _beside(workspace, plan, scattering._replace(x=x, out=total), rows, gathered)
    else:
        front.below(scatter.GEMM_RS, scattering, workspace.group)
        gather.call(rows, workspace.group, gathered)
    return cast(Pair, recipe.out)


def _alone(call: Call) -> None:
    x, weight, transpose_weight, rows, (total, gathered) = call
    plain.run(Product(x.flatten(0, -2), weight, None, transpose_weight, total.flatten(0, -2)))
    gathered.copy_(rows)


def _beside(workspace: CudaWorkspace, plan: Plan, call: Product, rows: Tensor, gathered: Tensor) -> None:
    scattering, gathering = plan.parts
    rows = readable(rows.reshape(-1, gathering.k))
    with workspace.enter(gathering) as (address, epoch):
        launch = (address, epoch, gathering.chunk_rows)
        _begin(rows, *launch)
        scatter.kernel(workspace, scattering, call)
        _finish(rows, gathered.view(-1, gathering.k), *launch, True)


def gathers_beside(rows: Tensor, weights: Sequence[Tensor], group_name: str) -> bool:
    """Whether the backward pass of flux.ag_gemm(rows, weights) gathers rows beside its GEMM, on all ranks."""
    group = process_group(group_name)
    if not rows.is_cuda or group.size() == 1 or torch.compiler.is_compiling():
        return False
    workspace = registry.in_turn(group, rows.device, registry.get, group, rows.device, "gemm_rs")
    return _backward_beside(workspace, rows, sum(weight.shape[0] for weight in weights))


def _backward_beside(workspace: Workspace, rows: Tensor, n: int) -> bool:
    # The gradient [m, n] times the weights [n, k], which are read transposed.
    k = rows.shape[-1]
    m = rows.numel() // max(k, 1) * workspace.world_size
    parts = _planned(workspace, m, k, n, True, rows).parts
    return len(parts) > 0 and parts[1].copied_now()


BOTH = front.Collective(
    name="gemm_rs_with_gather",
    call=Call,
    sizes=_sizes,
    results=lambda call, sizes, name: (call.x.new_empty(sizes[0][0]), call.rows.new_empty(sizes[0][1])),
    plan=lambda workspace, call, sizes: _planned(workspace, *sizes[1:], call.transpose_weight, call.rows),
    ways={"beside": _both},
    alone=_alone,
)
front.register(BOTH, casts=True, maps=False)
_begin: Any = torch.ops.flux._begin_all_gather.default
_finish: Any = torch.ops.flux._all_gather.default
