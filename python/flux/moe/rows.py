"""Steps between GEMMs of experts, over rows in a routing's order: torch's formulas, or kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flux import _native
from flux._memory import readable, readable_if_any, wide_type
from flux.calls.schemas import implement, library
from flux.comm import cuda, repeat
from flux.comm.repeat import Recipe
from flux.moe import reference
from flux.ops.grouped_gemm import NUMBERS, activate, silu_slope

Tensor = torch.Tensor
_WEIGHTED_SUM = repeat.operator()
_MAX_CHOICES: int = _native.core.MOE_MAX_TOP_K


def kernel_takes(rows: Tensor, columns: int) -> bool:
    """Whether there are kernels for rows with so many columns of this dtype on this device."""
    vectors = rows.dtype in (torch.bfloat16, torch.float16) and columns % 8 == 0
    return rows.is_cuda and vectors and cuda.why_not(rows.device) is None


def gather_rows(x: Tensor, tokens: Tensor, offsets: Tensor, scores: Tensor | None = None) -> Tensor:
    """x[tokens], each row times its entry of `scores`, in the wide type; rounded once."""
    return (_gathered if torch.is_grad_enabled() else _gather_op)(x, tokens, offsets, scores)


def finish_rows(
    rows: Tensor, offsets: Tensor, scores: Tensor | None = None, x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row [R, I], which may be overwritten, times its entry of `scores`, and the dot products with those
    of x before, in the wide type; none without x. Both are zero from offsets[-1] on, where neither rows nor x
    are read.
    """
    if torch.is_grad_enabled():
        return _finished(rows, offsets, scores, x)
    return rows, _finish_op(rows, offsets, scores, x)


