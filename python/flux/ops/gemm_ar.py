"""GEMM+AllReduce: x · weightᵀ summed over ranks, on every rank; optionally with a residual and RMSNorm."""

from __future__ import annotations

import functools
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
from flux.comm.workspace import Same
from flux.ops import _check, _gate, _invariant
from flux.ops import all_gather as gather
from flux.ops import all_reduce as reduce
from flux.ops import gemm as plain
from flux.ops import gemm_rs as scatter
from flux.ops._exchange import sum_over_ranks
from flux.ops._library import dispatch, library, may_skip_dispatch
from flux.ops._norm import rms_norm as rms_norm
from flux.ops._norm import row_norm as row_norm
from flux.ops._tensors import aligned, in_place, readable_if_any, wide_type, writable
from flux.ops.plan import Plan, workspace_plan
from flux.ops.plan_ar import split_rows
from flux.ops.two_level_sums import gemm_and_sum

Tensor = torch.Tensor
_OP = known.operator()


@overload
def gemm_ar(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
    norm_weight: None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def gemm_ar(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
    norm_weight: Tensor,
    eps: float | None = 1e-6,
    out: None = None,
) -> tuple[Tensor, Tensor]: ...


def gemm_ar(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = 1e-6,
    out: Tensor | None = None,
) -> Any:
    """Sum over ranks of x · weightᵀ, plus bias and residual once, on every rank. A collective.

    Each rank's product is accumulated in fp32 and rounded to x's dtype. Those p products are summed in fp32,
    in rank order; then bias and residual are added and the sum is rounded, once. So results are bitwise equal
    on all ranks, and repeatable. What does not run in one kernel (flux.explain says what, and why), and a
    single rank, may round before the residual is added, and not round the products.

    Args:
        x: [..., K/p]; bfloat16 or float16 for the kernel, float32 and float64 go through torch on GPUs.
        weight: [N, K/p] as in nn.Linear, or [K/p, N] with `transpose_weight`; dtype and device of x.
        bias: [N], dtype and device of x, the same on all ranks.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K/p, N].
        residual: [..., N], dtype and device of x, the same on all ranks.
        norm_weight: [N], dtype and device of x: also apply RMSNorm with this weight to the rows of the sum.
        eps: of RMSNorm; nothing without `norm_weight`. None: that of fp32 (fp64 for fp64), as in torch.
        out: contiguous [..., N] to write to; not with `norm_weight`. May be `residual`.

    Returns:
        [..., N] in x's dtype, the sum: a fresh tensor, or `out`. With `norm_weight` a pair of fresh tensors,
        normalised = sum * rsqrt(mean(sum², over N) + eps) * norm_weight, computed in fp32 from the rounded
        sum and rounded once, and the sum itself, which is the next residual.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; `out` shares memory with an
            input; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check(group) raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, weight = torch.randn(4, 64), torch.randn(32, 64)  # [M, K/p], [N, K/p]
        residual, norm_weight = torch.zeros(4, 32), torch.ones(32)
        normalised, total = flux.gemm_ar(x, weight, residual=residual, norm_weight=norm_weight)
        assert normalised.shape == total.shape == (4, 32)  # [M, N], the same on all ranks
    """
    if not torch.compiler.is_compiling() and (calls := known.of(group)) is not None:
        options = (None if norm_weight is None else eps, out, transpose_weight)
        done = calls.call(_OP, _invariance.active(), x, weight, bias, residual, norm_weight, *options)
        if done is not None:
            return cast("Tensor | tuple[Tensor, Tensor]", done)
    direct = may_skip_dispatch(x, weight, bias, residual, norm_weight)
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight}
    if not direct or out is not None:
        _gate.check("gemm_ar", **tensors, transpose_weight=transpose_weight, eps=eps, out=out)
    _check.no_backward("gemm_ar", **tensors, out=out)
    if norm_weight is not None and out is not None:
        _check.fail("gemm_ar", "out", "None with norm_weight, which returns two tensors", "a tensor")
    arguments = (x, weight, bias, transpose_weight, residual)
    if direct:
        pg = resolve_group(group, "gemm_ar")
        return _call(*arguments, norm_weight, eps, pg, out)
    name = group_name(group, "gemm_ar")
    if norm_weight is not None:
        eps = _check.norm_eps(eps, x)
        return dispatch(name, x.device, _op_norm, None, (*arguments, norm_weight, eps, name))
    return dispatch(name, x.device, _op, _op_out, (*arguments, name), out)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: GroupLike = None,
    transpose_weight: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """gemm_ar with torch only, with the same roundings: products in fp32 (or float64), rounded,
    gathered, summed in rank order, bias, residual, rounded.
    """
    pg = resolve_group(group, "gemm_ar")
    shape, m, n, _ = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
    if pg.size() == 1:
        product = plain.reference(x, weight, bias, transpose_weight)
        return product if residual is None else product + residual
    wide = wide_type(x.dtype)
    partial = plain.reference(x, weight, None, transpose_weight).view(m, n).to(wide)
    gathered = [torch.empty_like(partial) for _ in range(pg.size())]
    dist.all_gather(gathered, partial, group=pg)
    total = torch.zeros_like(partial)
    for other in gathered:
        total += other
    return _plus(total, _addends(bias, residual, n)).to(x.dtype).view(shape)


