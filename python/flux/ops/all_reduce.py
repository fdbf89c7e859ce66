"""AllReduce alone: the sum of all ranks' tensors, as flux.gemm_ar sums them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux.comm import registry
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.workspace import NOTHING
from flux.ops import _check, _gate
from flux.ops._exchange import run_fused
from flux.ops._library import dispatch, library, may_skip_dispatch
from flux.ops._tensors import wide_type
from flux.ops.plan import workspace_plan


def all_reduce(x: torch.Tensor, *, group: GroupLike = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of x over all ranks, on every rank. A collective.

    Summed in fp32, in rank order, and rounded once: bitwise equal on all ranks, and repeatable. What does not
    run fused (flux.explain says what, and why) is summed by torch on GPUs, in x's dtype.

    Args:
        x: any shape, the same on all ranks; bfloat16, float16, float32 or float64. On GPUs bfloat16 and
            float16 of a multiple of 8 elements and at most 64 MiB run fused.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        out: contiguous tensor of x's shape to write to; may be x.

    Returns:
        The sum in x's shape and dtype: a fresh tensor, or `out`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; `out` shares memory with x
            without being it; or, where the ranks notice, they made different calls.
        CommTimeoutError, RuntimeError: as flux.gemm_ar.

    Example::

        x = torch.ones(4, 64)
        flux.all_reduce(x, out=x)
        assert (x == p).all()
    """
    direct = may_skip_dispatch(x)
    if not direct or out is not None:
        _gate.check("all_reduce", x=x, out=out)
    _check.no_backward("all_reduce", x=x, out=out)
    name = group_name(group, "all_reduce")
    fn, fn_out = (_eager, _eager_out) if direct else (_op, _op_out)
    return cast(torch.Tensor, dispatch(name, x.device, fn, fn_out, (x, name), out))


def reference(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """all_reduce with torch only: gathered, summed in fp32 (or float64) in rank order, rounded once."""
    pg = resolve_group(group, "all_reduce")
    _check.all_reduce_args("all_reduce", x)
    wide = wide_type(x.dtype)
    gathered = [torch.empty(x.shape, dtype=wide, device=x.device) for _ in range(pg.size())]
    dist.all_gather(gathered, x.to(wide).contiguous(), group=pg)
    total = torch.zeros_like(gathered[0])
    for other in gathered:
        total += other
    return total.to(x.dtype)


def _fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    _check.all_reduce_args("all_reduce", x)
    return x.new_empty(x.shape)


def _fake_out(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    _check.all_reduce_args("all_reduce", x)
    _check.out_arg("all_reduce", out, list(x.shape), x)


def _eager(x: torch.Tensor, group_name: str) -> torch.Tensor:
    out = _fake(x, group_name)
    _run(x, process_group(group_name), out)
    return out


def _eager_out(x: torch.Tensor, group_name: str, out: torch.Tensor) -> None:
    _fake_out(x, group_name, out)
    _check.separate("all_reduce", "out", out, x, may_be=x)
    _run(x, process_group(group_name), out)


def _run(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    if group.size() == 1:
        out.copy_(x)
        return
    registry.in_turn(group, x.device, _among_ranks, x, group, out)


def _among_ranks(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    workspace = registry.get(group, x.device, "all_reduce")
    # Treated as one row, so that the column shards of two-shot have equal sizes for any shape.
    plan = workspace_plan(workspace, "all_reduce", 1, x.numel(), 0, x.dtype, False)
    with workspace.calling(plan, NOTHING) as epoch:
        if plan.fused:
            fused = cast(CpuWorkspace | CudaWorkspace, workspace)
            run_fused(fused, plan, epoch, x.reshape(1, -1), out.view(1, -1))
        else:
            unfused(x, group, out)


def unfused(x: torch.Tensor, group: ProcessGroup, out: torch.Tensor) -> None:
    """out = the sum of all ranks' x, with torch."""
    if out.numel() == 0:
        return
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    total = out if out.is_cuda else torch.empty(out.shape, dtype=wide_type(out.dtype))
    if total is not x:
        total.copy_(x)
    dist.all_reduce(total, group=group)
    if total is not out:
        out.copy_(total)


for _device in ("CPU", "CUDA"):
    library.impl("all_reduce", _eager, _device)
    library.impl("all_reduce_out", _eager_out, _device)
torch.library.register_fake("flux::all_reduce", _fake, lib=library)
torch.library.register_fake("flux::all_reduce_out", _fake_out, lib=library)

_op: Any = torch.ops.flux.all_reduce.default
_op_out: Any = torch.ops.flux.all_reduce_out.default