def finish_activation(
    rows: Tensor, product: Tensor, offsets: Tensor, scores: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """finish_rows with x = activate_rows(product), and the activation_grad of that, in one pass: the gradient
    of the product [R, N], the activation's result [R, I], and the dot products [R].
    """
    if torch.is_grad_enabled():
        return _finished_activation(rows, product, offsets, scores, activation)
    of_product, dots = _finish_activation_op(rows, product, offsets, scores, activation)
    return of_product, rows, dots


def activate_rows(product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    """The activation of products [R, N], in the wide type and rounded once. Differentiable."""
    return _activate_op(product, offsets, activation)


def activation_grad(grad: Tensor, product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    """Gradient of the product [R, N], from that of its activation; computed in the wide type."""
    return (_slope if torch.is_grad_enabled() else _activation_grad_op)(grad, product, offsets, activation)


def weighted_sum(product: Tensor, positions: Tensor, weights: Tensor, within: Recipe | None = None) -> Tensor:
    """As reference.weighted_sum; by a kernel, rounded to the dtype of `product`. within: the whole call."""
    if not kernel_takes(product, product.shape[1]) or positions.shape[-1] > _MAX_CHOICES:
        return reference.weighted_sum(product, positions, weights)
    out = product.new_empty(*positions.shape[:-1], product.shape[1])
    enqueue = functools.partial(_combine_kernel, product.contiguous(), positions, weights, out)
    enqueue()
    if within is not None and product.is_contiguous():
        given = {"product": product, "positions": positions, "weights": weights}
        recipe = Recipe(_WEIGHTED_SUM, given, within)
        repeat.remember(None, recipe, enqueue, [[*recipe.numbers(*given), recipe.returns(out)]])
    return out


def before_end(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, ...], with zeros for rows that belong to no expert."""
    here = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return torch.where(here.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def _gathered(x: Tensor, tokens: Tensor, offsets: Tensor, scores: Tensor | None) -> Tensor:
    rows = x.index_select(0, tokens)
    return rows if scores is None else (rows.to(scores.dtype) * scores[:, None]).to(x.dtype)


def _gather(x: Tensor, tokens: Tensor, offsets: Tensor, scores: Tensor | None) -> Tensor:
    if not kernel_takes(x, x.shape[1]):
        return _gathered(x, tokens, offsets, scores)
    out = x.new_empty(tokens.shape[0], x.shape[1])
    _gather_kernel(readable(x), tokens.to(torch.int32), offsets, scores, out)
    return out


def _in_place(rows: Tensor) -> bool:
    """Whether kernels can overwrite the rows. If so, tells autograd that they do."""
    fits = rows.is_contiguous() and rows.data_ptr() % 16 == 0 and kernel_takes(rows, rows.shape[1])
    if fits:
        torch.autograd.graph.increment_version(rows)
    return fits


def _dots(rows: Tensor, x: Tensor | None) -> Tensor:
    return rows.new_empty(0 if x is None else rows.shape[0], dtype=wide_type(rows.dtype))


def _finished(
    rows: Tensor, offsets: Tensor, scores: Tensor | None, x: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, wide = before_end(rows, offsets), wide_type(rows.dtype)
    dots = _dots(rows, None) if x is None else before_end((rows.to(wide) * x.to(wide)).sum(-1), offsets)
    if scores is not None:
        rows = (rows.to(wide) * scores[:, None]).to(rows.dtype)
    return rows, dots


def _finish(rows: Tensor, offsets: Tensor, scores: Tensor | None, x: Tensor | None) -> Tensor:
    dots = _dots(rows, x)
    if _in_place(rows):
        _finish_kernel(rows, offsets, scores, readable_if_any(x), None if x is None else dots)
        return dots
    finished, dots = _finished(rows, offsets, scores, x)
    rows.copy_(finished)
    return dots


def _finished_activation(
    rows: Tensor, product: Tensor, offsets: Tensor, scores: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = activate_rows(product, offsets, activation)
    grad, dots = _finished(rows, offsets, scores, x)
    return _slope(grad, product, offsets, activation), x, dots


def _finish_activation(
    rows: Tensor, product: Tensor, offsets: Tensor, scores: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    if not _in_place(rows):
        of_product, x, dots = _finished_activation(rows, product, offsets, scores, activation)
        rows.copy_(x)
        return of_product, dots
    of_product, dots = product.new_empty(product.shape), _dots(rows, rows)
    given = (rows, readable(product), offsets, scores)
    _finish_activation_kernel(*given, NUMBERS[activation], of_product, dots)
    return of_product, dots


def _activated_like(product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    return product.new_empty(product.shape[0], product.shape[1] // (2 if activation == "swiglu" else 1))


def _activate(product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    out = _activated_like(product, offsets, activation)
    if not kernel_takes(product, out.shape[1]):
        return out.copy_(activate(product.to(wide_type(product.dtype)), activation))
    _activate_kernel(readable(product), offsets, NUMBERS[activation], out)
    return out


def _activate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _activate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    product, offsets = ctx.saved_tensors
    return activation_grad(grad, product, offsets, ctx.activation), None, None


def _slope(grad: Tensor, product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    wide = wide_type(grad.dtype)
    g, z = grad.to(wide), product.to(wide)
    if activation == "gelu":
        result: Tensor = torch.ops.aten.gelu_backward(g, z)
    elif activation == "silu":
        result = g * silu_slope(z)
    else:
        gate, up = z.chunk(2, dim=-1)
        result = torch.cat([g * up * silu_slope(gate), g * torch.nn.functional.silu(gate)], -1)
    return result.to(grad.dtype)


def _activation_grad(grad: Tensor, product: Tensor, offsets: Tensor, activation: str) -> Tensor:
    if not kernel_takes(product, grad.shape[1]):
        return _slope(grad, product, offsets, activation)
    out = product.new_empty(product.shape)
    _activation_grad_kernel(readable(grad), readable(product), offsets, NUMBERS[activation], out)
    return out


_gather_op = implement(
    "moe_gather_rows", _gather, lambda x, tokens, *_: x.new_empty(tokens.shape[0], x.shape[1])
)
_finish_op = implement("moe_finish_rows", _finish, lambda rows, offsets, scores, x: _dots(rows, x))
_finish_activation_op = implement(
    "moe_finish_activation",
    _finish_activation,
    lambda rows, product, *_: (product.new_empty(product.shape), _dots(rows, rows)),
)
_activate_op = implement("moe_activate_rows", _activate, _activated_like)
_activation_grad_op = implement(
    "moe_activation_grad", _activation_grad, lambda grad, product, *_: product.new_empty(product.shape)
)
torch.library.register_autograd(
    "flux::moe_activate_rows", _activate_backward, setup_context=_activate_setup, lib=library
)
_combine_kernel: Any = torch.ops.flux._moe_combine.default
_gather_kernel: Any = torch.ops.flux._moe_gather_rows.default
_finish_kernel: Any = torch.ops.flux._moe_finish_rows.default
_finish_activation_kernel: Any = torch.ops.flux._moe_finish_activation.default
_activate_kernel: Any = torch.ops.flux._moe_activate_rows.default
_activation_grad_kernel: Any = torch.ops.flux._moe_activation_grad.default
