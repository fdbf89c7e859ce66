"""GEMM+AllReduce: x · weightᵀ summed over ranks, on every rank; optionally with a residual and RMSNorm."""

from __future__ import annotations

from typing import Any, NamedTuple, cast, overload

import torch
from torch.distributed import ProcessGroup

from flux import _invariance
from flux.calls import argument_types, checks, front
from flux.calls.dispatch import dispatch, may_skip_dispatch
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, resolve_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.fp8 import scales as fp8
from flux.fp8.scales import Accumulate, Scales
from flux.ops import all_reduce as reduce
from flux.ops import gemm as plain
from flux.ops import norm_and_quant
from flux.ops.norm_and_quant import End, Quant
from flux.ops.norm_and_quant import rms_norm as rms_norm
from flux.ops.norm_and_quant import row_norm as row_norm
from flux.ops.ways import gemm_ar as gemm_ar_ways
from flux.ops.ways.two_level_sums import gemm_and_sum
from flux.plan.choose import require, workspace_plan

Tensor = torch.Tensor
_OP = repeat.operator()


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
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
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
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
    quant: None = None,
) -> tuple[Tensor, Tensor]: ...


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
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
    quant: Quant,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
) -> tuple[Tensor, ...]: ...


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
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = "promoted",
    quant: Quant | None = None,
    quant_scale: Tensor | None = None,
    ue8m0: bool = False,
    return_norm: bool = False,
) -> Any:
    """Sum over ranks of x · weightᵀ, plus bias and residual once, on every rank. A collective.

    Each rank's product is accumulated in fp32 and rounded to the result's dtype. Those p products are summed
    in fp32, in rank order; then bias and residual are added and the sum is rounded, once. So results are
    bitwise equal on all ranks, and repeatable. In parts (flux.explain says what, and why) rank 0 adds the
    bias to its product before that is rounded. What is composed or unfused, and a single rank, may round
    before the residual is added, and not round the products.

    Args:
        x: [..., K/p]; bfloat16 or float16 for the kernel, float32 and float64 go through torch on GPUs. With
            scales fp8, as in flux.gemm.
        weight: [N, K/p] as in nn.Linear, or [K/p, N] with `transpose_weight`; dtype and device of x. With
            scales float8_e4m3fn, as in flux.gemm.
        bias: [N], dtype of the result and device of x, the same on all ranks.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        transpose_weight: weight is [K/p, N].
        residual: [..., N], dtype of the result and device of x, the same on all ranks.
        norm_weight: [N], dtype of the result and device of x: also apply RMSNorm with this weight to the rows
            of the sum.
        eps: of RMSNorm; nothing without `norm_weight`. None: that of fp32 (fp64 for fp64), as in torch.
        out: contiguous [..., N] to write to; not with `norm_weight`. May be `residual`.
        scale_x, scale_w: of this rank's x and weight, with the shapes of flux.gemm; of the same kind on all
            ranks.
        out_dtype, accumulate: as in flux.gemm, the same on all ranks.
        quant: with `norm_weight`: quantise the normalised sum to float8_e4m3fn as flux.quantize does, with
            "tensor", "row" or "group128" scales.
        quant_scale: with "tensor": float32 [1], the scale to use (static quantisation); the same on all
            ranks.
        ue8m0: as in flux.quantize.
        return_norm: also return the normalised sum.

    Returns:
        [..., N] in x's dtype, with scales in `out_dtype`, the sum: a fresh tensor, or `out`. With
        `norm_weight` a pair of fresh tensors, normalised = sum * rsqrt(mean(sum², over N) + eps) *
        norm_weight, computed in fp32 from the rounded sum and rounded once, and the sum itself, which is the
        next residual. With `quant` a tuple of the quantised normalised sum, its scales as of flux.quantize,
        the sum, and with `return_norm` the normalised sum.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit or needs a gradient in grad mode; `out` shares memory with an
            input; or, where the ranks notice, they made different calls.
        CommTimeoutError: a peer did not deliver within FLUX_TIMEOUT_S. For CUDA tensors a later call or
            flux.check raises it.
        RuntimeError: the workspace would have to grow during the capture of a CUDA graph.

    Example::

        x, weight = torch.randn(4, 64), torch.randn(32, 64)  # [M, K/p], [N, K/p]
        residual, norm_weight = torch.zeros(4, 32), torch.ones(32)
        normalised, total = flux.gemm_ar(x, weight, residual=residual, norm_weight=norm_weight)
        assert normalised.shape == total.shape == (4, 32)  # [M, N], the same on all ranks
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    quantised = norm_and_quant.arguments("gemm_ar", quant, quant_scale, ue8m0, return_norm)
    if not torch.compiler.is_compiling() and (calls := repeat.of(group)) is not None:
        options = (None if norm_weight is None else eps, out, transpose_weight, *scaling, *quantised)
        done = calls.call(_OP, _invariance.active(), x, weight, bias, residual, norm_weight, *options)
        if done is not None:
            return done
    direct = may_skip_dispatch(x, weight, bias, residual, norm_weight, *scaling[:2], quant_scale)
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight}
    if not direct or out is not None or scaling or quantised:
        how = fp8.named(scale_x, scale_w, out_dtype, accumulate)
        how |= norm_and_quant.named(quant, quant_scale, ue8m0, return_norm)
        argument_types.check("gemm_ar", **tensors, transpose_weight=transpose_weight, eps=eps, out=out, **how)
    checks.no_backward("gemm_ar", **tensors, out=out, scale_x=scale_x, scale_w=scale_w)
    norm_and_quant.check("gemm_ar", norm_weight, out, quantised)
    arguments = (x, weight, bias, transpose_weight, residual)
    if direct:
        pg, scales = resolve_group(group, "gemm_ar"), fp8.given("gemm_ar", *scaling)
        end = norm_and_quant.End(norm_weight, eps, *quantised)
        return front.run(GEMM_AR, Call(*arguments, end, out, scales), pg)
    name = group_name(group, "gemm_ar")
    if norm_weight is None:
        if out is None:
            return dispatch(name, x.device, _op, *arguments, name, *scaling)
        dispatch(name, x.device, _op_out, *arguments, name, out, *scaling)
        return out
    normed = (*arguments, norm_weight, checks.norm_eps(eps, x), name)
    if not quantised:
        return dispatch(name, x.device, _op_norm, *normed, *scaling)
    return tuple(dispatch(name, x.device, _op_quant, *normed, *quantised, *scaling))


class Call(NamedTuple):
    """The arguments of flux.gemm_ar, what follows the sum in one, and the scales."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transpose_weight: bool
    residual: Tensor | None
    end: End = norm_and_quant.NONE
    out: Tensor | None = None
    scales: Scales | None = None