def _addends(bias: Tensor | None, residual: Tensor | None, n: int) -> list[Tensor]:
    """The tensors to add to the sum over ranks, in this order: [n] and [m, n]."""
    found = [] if bias is None else [bias]
    return found if residual is None else [*found, residual.reshape(-1, n)]


def _plus(total: Tensor, addends: list[Tensor]) -> Tensor:
    for addend in addends:
        total += addend
    return total


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group_name: str,
) -> Tensor:
    shape, _, _, _ = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
    return x.new_empty(shape)


def _fake_out(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group_name: str,
    out: Tensor,
) -> None:
    shape, _, _, _ = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
    _check.out_arg("gemm_ar", out, shape, x)


def _fake_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    shape, _, n, _ = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
    _check.norm_args("gemm_ar", norm_weight, eps, n, x)
    return x.new_empty(shape), x.new_empty(shape)


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group_name: str,
) -> Tensor:
    group = process_group(group_name)
    return cast(Tensor, _call(x, weight, bias, transpose_weight, residual, None, 0.0, group))


def _eager_out(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group_name: str,
    out: Tensor,
) -> None:
    _call(x, weight, bias, transpose_weight, residual, None, 0.0, process_group(group_name), out)


def _eager_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    group = process_group(group_name)
    pair = _call(x, weight, bias, transpose_weight, residual, norm_weight, eps, group)
    return cast("tuple[Tensor, Tensor]", pair)


def _call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    group: ProcessGroup,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The sum, or with a norm_weight the normalised sum and the sum. Without torch's dispatcher."""
    if group.size() == 1:
        shape, m, n, k = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
        eps = _check.norm_args("gemm_ar", norm_weight, eps, n, x)
        out = _check.output("gemm_ar", out, shape, x, weight, bias, residual, may_be=residual)
        total = out.view(m, n)
        added = _rows(residual, m, n)
        product = total if added is None else torch.empty_like(total)
        plain.run(x.reshape(m, k), weight, bias, transpose_weight, product)
        if added is not None:
            torch.add(product, added, out=total)
        return out if norm_weight is None else (row_norm(total, norm_weight, eps).view(shape), out)
    eps = None if norm_weight is None else eps
    if (calls := known.of_groups.get(group)) is not None:
        options = (eps, out, transpose_weight)
        done = calls.call_below(_OP, _invariance.active(), x, weight, bias, residual, norm_weight, *options)
        if done is not None:
            return cast("Tensor | tuple[Tensor, Tensor]", done)
    arguments = (x, weight, bias, transpose_weight, residual, norm_weight, eps, group, out)
    return registry.in_turn(group, x.device, _among_ranks, *arguments)


