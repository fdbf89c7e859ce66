"""The linear maps of tensor parallelism (arXiv 1909.08053, 2205.05198). A loss counts once, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch

from flux import _deprecated
from flux._sharded import local_parts
from flux.calls import argument_types, checks, transforms
from flux.comm.group import GroupLike, group_name, world_size
from flux.layers.fp8 import Fp8, Quantised, gathered_products, product, weight_grad_operands
from flux.layers.fp8 import check as check_fp8
from flux.layers.weight_grads import DeferredGrads, How, Operand, WeightGrads
from flux.ops.ag_gemm import ag_gemm
from flux.ops.all_gather import all_gather
from flux.ops.all_reduce import all_reduce
from flux.ops.autograd import bias_grad, gathered_input_grad, joined, scattered_input_grad
from flux.ops.gemm import gemm
from flux.ops.gemm_ar import gemm_ar
from flux.ops.gemm_rs import gemm_rs
from flux.ops.gemm_rs_with_gather import gathers_beside

Tensor = torch.Tensor
SaveGathered = bool | Literal["auto"]
Group = tuple[str, bool]  # its name, and whether rows are distributed over it


class _Options(TypedDict, total=False):
    group: GroupLike
    sequence_parallel: bool
    save_gathered: SaveGathered
    gradient_accumulation_fusion: bool
    deferred: DeferredGrads | None
    fp8: Fp8 | None


@overload
def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[_Options]
) -> Tensor: ...


@overload
def column_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    **options: Unpack[_Options],
) -> list[Tensor]: ...


@_deprecated.arguments(weights="weight", biases="bias")
def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike = None,
    sequence_parallel: bool = True,
    save_gathered: SaveGathered = False,
    gradient_accumulation_fusion: bool = False,
    deferred: DeferredGrads | None = None,
    fp8: Fp8 | None = None,
) -> Tensor | list[Tensor]:
    """x · weightᵀ + bias, for one weight or each of several; each rank has N/p output features. A collective.

    Args:
        x: [M/p, ..., K] with `sequence_parallel`, the rank's rows; else [M, ..., K], the same on all ranks.
            bfloat16, float16, float32 or float64.
        weight: [N/p, K], dtype and device of x, or a DTensor with such a part; or a list of such, for all of
            which x is gathered once.
        bias: [N/p] or None; with a list of weights None, or a list with one for each, which may be None.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel: gather x, and scatter its gradient. Else the gradient of x is summed over ranks.
        save_gathered: keep the gathered x for the backward pass, p times the memory of x. False: gather it
            again. "auto": gather it again if the plan does so beside a GEMM, else keep it.
        gradient_accumulation_fusion: add a weight's gradient to its attribute `main_grad`, where it has one,
            by flux.wgrad_accum, and give autograd none.
        deferred: leave gradients of weights to its `compute`. The weights must be leaves, such as parameters.
        fp8: quantise operands and gradients, and multiply in fp8. x is not float64 then.

    Returns:
        [M, ..., N/p] in x's dtype; with a list of weights a list, one for each.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there is no weight, `bias` has another length than `weight`, a weight whose gradient is
            deferred is no leaf, or shapes, dtypes or devices do not fit. Both are raised before anything is
            exchanged.
        CommTimeoutError, RuntimeError: as flux.ag_gemm.

    Example::

        from flux.layers import column_linear

        x, gate, up = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32, 64)
        a, b = column_linear(x, [gate, up])
        assert a.shape == b.shape == (8 * p, 32)
    """
    op, many = "column_linear", isinstance(weight, (list, tuple))
    if many and bias is not None and not isinstance(bias, (list, tuple)):
        argument_types.wrong_type(op, "bias", "a list, as weight is one,", bias)
    given: Any = weight if many else (weight,)
    of_weights: Any = () if bias is None else bias if many else (bias,)
    parts = local_parts([*given, *of_weights])
    weights, biases = parts[: len(given)], parts[len(given) :]
    argument_types.tensor(op, "x", x)
    argument_types.tensors(op, "weight", weights)
    argument_types.tensors(op, "bias", biases)
    if bias is not None and len(biases) != len(weights):
        checks.fail(op, "bias", f"{len(weights)} entries, one for each weight", f"{len(biases)}")
    argument_types.flag(op, "sequence_parallel", sequence_parallel)
    argument_types.flag_or_auto(op, "save_gathered", save_gathered)
    how = _how(op, gradient_accumulation_fusion, deferred, weights, given)
    name = group_name(group, op)
    used = biases if any(each is not None for each in biases) else ()
    if not transforms.enabled(x.device):  # under autocast the operators check the operands after the cast
        checks.ag_gemm_args(op, x, weights, biases, False, 1)
    check_fp8(op, fp8, x)
    settings = ((name, sequence_parallel), save_gathered, how, fp8)
    results = _apply_column(x, *settings, len(weights), *weights, *used)
    return list(results) if many else cast(Tensor, results[0])


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike = None,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    deferred: DeferredGrads | None = None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """Sum over ranks of x · weightᵀ, plus bias once; each rank has K/p columns of x and weight. A collective.

    Args:
        x: [M, ..., K/p], bfloat16, float16, float32 or float64.
        weight: [N, K/p], dtype and device of x, or a DTensor with such parts.
        bias: [N], the same on all ranks; so is its gradient.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel: each rank gets its rows of the sum. Else all ranks get all of it.
        gradient_accumulation_fusion: add a weight's gradient to its attribute `main_grad`, where it has one.
        deferred: leave gradients of weights to its `compute`. The weights must be leaves, such as parameters.
        fp8: quantise operands and gradients, and multiply in fp8. x is not float64 then.

    Returns:
        [M/p, ..., N] with `sequence_parallel`, else [M, ..., N], in x's dtype.

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes, dtypes or devices do not fit, or a weight whose gradient is deferred is no leaf.
            Both are raised before anything is exchanged.
        CommTimeoutError, RuntimeError: as flux.gemm_rs.

    Example::

        from flux.layers import row_linear

        x, weight = torch.randn(8 * p, 16, requires_grad=True), torch.randn(64, 16)
        assert row_linear(x, weight).shape == (8, 64)
        row_linear(x, weight, sequence_parallel=False).sum().backward()  # [M, N] on all ranks
    """
    op, given = "row_linear", [weight]
    weight, bias = local_parts([weight, bias])
    argument_types.tensor(op, "x", x)
    argument_types.tensor(op, "weight", weight)
    argument_types.optional_tensor(op, "bias", bias)
    argument_types.flag(op, "sequence_parallel", sequence_parallel)
    how = _how(op, gradient_accumulation_fusion, deferred, [weight], given)
    name = group_name(group, op)
    if not transforms.enabled(x.device):
        p = world_size(name, op) if sequence_parallel else 1
        checks.gemm_args(op, checks.Product(x, weight, bias, False), p)
    check_fp8(op, fp8, x)
    return cast(Tensor, _apply_row(x, weight, bias, (name, sequence_parallel), how, fp8))


def _how(
    op: str, fusion: bool, deferred: DeferredGrads | None, parts: Sequence[Any], given: Sequence[Tensor]
) -> How:
    """Checks how gradients of weights are made. Not through autograd: marks parts of DTensors with these."""
    argument_types.flag(op, "gradient_accumulation_fusion", fusion)
    if deferred is not None:
        if not isinstance(deferred, DeferredGrads):
            argument_types.wrong_type(op, "deferred", "None or DeferredGrads", deferred)
        if any(weight.requires_grad and not weight.is_leaf for weight in given):
            checks.fail(op, "deferred", "weights that are leaves", "a weight that autograd computes")
    if fusion or deferred is not None:
        for part, weight in zip(parts, given, strict=True):
            if part is not weight:
                part.parameter = weight
    return fusion, deferred


def _save(ctx: Any, rows: Operand | None, weights: Sequence[Tensor]) -> None:
    kept = rows if isinstance(rows, Quantised) else (rows, None)
    ctx.save_for_backward(*kept, *weights)


def _saved(ctx: Any) -> tuple[Any, list[Tensor]]:
    rows, scale, *weights = ctx.saved_tensors
    return rows if scale is None else Quantised(rows, scale), weights


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        save_gathered: SaveGathered,
        how: How,
        fp8: Fp8 | None,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.weight_grads = WeightGrads(tensors[:count], ctx.needs_input_grad[6:], *how)
        # Cast here, because the backward pass needs the operands of the GEMM.
        x, *operands = transforms.cast_if_enabled(x, *tensors)
        weights, biases = operands[:count], operands[count:]
        name, sequence_parallel = ctx.group = group
        needs_weight = any(ctx.needs_input_grad[6 : 6 + count])
        if save_gathered == "auto" and sequence_parallel and needs_weight and fp8 is None:
            # Without a gradient of x there is no GEMM to gather beside, nor beside rows of fp8.
            save_gathered = not (ctx.needs_input_grad[0] and gathers_beside(x, weights, name))
        keeps = sequence_parallel and bool(save_gathered) and needs_weight
        rows: Operand = x
        if fp8 is not None:
            keeps, among = keeps and fp8.weight_grads, name if sequence_parallel else None
            given = fp8.rows(x, among=among), fp8.weights(weights), biases, among, keeps
            results, quantised = gathered_products(*given, out_dtype=x.dtype, accumulate=fp8.accumulate)
            rows = quantised if fp8.weight_grads else x
        elif keeps:
            results, rows = ag_gemm(x, weights, biases or None, group=name, return_gathered=True)
        elif sequence_parallel:
            results = ag_gemm(x, weights, biases or None, group=name)
        else:
            results = [gemm(x, weight, bias) for weight, bias in zip_longest(weights, biases)]
        _save(ctx, rows if needs_weight else None, weights)
        ctx.gathered, ctx.fp8 = keeps, fp8
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = _saved(ctx)
        (name, sequence_parallel), fp8, dtype = ctx.group, ctx.fp8, grads[0].dtype
        count, needs_x, needs = len(weights), ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        gathers = sequence_parallel and any(needs[:count]) and not ctx.gathered
        operands: Sequence[Operand] = grads
        grad_x = None
        if fp8 is not None:
            grad, weight = joined(grads, weights, False)
            whole = fp8.rows(grad, fp8.of_grads)
            if needs_x:
                flipped = fp8.weights([weight])[0].transposed()
                summed = gemm_rs if sequence_parallel else gemm_ar
                grad_x = product(summed, whole, flipped, group=name, out_dtype=dtype)
            if gathers:
                in_fp8 = isinstance(rows, Quantised)
                rows = rows.gathered(name) if in_fp8 else all_gather(rows, group=name)
            if isinstance(rows, Quantised):
                sizes = [grad.shape[-1] for grad in grads]
                operands, rows = weight_grad_operands(fp8, whole, sizes, rows, dtype)
        elif sequence_parallel:
            how = needs_x, rows if gathers else None
            grad_x, gathered = gathered_input_grad(grads, weights, False, name, *how)
            rows = gathered if gathers else rows
        elif needs_x:
            grad_x = gemm_ar(*joined(grads, weights, False), group=name, transpose_weight=True)
        biases = zip(grads, needs[count:], strict=False)
        grad_biases = [bias_grad(grad) if needed else None for grad, needed in biases]
        return grad_x, *[None] * 5, *ctx.weight_grads(operands, rows, dtype), *grad_biases


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, how: How, fp8: Fp8 | None
    ) -> Tensor:
        ctx.weight_grads = WeightGrads([weight], ctx.needs_input_grad[1:], *how)
        x, weight, bias = transforms.cast_if_enabled(x, weight, bias)
        ctx.fp8, ctx.group = fp8, group
        name, sequence_parallel = group
        rows: Operand = x
        summed: Any = gemm_rs if sequence_parallel else gemm_ar
        if fp8 is not None:
            quantised, (operand,) = fp8.rows(x), fp8.weights([weight])
            options = {"group": name, "out_dtype": x.dtype, "accumulate": fp8.accumulate}
            result = product(summed, quantised, operand, bias, **options)
            rows = quantised if fp8.weight_grads else x
        else:
            result = summed(x, weight, bias, group=name)
        _save(ctx, rows if ctx.needs_input_grad[1] else None, [weight])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, (weight,) = _saved(ctx)
        (name, sequence_parallel), fp8, dtype = ctx.group, ctx.fp8, grad.dtype
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        operand: Any = grad
        grad_x = None
        if fp8 is not None:
            among, in_fp8 = name if sequence_parallel else None, isinstance(rows, Quantised)
            if needs_x or in_fp8:
                operand = fp8.rows(grad, fp8.of_grads, among=among)
            if needs_x:
                flipped = [each.transposed() for each in fp8.weights([weight])]
                (grad_x,), operand = gathered_products(operand, flipped, (), among, in_fp8, out_dtype=dtype)
            elif in_fp8 and sequence_parallel:
                operand = operand.gathered(name)
            if in_fp8:
                (operand,), rows = weight_grad_operands(fp8, operand, [grad.shape[-1]], rows, dtype)
            elif needs_weight:
                operand = all_gather(grad, group=name) if sequence_parallel else grad
        elif sequence_parallel:
            # The gradient of the bias also needs all rows, because it is the same on all ranks.
            given = grad, weight, False, name, needs_x, needs_weight or needs_bias
            grad_x, operand = scattered_input_grad(*given)
        elif needs_x:
            grad_x = gemm(grad, weight, transpose_weight=True)
        of_bias = operand if fp8 is None else grad
        grad_bias = bias_grad(of_bias) if needs_bias and of_bias is not None else None
        if grad_bias is not None and fp8 is not None and sequence_parallel:
            grad_bias = all_reduce(grad_bias, group=name)
        return grad_x, *ctx.weight_grads([operand], rows, dtype), grad_bias, None, None, None


_apply_column: Any = _Column.apply
_apply_row: Any = _Row.apply