def _call_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transpose_weight: bool,
    residual: Tensor | None,
    **rest: Any,
) -> Call:
    scales = fp8.given("gemm_ar", **{name: rest.pop(name) for name in fp8.NAMES if name in rest})
    out = rest.pop("out", None)
    return Call(x, weight, bias, transpose_weight, residual, End(**rest), out, scales)


def _sizes(call: Call, p: int) -> front.Sizes:
    x, weight, bias, transpose_weight, residual, _, _, scales = call
    return checks.gemm_ar_args("gemm_ar", x, weight, bias, transpose_weight, residual, scales)


def _run(call: Call, group: ProcessGroup) -> Any:
    """The sum, or with a norm what `end` makes of it."""
    if group.size() > 1:
        return registry.in_turn(group, call.x.device, _among_ranks, call, group)
    x, weight, bias, transpose_weight, residual, end, out, scales = call
    shape, m, n, k = _sizes(call, 1)
    end = end.checked("gemm_ar", n, x, scales)
    out = checks.output("gemm_ar", out, shape, x, weight, bias, residual, may_be=(residual,), scales=scales)
    total = out.view(m, n)
    added = gemm_ar_ways.rows(residual, m, n)
    product = total if added is None else torch.empty_like(total)
    weight, transpose_weight, scales = fp8.canonical(weight, transpose_weight, scales)
    plain.run(plain.Call(x.reshape(m, k), weight, bias, transpose_weight, product, scales))
    if added is not None:
        torch.add(product, added, out=total)
    return end.of(out)


def serving(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    group: GroupLike,
) -> tuple[Tensor, Tensor]:
    """gemm_ar with a norm, in a CUDA graph of a model that only serves: a product, then its sum. The CTAs of
    a sum with few tokens leave SMs to the next kernel, which loads its weight while ranks wait
    (docs/design/vllm.md#against-vllms-defaults).
    """
    pg = resolve_group(group, "gemm_ar")
    if bias is None and x.shape[0] <= plain.SERVED_TOKENS:
        product = plain.serving(x, weight)
    else:
        product = torch.nn.functional.linear(x, weight, bias if pg.rank() == 0 else None)
    return reduce.all_reduce(product, group=pg, residual=residual, norm_weight=norm_weight, eps=eps)


def _known(call: Call) -> dict[str, Any]:
    """The arguments of a call for flux.comm.repeat."""
    x, weight, bias, transpose_weight, residual, end, out, scales = call
    given = {"batch_invariant": _invariance.active(), "x": x, "weight": weight, "bias": bias}
    given |= {"residual": residual, "norm_weight": end.norm_weight}
    given |= {"eps": None if end.norm_weight is None else end.eps, "out": out}
    return given | {"transpose_weight": transpose_weight} | fp8.by_name(scales) | end.by_name()


