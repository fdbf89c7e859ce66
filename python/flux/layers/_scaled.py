"""Autograd of column_linear and row_linear in fp8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flux.layers import fp8
from flux.layers.fp8 import Fp8, Quantised
from flux.layers.weight_grads import How, WeightGrads
from flux.ops import autocast
from flux.ops.all_gather import all_gather
from flux.ops.all_reduce import all_reduce
from flux.ops.autograd import bias_grad

Tensor = torch.Tensor


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        name: str,
        sequence_parallel: bool,
        save_gathered: bool,
        how: How,
        recipe: Fp8,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.weight_grads = WeightGrads(tensors[:count], ctx.needs_input_grad[7:], *how)
        x, *operands = autocast.cast_if_enabled(x, *tensors)
        weights, biases = operands[:count], operands[count:]
        needs_weight = any(ctx.needs_input_grad[7 : 7 + count])
        ctx.gathered = sequence_parallel and save_gathered and needs_weight and recipe.weight_grads
        group = name if sequence_parallel else None
        results, rows = fp8.column_forward(recipe, x, weights, biases, group, ctx.gathered)
        _save(ctx, recipe, x if needs_weight else None, rows, weights)
        ctx.name, ctx.sequence_parallel, ctx.dtype = name, sequence_parallel, x.dtype
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, weights = _saved(ctx)
        count, recipe = len(weights), ctx.recipe
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        whole, grad_x = fp8.side_by_side(recipe, grads), None
        if needs_x:
            grad_x = fp8.column_input_grad(recipe, whole, weights, ctx.name, ctx.sequence_parallel, ctx.dtype)
        gathers = ctx.sequence_parallel and not ctx.gathered
        operands: list[Any] = list(grads)
        x: Any = saved
        if isinstance(saved, Quantised):
            x = saved.gathered(ctx.name) if gathers else saved
            sizes = [grad.shape[-1] for grad in grads]
            operands, x = fp8.weight_grad_operands(recipe, whole, sizes, x, ctx.dtype)
        elif gathers and x is not None:
            x = all_gather(x, group=ctx.name)
        grad_weights = ctx.weight_grads(operands, x, ctx.dtype)
        grad_biases = [
            bias_grad(grad) if needed else None for grad, needed in zip(grads, needs[count:], strict=False)
        ]
        return grad_x, None, None, None, None, None, None, *grad_weights, *grad_biases


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        name: str,
        sequence_parallel: bool,
        how: How,
        recipe: Fp8,
    ) -> Tensor:
        ctx.weight_grads = WeightGrads([weight], ctx.needs_input_grad[1:], *how)
        x, weight, bias = autocast.cast_if_enabled(x, weight, bias)
        result, rows = fp8.row_forward(recipe, x, weight, bias, name, sequence_parallel)
        _save(ctx, recipe, x if ctx.needs_input_grad[1] else None, rows, [weight])
        ctx.name, ctx.sequence_parallel, ctx.dtype = name, sequence_parallel, x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, (weight,) = _saved(ctx)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        group = ctx.name if ctx.sequence_parallel else None
        x: Any = saved
        grad_x, in_fp8 = None, isinstance(saved, Quantised)
        operand: Any = grad
        if needs_x:
            keep = needs_weight and in_fp8
            grad_x, operand = fp8.row_input_grad(ctx.recipe, grad, weight, group, keep)
        elif in_fp8:
            operand = ctx.recipe.rows(grad, ctx.recipe.of_grads, among=group)
            operand = operand if group is None else operand.gathered(group)
        if isinstance(saved, Quantised):
            (operand,), x = fp8.weight_grad_operands(ctx.recipe, operand, [grad.shape[-1]], saved, ctx.dtype)
        elif needs_weight:
            operand = grad if group is None else all_gather(grad, group=group)
        grad_bias = None
        if needs_bias:
            own = bias_grad(grad)
            grad_bias = own if group is None else all_reduce(own, group=group)
        grad_weights = ctx.weight_grads([operand], x, ctx.dtype)
        return grad_x, *grad_weights, grad_bias, None, None, None, None


def _save(ctx: Any, recipe: Fp8, x: Tensor | None, rows: Quantised, weights: Sequence[Tensor]) -> None:
    """Saves what the backward pass reads: quantised rows, or the rows themselves, or if x is None neither."""
    ctx.recipe, ctx.keeps = recipe, x is not None
    kept = () if x is None else (rows.q, rows.scale) if recipe.weight_grads else (x,)
    ctx.save_for_backward(*kept, *weights)


def _saved(ctx: Any) -> tuple[Quantised | Tensor | None, list[Tensor]]:
    """What _save has saved."""
    if not ctx.keeps:
        return None, list(ctx.saved_tensors)
    if ctx.recipe.weight_grads:
        q, scale, *weights = ctx.saved_tensors
        return Quantised(q, scale), weights
    x, *weights = ctx.saved_tensors
    return x, weights


column: Any = _Column.apply
row: Any = _Row.apply
