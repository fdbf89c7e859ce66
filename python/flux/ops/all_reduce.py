"""AllReduce alone: the sum of all ranks' tensors, as flux.gemm_ar sums them; optionally with a residual and
RMSNorm.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux import _invariance
from flux._memory import wide_type
from flux.calls import argument_types, checks, front
from flux.calls.dispatch import dispatch, may_skip_dispatch
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import NOTHING, Same
from flux.ops import norm_and_quant
from flux.ops.norm_and_quant import End, Made, Quant
from flux.ops.ways.exchange import run_fused
from flux.ops.ways.two_level_sums import sum_elements
from flux.plan.choose import require, workspace_plan
from flux.plan.sums import VECTOR, split_rows

Tensor = torch.Tensor
_OP = repeat.operator()


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
    quant: None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: Tensor,
    eps: float | None = 1e-6,
    out: None = None,
    quant: Quant,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
) -> tuple[Tensor, ...]: ...


def all_reduce(
    x: Tensor,
    *,
    group: GroupLike = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
    quant: Quant | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
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
        quant, ue8m0, return_norm: as in flux.gemm_ar: quantise the normalised sum.
        quant_scale: float32 [1], as in flux.gemm_ar.

    Returns:
        The sum in x's shape and dtype: a fresh tensor, or `out`. With `norm_weight` a pair of fresh tensors:
        the normalised sum, computed as by flux.gemm_ar, and the sum itself, which is the next residual. With
        `quant` the tuple that flux.gemm_ar returns.

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
    quantised = norm_and_quant.arguments("all_reduce", quant, quant_scale, ue8m0, return_norm)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        used_eps = 0.0 if norm_weight is None else checks.norm_eps(eps, x)
        done = calls.call(_OP, _invariance.active(), x, residual, norm_weight, out, used_eps, *quantised)
        if done is not None:
            return done
    direct = may_skip_dispatch(x, residual, norm_weight, quant_scale)
    tensors = {"x": x, "residual": residual, "norm_weight": norm_weight}
    if not direct or out is not None or quantised:
        of_quant = norm_and_quant.named(quant, quant_scale, ue8m0, return_norm)
        argument_types.check("all_reduce", **tensors, eps=eps, out=out, **of_quant)
    checks.no_backward("all_reduce", **tensors, out=out)
    norm_and_quant.check("all_reduce", norm_weight, out, quantised)
    if direct:
        end = norm_and_quant.NONE
        if norm_weight is not None:
            end = End(norm_weight, checks.norm_eps(eps, x), *quantised)
        return front.run(ALL_REDUCE, Call(x, residual, end, out), resolve_group(group, "all_reduce"))
    name = group_name(group, "all_reduce")
    if norm_weight is None:
        if out is None:
            return dispatch(name, x.device, _op, x, residual, name)
        dispatch(name, x.device, _op_out, x, residual, name, out)
        return out
    arguments = (x, residual, norm_weight, checks.norm_eps(eps, x), name)
    if not quantised:
        return dispatch(name, x.device, _op_norm, *arguments)
    return tuple(dispatch(name, x.device, _op_quant, *arguments, *quantised))


class Call(NamedTuple):
    """The arguments of flux.all_reduce, what follows the sum in one."""

    x: Tensor
    residual: Tensor | None
    end: End = norm_and_quant.NONE
    out: Tensor | None = None


def _call_of(x: Tensor, residual: Tensor | None, out: Tensor | None = None, **rest: Any) -> Call:
    return Call(x, residual, End(**rest), out)


def _known(call: Call) -> dict[str, Any]:
    x, residual, end, out = call
    given = {"batch_invariant": _invariance.active(), "x": x, "residual": residual}
    return given | {"norm_weight": end.norm_weight, "out": out, "eps": end.eps, **end.by_name()}


def _sizes(call: Call, p: int) -> front.Sizes:
    checks.all_reduce_args("all_reduce", call.x, call.residual)
    if call.end.norm_weight is not None:
        checks.rows_to_norm("all_reduce", call.x)
    return list(call.x.shape), 1, call.x.numel(), 0


def _run(call: Call, group: ProcessGroup) -> Any:
    """The sum, or with a norm what `end` makes of it."""
    (x, residual, end, out), (shape, *_) = call, _sizes(call, group.size())
    if end.norm_weight is not None:
        end = end.checked("all_reduce", shape[-1], x)
    if out is not None:
        checks.out_arg("all_reduce", out, shape, x)
        for given in (x, residual):
            checks.separate("all_reduce", "out", out, given, may_be=(given,))
    total = x.new_empty(shape) if out is None else out
    return registry.in_turn(group, x.device, _whole, x, residual, end, group, total, out)


def _whole(
    x: Tensor, residual: Tensor | None, end: End, group: ProcessGroup, out: Tensor, given_out: Tensor | None
) -> Any:
    if group.size() == 1:
        return end.of(out.copy_(x if residual is None else x + residual))
    return end.of(out, made_of(x, residual, end, group, out, recipe_of(x, residual, end, given_out)))


def made_of(
    x: Tensor,
    residual: Tensor | None,
    end: End,
    group: ProcessGroup,
    out: Tensor,
    recipe: repeat.Recipe,
    also: Same = NOTHING,
) -> Made | None:
    """As sum_of, batch invariant if it must be: by several sums if one exchange cannot hold all rows."""
    if not _invariance.active():
        return sum_of(x, residual, end, group, out, recipe, also)
    # The kernel that normalises adds the squares of a row in one order, whatever the number of rows. It takes
    # rows of whole vectors; any others are summed as elements, and torch normalises them.
    rows, columns = (0, 0) if end.norm_weight is None else checks.rows_to_norm("all_reduce", x)
    by_kernel = end
    if columns == 0 or columns % VECTOR:
        rows, columns, by_kernel = x.numel(), 1, norm_and_quant.NONE
    given, total = x.reshape(rows, columns), out.view(rows, columns)
    added = None if residual is None else residual.reshape(rows, columns)
    parts = split_rows(rows, columns, x.dtype)
    # A scale of a whole tensor is of all parts.
    of_part = by_kernel if len(parts) == 1 else End(by_kernel.norm_weight, by_kernel.eps)
    made: list[Made | None] = []
    for part in parts:
        some = None if added is None else added[part]
        made.append(sum_of(given[part], some, of_part, group, total[part], also=also))
    if len(made) == 1:
        return made[0]
    norms = [each.normalised for each in made if each is not None]
    return Made(torch.cat(norms)) if norms else None


def recipe_of(
    x: Tensor, residual: Tensor | None, end: End, out: Tensor | None, within: repeat.Recipe | None = None
) -> repeat.Recipe:
    """How a call is repeated. within: of the call that this one is a part of."""
    return repeat.Recipe(_OP, _known(Call(x, residual, end, out)), within)


def sum_of(
    x: Tensor,
    residual: Tensor | None,
    end: End,
    group: ProcessGroup,
    out: Tensor,
    recipe: repeat.Recipe | None = None,
    also: Same = NOTHING,
) -> Made | None:
    """Writes the sum of all ranks' x, plus residual, to `out`. Returns what the same launch has made
    of it. recipe: of the call, if it is to be known (flux.comm.repeat). also: as in gemm_rs.call.
    """
    workspace = registry.get(group, x.device, "all_reduce")
    if end.norm_weight is None:
        # Treated as one row, so that the column shards of two-shot have equal sizes for any shape.
        plan = workspace_plan(workspace, "all_reduce", 1, x.numel(), 0, x.dtype, False)
    else:
        rows, columns = checks.rows_to_norm("all_reduce", x)
        plan = workspace_plan(workspace, "all_reduce_norm", rows, columns, 0, x.dtype, False)
    require(plan)
    same = also
    if residual is not None or end.norm_weight is not None:
        same = {**also, "residual": residual, **end.same()}
    with workspace.calling(plan, same) as epoch:
        if not plan.by_flux:
            unfused(x, residual, group, out)
            return None
        if isinstance(workspace, NodesWorkspace):
            sum_elements(workspace, plan, x, residual, out, _node_sum)
            return None
        fused, shape = cast(CpuWorkspace | CudaWorkspace, workspace), (plan.m, plan.n)
        added = None if residual is None else residual.reshape(shape)
        tensors = (x.reshape(shape), out.view(shape), added)
        return run_fused(fused, plan, epoch, *tensors, end, None if recipe is None else (recipe, out))


def _node_sum(x: Tensor, group: ProcessGroup, out: Tensor) -> None:
    front.below(ALL_REDUCE, Call(x, None, out=out), group)


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


ALL_REDUCE = front.Collective("all_reduce", _call_of, _known, _sizes, number=_OP, runs=_run)
front.register(ALL_REDUCE, "_out", "_norm", "_quant")

_op: Any = torch.ops.flux.all_reduce.default
_op_out: Any = torch.ops.flux.all_reduce_out.default
_op_norm: Any = torch.ops.flux.all_reduce_norm.default
_op_quant: Any = torch.ops.flux.all_reduce_quant.default