def _among_ranks(call: Call, group: ProcessGroup) -> Any:
    x, weight, bias, transpose_weight, residual, end, out, scales = call
    workspace = registry.find(group, x.device)
    op = "gemm_ar" if end.norm_weight is None else "gemm_ar_norm"
    facts = checks.facts(op, x, weight, bias, transpose_weight, None, scales)
    if residual is not None:
        facts = (*facts, residual.shape, residual.dtype, residual.device)
    found = None if workspace is None else workspace.plans.get(facts)
    if found is not None:
        plan, shape, m, n, k = found
    else:
        shape, m, n, k = _sizes(call, group.size())
    recipe = repeat.Recipe(_OP, _known(call))
    end = end.checked("gemm_ar", n, x, scales)
    out = checks.output("gemm_ar", out, shape, x, weight, bias, residual, may_be=(residual,), scales=scales)
    total, made = out, None
    if len(shape) != 2:
        x, total, residual = x.reshape(m, k), out.view(m, n), gemm_ar_ways.rows(residual, m, n)
    if workspace is None:
        workspace = registry.get(group, x.device, "gemm_ar")
    if scales is not None:
        weight, transpose_weight, scales = fp8.canonical(weight, transpose_weight, scales)
    if found is None:
        scaling = None if scales is None else scales.scaling(k)
        plan = workspace_plan(workspace, op, m, n, k, x.dtype, transpose_weight, scaling)
        require(plan)
        workspace.plans[facts] = (plan, shape, m, n, k)
    same = {"residual": residual, **end.same()}
    if plan.way == "parts":
        product = torch.empty_like(total)
        once = bias if group.rank() == 0 else None  # the sum has it once
        plain.run(plain.Call(x, weight, once, transpose_weight, product, scales), recipe)
        of_sum = reduce.recipe_of(product, residual, end, total, recipe)
        made = reduce.made_of(product, residual, end, group, total, of_sum, {"bias": bias})
        if isinstance(workspace, CudaWorkspace):
            end.remembered(recipe, out, made)
            recipe.allocates(product)
            workspace.remember_parts(recipe, 2)
    elif plan.way == "composed":
        dealt = m - m % group.size()
        head, tail = slice(dealt), slice(dealt, m)
        added = (None, None) if residual is None else (residual[head], residual[tail])
        operands = (weight, bias, transpose_weight)
        theirs = fp8.of_slice(scales, m, head)
        whole = recipe if dealt == m and isinstance(workspace, CudaWorkspace) else None
        of_head = gemm_ar_ways.Operands(x[head], *operands, added[0], total[head], theirs)
        gemm_ar_ways.composed(of_head, group, same, whole)
        if dealt < m:
            theirs = fp8.of_slice(scales, m, tail)
            rest = Call(x[tail], *operands, added[1], out=total[tail], scales=theirs)
            _among_ranks(rest, group)
        found = end.of(out)
        if dealt == m and isinstance(workspace, CudaWorkspace):
            end.follows(recipe, out, found)
            workspace.remember_parts(recipe, 2 + (residual is not None))
        return found
    else:
        of_call = gemm_ar_ways.Operands(x, weight, bias, transpose_weight, residual, total, scales)
        with workspace.calling(plan, {"bias": bias, **same}) as epoch:
            if not plan.by_flux:
                gemm_ar_ways.unfused(of_call, group)
            elif isinstance(workspace, CudaWorkspace):
                made = gemm_ar_ways.fused_cuda(workspace, plan, of_call, end, (recipe, out))
            elif isinstance(workspace, CpuWorkspace):
                gemm_ar_ways.fused_cpu(workspace, plan, epoch, of_call)
            else:
                several, addends = cast(NodesWorkspace, workspace), gemm_ar_ways.addends(bias, residual, n)
                gemm_and_sum(several, plan, x, weight, total, addends, scales, _node_sum)
    return end.of(out, made)


def _node_sum(
    x: Tensor,
    weight: Tensor,
    transpose_weight: bool,
    group: ProcessGroup,
    out: Tensor,
    scales: Scales | None = None,
) -> None:
    front.below(GEMM_AR, Call(x, weight, None, transpose_weight, None, out=out, scales=scales), group)


GEMM_AR = front.Collective("gemm_ar", _call_of, _known, _sizes, number=_OP, runs=_run)
front.register(GEMM_AR, "_out", "_norm", "_quant")

_op: Any = torch.ops.flux.gemm_ar.default
_op_out: Any = torch.ops.flux.gemm_ar_out.default
_op_norm: Any = torch.ops.flux.gemm_ar_norm.default
_op_quant: Any = torch.ops.flux.gemm_ar_quant.default
