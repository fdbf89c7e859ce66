"""Backward passes, of the sum of all ranks' losses, by the operators themselves: AllGather+GEMM and
GEMM+ReduceScatter are each other's gradient with respect to x, with the weight read transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flux.calls import checks
from flux.calls.schemas import library
from flux.comm.repeat import PLAIN_TENSORS
from flux.ops.ag_gemm import ag_gemm
from flux.ops.all_gather import all_gather
from flux.ops.gemm import gemm
from flux.ops.gemm_rs import gemm_rs
from flux.ops.gemm_rs_with_gather import gemm_rs_with_gather
from flux.ops.reduce_scatter import reduce_scatter
from flux.ops.wgrad import weight_grad

Tensor = torch.Tensor
Grads = Sequence[Tensor | None]


def bias_grad(grad_output: Tensor) -> Tensor:
    """Sum over rows, [..., N] -> [N], accumulated in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    return grad_output.flatten(0, -2).sum(0, dtype=wide).to(grad_output.dtype)


def joined(
    grads: Sequence[Tensor], weights: Sequence[Tensor], transpose_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients and weights side by side, for one GEMM; a copy costs less than a collective each."""
    if len(grads) == 1:
        return grads[0], weights[0]
    return concatenated(grads, -1), concatenated(weights, 1 if transpose_weight else 0)


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, but returns a view if the tensors are already adjacent in memory in that order."""
    first = tensors[0]
    # To autograd and tracers, a view of the first tensor does not depend on the others: not for those.
    plain = all(type(tensor) in PLAIN_TENSORS for tensor in tensors)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not plain:
        return torch.cat(list(tensors), dim)
    # Compares addresses: weights of ParallelMLP share memory without sharing a storage object.
    begin = first.data_ptr()
    for tensor in tensors:
        if (tensor.data_ptr(), tensor.stride(), tensor.dtype) != (begin, first.stride(), first.dtype):
            return torch.cat(list(tensors), dim)
        begin += tensor.shape[dim] * tensor.stride(dim) * tensor.itemsize
    storage = first.untyped_storage()
    if begin > storage.data_ptr() + storage.nbytes():
        return torch.cat(list(tensors), dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.as_strided(shape, first.stride(), first.storage_offset())


def gathered_input_grad(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    transpose_weight: bool,
    group_name: str,
    needs_x: bool,
    rows: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of x in ag_gemm, summed over weights and ranks, and the gathered rows of x, if given."""
    if not needs_x:
        return None, None if rows is None else all_gather(rows, group=group_name)
    grad, weight = joined(grads, weights, transpose_weight)
    flipped = not transpose_weight
    if rows is None:
        return gemm_rs(grad, weight, group=group_name, transpose_weight=flipped), None
    return gemm_rs_with_gather(grad, weight, rows, group=group_name, transpose_weight=flipped)


def scattered_input_grad(
    grad: Tensor, weight: Tensor, transpose_weight: bool, group_name: str, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of x in gemm_rs, and the gathered gradient of its result, which that of the weight needs."""
    if not needs_x:
        return None, all_gather(grad, group=group_name) if needs_weight else None
    flipped = not transpose_weight
    if not needs_weight:
        return ag_gemm(grad, weight, group=group_name, transpose_weight=flipped), None
    return ag_gemm(grad, weight, group=group_name, transpose_weight=flipped, return_gathered=True)


def no_scales(op: str, scale_x: object) -> None:
    """Refuses fp8 operands in a call that needs gradients, which public functions do earlier."""
    if scale_x is not None:
        checks.fail(op, "scale_x", "None in a call that needs gradients", "a tensor")


def none_for_rest(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """Gradients of an operator's first arguments, and None for the others that were passed."""
    return *grads, *(None for _ in range(len(ctx.needs_input_grad) - len(grads)))


def _setup(op: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """Keeps what the backward pass of an operator needs of its arguments."""
    names = [each.name for each in getattr(torch.ops.flux, op).default._schema.arguments]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=False))
        no_scales(op, given.get("scale_x"))
        ctx.group_name, ctx.transpose_weight = given.get("group_name"), given.get("transpose_weight")
        if "weight" in given:
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            ctx.save_for_backward(given["x"] if needs_weight else None, given["weight"] if needs_x else None)

    return setup


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of gemm and gemm_rs."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_x, rows = None, grad if needs_weight else None
    if ctx.group_name is not None:
        needs = needs_x, needs_weight
        grad_x, rows = scattered_input_grad(grad, weight, ctx.transpose_weight, ctx.group_name, *needs)
    elif needs_x:
        grad_x = gemm(grad, weight, transpose_weight=not ctx.transpose_weight)
    grad_weight = None if rows is None else weight_grad(rows, x, ctx.transpose_weight)
    return none_for_rest(ctx, grad_x, grad_weight, bias_grad(grad) if needs_bias else None)


def _ag_gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.transpose_weight, return_gathered, ctx.group_name, scale_x, *_ = inputs
    no_scales("ag_gemm", scale_x)
    ctx.count = len(weights)
    # Here needs_input_grad has one entry for each tensor; in backward, entries are nested like the arguments.
    needs_x, *needs_weights = ctx.needs_input_grad[: 1 + ctx.count]
    # x is gathered again in the backward pass, unless the caller keeps the gathered x anyway.
    ctx.saved_gathered = return_gathered
    rows = (output[-1] if return_gathered else x) if any(needs_weights) else None
    ctx.save_for_backward(rows, *(weights if needs_x else ()))
    ctx.set_materialize_grads(False)


def _ag_gemm_backward(ctx: Any, grads: Grads) -> tuple[Any, ...]:
    rows, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    products = grads[: ctx.count]
    used = [grad for grad in products if grad is not None]
    grad_x = None
    if used:
        gathers = any(needs_weights) and not ctx.saved_gathered
        # Weights were not saved if x needs no gradient.
        weights = [weight for weight, grad in zip(weights, products, strict=False) if grad is not None]
        how = (ctx.transpose_weight, ctx.group_name, needs_x, rows if gathers else None)
        grad_x, gathered = gathered_input_grad(used, weights, *how)
        rows = gathered if gathers else rows
    if needs_x and len(grads) > ctx.count and grads[-1] is not None:
        of_gathered = reduce_scatter(grads[-1], group=ctx.group_name)
        grad_x = of_gathered if grad_x is None else grad_x + of_gathered
    grad_weights = [
        weight_grad(grad, rows, ctx.transpose_weight) if needed and grad is not None else None
        for grad, needed in zip(products, needs_weights, strict=True)
    ]
    # For torch, a list that contains None is one argument without a gradient.
    grad_biases = None
    if isinstance(needs_biases, list):
        each = zip(products, needs_biases, strict=False)
        grad_biases = [bias_grad(grad) if needed and grad is not None else None for grad, needed in each]
    return none_for_rest(ctx, grad_x, grad_weights, grad_biases)


def _with_gather_backward(ctx: Any, grad: Tensor, of_gathered: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, *_ = _product_backward(ctx, grad)
    needs_rows = ctx.needs_input_grad[3]
    grad_rows = reduce_scatter(of_gathered, group=ctx.group_name) if needs_rows else None
    return grad_x, grad_weight, None, grad_rows, None


_BACKWARDS: dict[str, Any] = {
    "gemm": _product_backward,
    "gemm_rs": _product_backward,
    "ag_gemm": _ag_gemm_backward,
    "gemm_rs_with_gather": _with_gather_backward,
    "all_gather": lambda ctx, grad: none_for_rest(ctx, reduce_scatter(grad, group=ctx.group_name)),
    "reduce_scatter": lambda ctx, grad: none_for_rest(ctx, all_gather(grad, group=ctx.group_name)),
}
for _name, _backward in _BACKWARDS.items():
    _of_name = _ag_gemm_setup if _name == "ag_gemm" else _setup(_name)
    torch.library.register_autograd(f"flux::{_name}", _backward, setup_context=_of_name, lib=library)
