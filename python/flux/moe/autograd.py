"""Backward passes of the expert layers, by the operators themselves, of the sum of all ranks' losses: that
of layer 0's tokens is a layer 1 without weights, that of layer 1's rows a layer 0 of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from flux._memory import padded, wide_type
from flux.calls.schemas import library
from flux.moe.ag_scatter_gemm import ag_scatter_gemm
from flux.moe.gemm_gather_rs import gemm_gather_rs
from flux.moe.routing import TENSORS, Routing, tokens_of_rows
from flux.moe.rows import activation_grad, finish_activation, finish_rows, gather_rows
from flux.ops.all_gather import all_gather
from flux.ops.autograd import no_scales, none_for_rest
from flux.ops.grouped_gemm import grouped_gemm
from flux.ops.reduce_scatter import reduce_scatter
from flux.ops.wgrad import expert_grads

Tensor = torch.Tensor
# Of gradients and inputs of all rows, and the offsets: what autograd gets for the weights.
OfWeights = Callable[[Tensor, Tensor, Tensor], Any]
TokensOf = Callable[[Routing], Tensor]


def gathered(x: Tensor, routing: Routing, tokens_of: TokensOf = tokens_of_rows) -> tuple[Tensor, Tensor]:
    """The tokens of all ranks [p * max_tokens, ...], and the index of each row's token, int32."""
    limit = routing.max_tokens
    tokens = tokens_of(routing) if limit else routing.rows
    return all_gather(padded(x, limit), group=routing.group_name), tokens


def _save(ctx: Any, x: Tensor, weight: Tensor, again: Any, *rest: Tensor | None) -> None:
    """again: whether the backward pass computes the product once more."""
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    kept = x if needs_weight or again else None, weight if needs_x or again else None
    ctx.save_for_backward(*kept, *rest)


def _grouped_gemm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, rows, ctx.activation, scale_x, *_ = inputs
    no_scales("grouped_gemm", scale_x)
    ctx.tokens = x.shape[0]
    # The product before the activation is not saved, but recomputed in the backward pass.
    _save(ctx, x, weight, ctx.activation is not None, offsets, rows)


def _grouped_gemm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets, rows = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    if ctx.activation is not None:
        product = grouped_gemm(x, weight, offsets, rows=rows)
        grad = activation_grad(grad, product, offsets, ctx.activation)
    rows = None if rows is None else rows.clamp(min=0)
    grad_x = None
    if needs_x:
        grad_x, _ = finish_rows(grouped_gemm(grad, weight.transpose(1, 2), offsets), offsets)
        if rows is not None:
            sums = grad_x.new_zeros(ctx.tokens, grad_x.shape[1], dtype=wide_type(grad.dtype))
            grad_x = sums.index_add(0, rows, grad_x.to(sums.dtype)).to(grad.dtype)
    grad_weight = None
    if needs_weight:
        grad_weight = expert_grads(grad, x if rows is None else gather_rows(x, rows, offsets), offsets)
    return none_for_rest(ctx, grad_x, grad_weight)