def _among_ranks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None,
    group: ProcessGroup,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    workspace = registry.find(group, x.device)
    facts = _check.facts("gemm_ar", x, weight, bias, transpose_weight)
    if residual is not None:
        facts = (*facts, residual.shape, residual.dtype, residual.device)
    found = None if workspace is None else workspace.plans.get(facts)
    if found is not None:
        plan, shape, m, n, k = found
    else:
        shape, m, n, k = _check.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual)
    tensors = (x, weight, bias, residual, norm_weight)
    recipe = known.Recipe(_OP, _invariance.active(), *tensors, eps, out, transpose_weight)
    eps = _check.norm_args("gemm_ar", norm_weight, eps, n, x)
    out = _check.output("gemm_ar", out, shape, x, weight, bias, residual, may_be=residual)
    total, normalised = out, None
    if len(shape) != 2:
        x, total, residual = x.reshape(m, k), out.view(m, n), _rows(residual, m, n)
    if workspace is None:
        workspace = registry.get(group, x.device, "gemm_ar")
    if found is None:
        plan = workspace_plan(workspace, "gemm_ar", m, n, k, x.dtype, transpose_weight)
        _invariant.require(plan)
        workspace.plans[facts] = (plan, shape, m, n, k)
    same = {"residual": residual, "norm_weight": norm_weight, "eps": eps}
    if plan.fused and plan.mode < 0 and plan.batch_invariant and plan.levels is None:
        for some in split_rows(m, n, x.dtype):
            part = None if residual is None else residual[some]
            _among_ranks(x[some], weight, bias, transpose_weight, part, None, 0.0, group, total[some])
    elif plan.way == "parts":
        product = x.new_empty(m, n)
        plain.run(x, weight, None, transpose_weight, product)
        if bias is not None:  # an all_reduce adds one tensor
            residual = bias.expand(m, n) if residual is None else residual + bias
        normalised = reduce.sum_of(product, residual, norm_weight, eps, group, total)
    elif plan.way == "composed":
        dealt = m - m % group.size()
        head = None if residual is None else residual[:dealt]
        _composed(x[:dealt], weight, bias, transpose_weight, head, group, total[:dealt], same)
        if dealt < m:
            tail = None if residual is None else residual[dealt:]
            _among_ranks(x[dealt:], weight, bias, transpose_weight, tail, None, 0.0, group, total[dealt:])
    else:
        with workspace.calling(plan, {"bias": bias, **same}) as epoch:
            if not plan.fused:
                _unfused(x, weight, bias, transpose_weight, residual, group, total)
            elif isinstance(workspace, CudaWorkspace):
                normalised = _fused_cuda(
                    workspace, plan, x, weight, bias, residual, total, norm_weight, eps, (recipe, out)
                )
            elif isinstance(workspace, CpuWorkspace):
                _fused_cpu(workspace, plan, epoch, x, weight, bias, residual, total)
            else:
                several, added = cast(NodesWorkspace, workspace), _addends(bias, residual, n)
                gemm_and_sum(several, plan, x, weight, total, added, _node_sum)
    if norm_weight is None:
        return out
    if normalised is None:
        normalised = row_norm(total, norm_weight, eps)
    return normalised if len(shape) == 2 else normalised.view(shape), out


def _node_sum(x: Tensor, weight: Tensor, transpose_weight: bool, group: ProcessGroup, out: Tensor) -> None:
    _call(x, weight, None, transpose_weight, None, None, 0.0, group, out)


def _rows(residual: Tensor | None, m: int, n: int) -> Tensor | None:
    return None if residual is None else residual.reshape(m, n)


