"""The two layers of flux.moe for experts whose weights are separate parameters, as Megatron's are: gradients
of weights go into main_grad if asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flux.integrations.megatron.weights import stacked
from flux.layers.weight_grads import DeferredGrads, collecting, placeholder, store_grad
from flux.moe import ag_scatter_gemm, gemm_gather_rs
from flux.moe.autograd import TENSORS, OfWeights, add_expert_grads, expert_grads, layer0_grads, layer1_grads
from flux.moe.routing import Routing
from flux.moe.rows import activate_rows
from flux.ops import autocast

Tensor = torch.Tensor


def expert_layer(
    number: int,
    x: Tensor,
    weights: Sequence[Tensor],
    routing: Routing,
    fusion: bool,
    deferred: DeferredGrads | None = None,
    activation: str | None = None,
) -> Tensor:
    """flux.moe.ag_scatter_gemm (number 0) or gemm_gather_rs (number 1) with one weight for each expert.

    Args:
        fusion: add the gradients of weights to their `main_grad`, if all have one.
        deferred: leave the gradients of weights to its `compute`.
        activation: of x, before layer 1. Its result is made again in the backward pass.
    """
    result: Tensor = _apply(number, (fusion, deferred, activation), routing, x, routing.weights, *weights)
    return result


How = tuple[bool, DeferredGrads | None, str | None]


class _Layer(torch.autograd.Function):
    # Each pass stacks the weights, and under autocast casts them. Copies are not kept: those
    # of all layers would be as large as all experts.
    @staticmethod
    def forward(
        ctx: Any, number: int, how: How, routing: Routing, x: Tensor, scores: Tensor, *weights: Tensor
    ) -> Tensor:
        fusion, deferred, ctx.activation = how
        needs = ctx.needs_input_grad[5:]
        ctx.parameters = [
            collecting(weight, fusion and needed) for weight, needed in zip(weights, needs, strict=True)
        ]
        ctx.deferred, ctx.leaves = deferred, () if deferred is None else weights
        x, weight = autocast.cast_if_enabled(x, stacked(weights))
        ctx.number, ctx.sizes = number, routing[TENSORS:]
        ctx.save_for_backward(x, *routing[: TENSORS - 1], scores, *weights)
        if ctx.activation is not None:
            x = activate_rows(x, routing.offsets, ctx.activation)
        layer = gemm_gather_rs if number else ag_scatter_gemm
        return layer(x, weight, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        routing = Routing._make([*saved[:TENSORS], *ctx.sizes])
        weight = stacked(saved[TENSORS:]).to(x.dtype)
        needs_x, needs_scores, *needs = ctx.needs_input_grad[3:]
        of_weights: OfWeights | None = partial(_of_weights, ctx.parameters) if any(needs) else None
        if of_weights is not None and ctx.deferred is not None:
            of_weights = partial(_defer, ctx.deferred, ctx.leaves, needs, of_weights)
        of_scores: Tensor | None = None
        if ctx.number:
            of_x, made, of_scores = layer1_grads(
                grad, x, weight, routing, needs_x, needs_scores, of_weights, ctx.activation
            )
        else:
            of_x, made = layer0_grads(
                grad, x if of_weights else None, weight, routing, None, needs_x, of_weights
            )
        return None, None, None, of_x, of_scores, *(made or [None] * len(needs))


_apply: Any = _Layer.apply


def _defer(
    deferred: DeferredGrads,
    leaves: Sequence[Tensor],
    needs: Sequence[bool],
    of_weights: OfWeights,
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
) -> list[None]:
    def compute() -> None:
        for leaf, needed, made in zip(leaves, needs, of_weights(grad, x, offsets), strict=True):
            if needed:
                store_grad(leaf, made)

    deferred.defer(compute)
    return [None] * len(leaves)


def _of_weights(
    parameters: Sequence[Tensor | None], grad: Tensor, x: Tensor, offsets: Tensor
) -> list[Tensor | None]:
    """What autograd gets for each weight."""
    collecting = [parameter for parameter in parameters if parameter is not None]
    if len(collecting) < len(parameters):
        return list(expert_grads(grad, x, offsets).unbind())
    add_expert_grads(grad, x, offsets, [parameter.main_grad for parameter in collecting])  # type: ignore[attr-defined]
    return [placeholder(parameter, x.dtype) for parameter in collecting]