def _layer_setup(number: int, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, routing, *sizes, ctx.activation, group_name, scale_x = inputs[:10]
    no_scales(("moe.ag_scatter_gemm", "moe.gemm_gather_rs")[number], scale_x)
    ctx.sizes = (*sizes, group_name)
    # Here needs_input_grad has one entry for each tensor; in backward, entries are nested like the arguments.
    again = ctx.needs_input_grad[1 + TENSORS] if number else ctx.activation is not None
    _save(ctx, x, weight, again, *routing)


def _layer_backward(number: int, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, *tensors = ctx.saved_tensors
    routing = Routing._make([*tensors, *ctx.sizes])
    needs_x, needs_weight, needs_routing = ctx.needs_input_grad[:3]
    wanted = Wanted(needs_x, needs_routing[-1], expert_grads if needs_weight else None)
    given, of_scores = (grad, x, weight, routing, wanted), None
    if number == 0:
        of_x, of_weight = layer0_grads(*given, ctx.activation)
    else:
        of_x, of_weight, of_scores = layer1_grads(*given)
    return none_for_rest(ctx, of_x, of_weight, [*[None] * (TENSORS - 1), of_scores])


class Wanted(NamedTuple):
    x: bool
    scores: bool  # of the routing's weights
    of_weights: OfWeights | None  # what makes those of the experts' weights
    tokens_of: TokensOf = tokens_of_rows  # or what gives the same for less


def layer0_grads(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    routing: Routing,
    wanted: Wanted,
    activation: str | None = None,
    distinct: bool = False,
) -> tuple[Tensor | None, Any]:
    """Gradients of ag_scatter_gemm. x, weight: if needed. distinct: no token chose an expert twice."""
    grad_x = grad_weight = None
    if x is not None:
        everybody, tokens = gathered(x, routing, wanted.tokens_of)
        if activation is not None and weight is not None:
            product = grouped_gemm(everybody, weight, routing.offsets, rows=tokens)
            grad = activation_grad(grad, product, routing.offsets, activation)
        if wanted.of_weights is not None:
            rows = gather_rows(everybody, tokens, routing.offsets)
            grad_weight = wanted.of_weights(grad, rows, routing.offsets)
    if wanted.x and weight is not None:
        positions = routing.positions
        if distinct:  # one launch instead of five
            ones = torch.ones_like(positions, dtype=torch.float32)
        else:  # a row counts once, even if its token chose the expert twice
            ones = (~(positions[..., None] == positions[..., None, :]).tril(-1).any(-1)).float()
        grad_x = gemm_gather_rs(grad, weight.transpose(1, 2), routing._replace(weights=ones))
    return grad_x, grad_weight


def layer1_grads(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    routing: Routing,
    wanted: Wanted,
    activation: str | None = None,
) -> tuple[Tensor | None, Any, Tensor | None]:
    """As layer0_grads, for gemm_gather_rs, and the gradient of the routing's weights. With an activation, x
    is the product in front of it, and the first result the gradient of that.
    """
    offsets, of_weights, count = routing.offsets, wanted.of_weights, routing.rows.shape[0]
    # The row of each choice; for those without one here, -1 in `positions`, an entry behind the last.
    choices = routing.positions.remainder(count + 1).reshape(-1)
    weights = routing.weights.reshape(-1).to(wide_type(grad.dtype))
    scores = weights.new_zeros(count + 1).index_add_(0, choices, weights)[:-1]
    grad_x = grad_weight = grad_scores = None
    if of_weights is not None:
        everybody, tokens = gathered(grad, routing, wanted.tokens_of)
        if activation is None:
            scaled = gather_rows(everybody, tokens, offsets, scores)
            grad_weight = of_weights(scaled, x, offsets)  # type: ignore[arg-type]
    if weight is not None:
        flipped = weight.transpose(1, 2)
        if of_weights is not None:  # the gradients of all ranks have already been gathered
            back = grouped_gemm(everybody, flipped, offsets, rows=tokens)
        else:
            back = ag_scatter_gemm(grad, flipped, routing)
        # Dot product of a row's result with the gradient of its token, without recomputing the result.
        if activation is None or x is None:
            grad_x, dots = finish_rows(back, offsets, scores, x if wanted.scores else None)
        else:
            grad_x, x, dots = finish_activation(back, x, offsets, scores, activation)
            if of_weights is not None:
                grad_weight = of_weights(gather_rows(everybody, tokens, offsets, scores), x, offsets)
        if x is not None and wanted.scores:
            # Choices without a row here get the zero behind the last row.
            of_choices = torch.nn.functional.pad(dots, (0, 1)).index_select(0, choices)
            grad_scores = of_choices.view(routing.positions.shape).to(routing.weights.dtype)
    return grad_x if wanted.x else None, grad_weight, grad_scores


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    topk_weights, ctx.group_name = inputs[1], inputs[5]
    ctx.tokens, ctx.dtype = topk_weights.shape[0], topk_weights.dtype
    ctx.set_materialize_grads(False)


def _route_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    given = ctx.group_name, ctx.tokens, ctx.dtype
    return none_for_rest(ctx, None, None if grads[-1] is None else own_scores_grad(grads[-1], *given))


def own_scores_grad(of_all: Tensor, group_name: str, tokens: int, dtype: torch.dtype) -> Tensor:
    """Gradient of this rank's routing weights, from what each rank finds for all [p, max_tokens, k]."""
    return reduce_scatter(of_all.flatten(0, 1), group=group_name)[:tokens].to(dtype)


def _expert_grads_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, x, offsets = ctx.saved_tensors
    of_rows = grouped_gemm(x, grad, offsets)
    of_x = grouped_gemm(grad_output, grad.transpose(1, 2), offsets)
    return finish_rows(of_rows, offsets)[0], finish_rows(of_x, offsets)[0], None


for _name, _setup, _backward in (
    ("grouped_gemm", _grouped_gemm_setup, _grouped_gemm_backward),
    ("grouped_wgrad", lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _expert_grads_backward),
    ("moe_route", _route_setup, _route_backward),
    ("moe_ag_scatter_gemm", partial(_layer_setup, 0), partial(_layer_backward, 0)),
    ("moe_gemm_gather_rs", partial(_layer_setup, 1), partial(_layer_backward, 1)),
):
    torch.library.register_autograd(f"flux::{_name}", _backward, setup_context=_setup, lib=library)
