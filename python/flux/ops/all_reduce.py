"""AllReduce alone: the sum of all ranks' tensors, as flux.gemm_ar sums them; optionally with a residual and
RMSNorm.
"""

from __future__ import annotations

from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance
from flux.comm import known, registry
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same
from flux.ops import _check, _gate, _invariant
from flux.ops._exchange import run_fused
from flux.ops._library import dispatch, library, may_skip_dispatch
from flux.ops._norm import row_norm
from flux.ops._tensors import wide_type
from flux.ops.plan import workspace_plan
from flux.ops.plan_ar import split_rows
from flux.ops.two_level_sums import sum_elements

Tensor = torch.Tensor
_OP = known.operator()


@overload
def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: Tensor,
    eps: float | None = 1e-6,
    out: None = None,
) -> tuple[Tensor, Tensor]: ...


def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
) -> Any:
    """The sum of x over all ranks, plus residual once, on every rank. A collective.

    Summed in fp32, in rank order, and rounded once: bitwise equal on all ranks, and repeatable. What does not
    run fused (flux.explain says what, and why) is summed by torch on GPUs, in x's dtype, and rounded before
    the residual is added.

    Args:
        x: any shape, the same on all ranks; bfloat16, float16, float32 or float64. On GPUs bfloat16 and
            float16 of at most 64 MiB and a multiple of 8 elements (in each row, with `norm_weight`) run
            fused.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        residual: x's shape, dtype and device, the same on all ranks.
        norm_weight: [N], dtype and device of x [..., N]: also apply RMSNorm with this weight to the rows of
            the sum.
        eps: of RMSNorm; nothing without `norm_weight`. None: that of fp32 (fp64 for fp64), as in torch.
        out: contiguous tensor of x's shape to write to; not with `norm_weight`. May be x or `residual`.

    Returns:
        The sum in x's shape and dtype: a fresh tensor, or `out`. With `norm_weight` a pair of fresh tensors:
        the normalised sum, computed as by flux.gemm_ar, and the sum itself, which is the next residual.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; `out` shares memory with an
            input without being it; or, where the ranks notice, they made different calls.
        CommTimeoutError, RuntimeError: as flux.gemm_ar.

    Example::

        x, residual, norm_weight = torch.ones(4, 64), torch.zeros(4, 64), torch.ones(64)
        normalised, total = flux.all_reduce(x, residual=residual, norm_weight=norm_weight)
        assert (total == p).all() and normalised.shape == (4, 64)
    """
    if not torch.compiler.is_compiling() and (calls := known.of(group)) is not None:
        used_eps = 0.0 if norm_weight is None else _check.norm_eps(eps, x)
        done = calls.call(_OP, _invariance.active(), x, residual, norm_weight, out, used_eps)
        if done is not None:
            return done
    direct = may_skip_dispatch(x, residual, norm_weight)
    tensors = {"x": x, "residual": residual, "norm_weight": norm_weight}
    if not direct or out is not None:
        _gate.check("all_reduce", **tensors, eps=eps, out=out)
    _check.no_backward("all_reduce", **tensors, out=out)
    if norm_weight is not None and out is not None:
        _check.fail("all_reduce", "out", "None with norm_weight, which returns two tensors", "a tensor")
    name = group_name(group, "all_reduce")
    if norm_weight is not None:
        arguments = (x, residual, norm_weight, _check.norm_eps(eps, x), name)
        return dispatch(name, x.device, _eager_norm if direct else _op_norm, None, arguments)
    fn, fn_out = (_eager, _eager_out) if direct else (_op, _op_out)
    return dispatch(name, x.device, fn, fn_out, (x, residual, name), out)


def reference(x: Tensor, group: GroupLike = None, residual: Tensor | None = None) -> Tensor:
    """all_reduce with torch only: gathered, summed in fp32 (or float64) in rank order, plus residual, rounded
    once.
    """
    pg = resolve_group(group, "all_reduce")
    _check.all_reduce_args("all_reduce", x, residual)
    wide = wide_type(x.dtype)
    gathered = [torch.empty(x.shape, dtype=wide, device=x.device) for _ in range(pg.size())]
    dist.all_gather(gathered, x.to(wide).contiguous(), group=pg)
    total = torch.zeros_like(gathered[0])
    for other in gathered:
        total += other
    return (total if residual is None else total + residual).to(x.dtype)


def _fake(x: Tensor, residual: Tensor | None, group_name: str) -> Tensor:
    _check.all_reduce_args("all_reduce", x, residual)
    return x.new_empty(x.shape)


def _fake_out(x: Tensor, residual: Tensor | None, group_name: str, out: Tensor) -> None:
    _check.all_reduce_args("all_reduce", x, residual)
    _check.out_arg("all_reduce", out, list(x.shape), x)


