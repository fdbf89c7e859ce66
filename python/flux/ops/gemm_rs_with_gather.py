"""GEMM+ReduceScatter while copy engines gather rows of another tensor: what the backward pass of an
AllGather+GEMM needs for the gradients of x and of the weight. The GEMM is not slowed down by SMs that send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from flux._memory import readable
from flux.calls import argument_types, checks, front
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import registry
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group
from flux.comm.workspace import NOTHING, Workspace
from flux.ops.ways import all_gather as gather
from flux.ops.ways import gemm_rs as scatter
from flux.plan.choose import Plan, workspace_plan

Pair = tuple[torch.Tensor, torch.Tensor]


def gemm_rs_with_gather(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
) -> Pair:
    """flux.gemm_rs(x, weight) and flux.all_gather(rows), the second beside the first. A collective.

    Args:
        x, weight, group, transpose_weight: as in flux.gemm_rs.
        rows: as x of flux.all_gather. Shards of 8 MiB and more go beside the GEMM, by copy engine. Smaller
            ones come after it, and in a CUDA graph all do.

    Returns:
        [M/p, ..., N] and [p * rows, ...]: fresh tensors.

    Raises:
        ValueError, CommTimeoutError, RuntimeError: as flux.gemm_rs.
    """
    direct = may_skip_dispatch(x, weight, rows)
    if not direct:
        argument_types.check(
            "gemm_rs_with_gather", x=x, weight=weight, rows=rows, transpose_weight=transpose_weight
        )
    direct = direct and not needs_grad(x, weight, rows)
    name = group_name(group, "gemm_rs")
    arguments = (x, weight, transpose_weight, rows, name)
    return cast(Pair, dispatch(name, x.device, _eager if direct else _op, None, arguments))


def _fake(
    x: torch.Tensor, weight: torch.Tensor, transpose_weight: bool, rows: torch.Tensor, group_name: str
) -> Pair:
    p = process_group(group_name).size()
    shape, _, _, _ = checks.gemm_args("gemm_rs", x, weight, None, transpose_weight, p)
    return x.new_empty(shape), rows.new_empty(checks.all_gather_args("all_gather", rows, p))


def _eager(
    x: torch.Tensor, weight: torch.Tensor, transpose_weight: bool, rows: torch.Tensor, group_name: str
) -> Pair:
    group = process_group(group_name)
    shape, m, n, k = checks.gemm_args("gemm_rs", x, weight, None, transpose_weight, group.size())
    checks.all_gather_args("all_gather", rows, group.size())
    arguments = (x, weight, transpose_weight, rows, group, shape, (m, n, k))
    return registry.in_turn(group, x.device, _both, *arguments)


def _both(
    x: torch.Tensor,
    weight: torch.Tensor,
    transpose_weight: bool,
    rows: torch.Tensor,
    group: ProcessGroup,
    shape: list[int],
    sizes: tuple[int, int, int],
) -> Pair:
    """Makes both calls, without a call of another thread in between."""
    m, n, k = sizes
    if x.is_cuda and group.size() > 1:
        workspace = cast(CudaWorkspace, registry.get(group, x.device, "gemm_rs"))
        plans = _plans_beside(workspace, m, n, k, x.dtype, transpose_weight, rows)
        if plans is not None:
            product = x.new_empty(*shape)
            out = product.view(-1, n)
            with workspace.calling(plans[0], NOTHING):
                gathered = _beside(workspace, *plans, x.reshape(m, k), weight, out, rows)
            return product, gathered
    product = front.below(scatter.GEMM_RS, scatter.Call(x, weight, None, transpose_weight), group)
    return product, gather.call(rows, group)


def gathers_beside(rows: torch.Tensor, weights: Sequence[torch.Tensor], group_name: str) -> bool:
    """Whether the backward pass of flux.ag_gemm(rows, weights) gathers the rows beside its GEMM: then keeping
    them gathered would save no time. Equal on all ranks.
    """
    group = process_group(group_name)
    if not rows.is_cuda or group.size() == 1 or torch.compiler.is_compiling():
        return False
    workspace = registry.in_turn(group, rows.device, registry.get, group, rows.device, "gemm_rs")
    return _backward_beside(workspace, rows, sum(weight.shape[0] for weight in weights))


def _backward_beside(workspace: Workspace, rows: torch.Tensor, n: int) -> bool:
    # The gradient [m, n] times the weights [n, k], which are read transposed.
    k = rows.shape[-1]
    m = rows.numel() // max(k, 1) * workspace.world_size
    return _plans_beside(workspace, m, k, n, rows.dtype, True, rows) is not None


def _plans_beside(
    workspace: Workspace,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    transpose_weight: bool,
    rows: torch.Tensor,
) -> tuple[Plan, Plan] | None:
    """Plans of both, if copy engines can gather while SMs send tiles; else None. Equal on all ranks."""
    scattering = workspace_plan(workspace, "gemm_rs", m, n, k, dtype, transpose_weight)
    if scattering.way != "kernel":
        return None
    gathering = gather.gather_plan(workspace, rows, beside=True)
    if not (gathering.by_flux and gathering.copied_now()):
        return None
    if scattering.copied:  # copy engines already send the tiles
        scattering = replace(scattering, copied=False)
    return scattering, gathering


def _beside(
    workspace: CudaWorkspace,
    scattering: Plan,
    gathering: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    gathered = rows.new_empty(checks.all_gather_args("all_gather", rows, workspace.world_size))
    rows = readable(rows.reshape(-1, gathering.k))
    with gather.enter(workspace, gathering) as (address, epoch):
        launch = (address, epoch, gathering.chunk_rows)
        _begin(rows, *launch)
        scatter.kernel(workspace, scattering, scatter.Call(x, weight, None, scattering.transpose_weight, out))
        _finish(rows, gathered.view(-1, gathering.k), *launch, True)
    return gathered


for _device in ("CPU", "CUDA"):
    library.impl("gemm_rs_with_gather", _eager, _device)
torch.library.register_fake("flux::gemm_rs_with_gather", _fake, lib=library)

_op: Any = torch.ops.flux.gemm_rs_with_gather.default
_begin: Any = torch.ops.flux._begin_all_gather.default
_finish: Any = torch.ops.flux._all_gather.default