def _unfused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group: ProcessGroup,
    total: Tensor,
) -> None:
    if total.numel() == 0:
        return
    product = total
    if not x.is_cuda:  # gloo is slow in any dtype, so it sums in the wide type; NCCL sums in x's
        product = torch.empty(total.shape, dtype=wide_type(x.dtype))
    elif residual is not None and residual.data_ptr() == total.data_ptr():
        product = torch.empty_like(total)
    if x.shape[1] > 0:
        w = weight if transpose_weight else weight.t()
        torch.mm(x.to(product.dtype), w.to(product.dtype), out=product)
        dist.all_reduce(product, group=group)
    else:
        product.zero_()
    _plus(product, _addends(bias, residual, total.shape[1]))
    if product is not total:
        total.copy_(product)


def _composed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    group: ProcessGroup,
    total: Tensor,
    same: Same,
) -> None:
    shard = scatter.call(x, weight, bias, transpose_weight, group, also=same)
    if residual is not None:
        rows = shard.shape[0]
        shard += residual[group.rank() * rows : (group.rank() + 1) * rows]
    gather.call(shard, group, total)


def _fused_cuda(
    workspace: CudaWorkspace,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    total: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    made: tuple[known.Recipe, Tensor] | None = None,
) -> Tensor | None:
    """Launches the kernel. made: recipe (flux.comm.known) and result of the call, if it is to be known."""
    # Allocations may run out of memory, so they come before the call is opened.
    target = writable(total)
    # How many CTAs share a row of the kernel's norm depends on the number of rows.
    weight_here = None if plan.batch_invariant else norm_weight
    normalised = None if weight_here is None else torch.empty_like(total)
    if residual is not None and residual.data_ptr() == total.data_ptr():
        # The kernels write the product to `target` before they read the residual, so it must not be the same.
        target = torch.empty_like(total)
    first, second = (target, None) if normalised is None else (normalised, target)
    operands = (aligned(x), aligned(weight), readable_if_any(bias), first)
    extras = (readable_if_any(residual), readable_if_any(weight_here))
    with workspace.enter(plan) as (symm_buffer, _):
        # num_sms, equal on all ranks: CTAs wait for the CTAs of peers that have the same share.
        options = (plan.transpose_weight, symm_buffer, plan.choice, workspace.num_sms, plan.mode)
        enqueue = functools.partial(_kernel, *operands, *options, *extras, eps, second)
        enqueue()
    norms_here = (normalised is None) == (norm_weight is None)
    read = (*operands[:3], *extras)
    if made is not None and norms_here and target is total and in_place(read, made[0].given[2:7]):
        recipe, out = made
        if normalised is None:
            used = [2, 3, 4, recipe.returns(out, like=2, argument=8), 5, 6, known.ABSENT]
        else:
            first_result = recipe.returns(out, like=2)
            used = [2, 3, 4, first_result, 5, 6, recipe.returns(out, like=2)]
        workspace.remember(recipe, enqueue, [used])
    if target is not total:
        total.copy_(target)
    return normalised


def _fused_cpu(
    workspace: CpuWorkspace,
    plan: Plan,
    epoch: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    total: Tensor,
) -> None:
    partial = plain.reference(x, weight, None, plan.transpose_weight)
    sum_over_ranks(workspace, plan, epoch, partial, total, _addends(bias, residual, plan.n))


for _device in ("CPU", "CUDA"):
    library.impl("gemm_ar", _eager, _device)
    library.impl("gemm_ar_out", _eager_out, _device)
    library.impl("gemm_ar_norm", _eager_norm, _device)
torch.library.register_fake("flux::gemm_ar", _fake, lib=library)
torch.library.register_fake("flux::gemm_ar_out", _fake_out, lib=library)
torch.library.register_fake("flux::gemm_ar_norm", _fake_norm, lib=library)

_op: Any = torch.ops.flux.gemm_ar.default
_op_out: Any = torch.ops.flux.gemm_ar_out.default
_op_norm: Any = torch.ops.flux.gemm_ar_norm.default
_kernel: Any = torch.ops.flux._gemm_ar.default