def _fake_norm(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    _check.all_reduce_args("all_reduce", x, residual)
    _check.norm_args("all_reduce", norm_weight, eps, _check.rows_to_norm("all_reduce", x)[1], x)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _eager(x: Tensor, residual: Tensor | None, group_name: str) -> Tensor:
    group = process_group(group_name)
    done = _known(x, residual, None, 0.0, group)
    if done is not None:
        return cast(Tensor, done)
    out = _fake(x, residual, group_name)
    _run(x, residual, None, 0.0, group, out, None)
    return out


def _eager_out(x: Tensor, residual: Tensor | None, group_name: str, out: Tensor) -> None:
    _fake_out(x, residual, group_name, out)
    for given in (x, residual):
        _check.separate("all_reduce", "out", out, given, may_be=given)
    _run(x, residual, None, 0.0, process_group(group_name), out, out)


def _eager_norm(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    group = process_group(group_name)
    done = _known(x, residual, norm_weight, eps, group)
    if done is not None:
        return cast("tuple[Tensor, Tensor]", done)
    _, out = _fake_norm(x, residual, norm_weight, eps, group_name)
    norm = _run(x, residual, norm_weight, eps, group, out, None)
    return (row_norm(out, norm_weight, eps) if norm is None else norm.view(x.shape)), out


def _known(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float, group: ProcessGroup
) -> Any:
    """The results of a known call without `out`, or None."""
    calls = known.of_groups.get(group)
    if calls is None:
        return None
    return calls.call_below(_OP, _invariance.active(), x, residual, norm_weight, None, eps)


def _run(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    group: ProcessGroup,
    out: Tensor,
    given_out: Tensor | None,
) -> Tensor | None:
    """Writes the sum to `out`. Returns its norm, if that was a part of the same launch. given_out: `out`, if
    the caller gave it.
    """
    if group.size() == 1:
        out.copy_(x if residual is None else x + residual)
        return None
    if not _invariance.active():
        recipe = known.Recipe(_OP, False, x, residual, norm_weight, given_out, eps)
        arguments = (x, residual, norm_weight, eps, group, out, recipe)
        return registry.in_turn(group, x.device, sum_of, *arguments)
    # How many CTAs share a row of the kernel's norm depends on the number of rows.
    flat, total = x.reshape(-1), out.view(-1)
    added = None if residual is None else residual.reshape(-1)
    for part in split_rows(flat.shape[0], 1, x.dtype):
        some = None if added is None else added[part]
        registry.in_turn(group, x.device, sum_of, flat[part], some, None, 0.0, group, total[part])
    return None


def sum_of(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    group: ProcessGroup,
    out: Tensor,
    recipe: known.Recipe | None = None,
) -> Tensor | None:
    workspace = registry.get(group, x.device, "all_reduce")
    if norm_weight is None:
        # Treated as one row, so that the column shards of two-shot have equal sizes for any shape.
        plan = workspace_plan(workspace, "all_reduce", 1, x.numel(), 0, x.dtype, False)
    else:
        rows, columns = _check.rows_to_norm("all_reduce", x)
        plan = workspace_plan(workspace, "all_reduce_norm", rows, columns, 0, x.dtype, False)
    _invariant.require(plan)
    same: Same = NOTHING
    if residual is not None or norm_weight is not None:
        same = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
    with workspace.calling(plan, same) as epoch:
        if not plan.fused:
            unfused(x, residual, group, out)
            return None
        if isinstance(workspace, NodesWorkspace):
            sum_elements(workspace, plan, x, residual, out, _node_sum)
            return None
        fused, shape = cast(CpuWorkspace | CudaWorkspace, workspace), (plan.m, plan.n)
        added = None if residual is None else residual.reshape(shape)
        tensors = (x.reshape(shape), out.view(shape), added, norm_weight)
        return run_fused(fused, plan, epoch, *tensors, eps, None if recipe is None else (recipe, out))


def _node_sum(x: Tensor, group: ProcessGroup, out: Tensor) -> None:
    _run(x, None, None, 0.0, group, out, None)


def unfused(x: Tensor, residual: Tensor | None, group: ProcessGroup, out: Tensor) -> None:
    """out = the sum of all ranks' x, plus residual, with torch."""
    if out.numel() == 0:
        return
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    wide = out.dtype if out.is_cuda else wide_type(out.dtype)
    in_place = out.is_cuda and (residual is None or residual.data_ptr() != out.data_ptr())
    total = out if in_place else torch.empty(out.shape, dtype=wide, device=out.device)
    if total is not x:
        total.copy_(x)
    dist.all_reduce(total, group=group)
    if residual is not None:
        total += residual
    if total is not out:
        out.copy_(total)


for _device in ("CPU", "CUDA"):
    library.impl("all_reduce", _eager, _device)
    library.impl("all_reduce_out", _eager_out, _device)
    library.impl("all_reduce_norm", _eager_norm, _device)
torch.library.register_fake("flux::all_reduce", _fake, lib=library)
torch.library.register_fake("flux::all_reduce_out", _fake_out, lib=library)
torch.library.register_fake("flux::all_reduce_norm", _fake_norm, lib=library)

_op: Any = torch.ops.flux.all_reduce.default
_op_out: Any = torch.ops.flux.all_reduce_out.default
_op_norm: Any = torch.ops.flux.all_reduce_norm.default
