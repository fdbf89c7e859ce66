"""The two layers of flux.moe for experts whose weights are separate parameters, as Megatron's are: gradients
of weights go into main_grad if asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flux._memory import padded
from flux.integrations.megatron.weights import as_one, stacked
from flux.layers.weight_grads import DeferredGrads, placeholder, store_grad
from flux.moe import ag_scatter_gemm, gemm_gather_rs
from flux.moe.autograd import (
    TENSORS,
    OfWeights,
    TokensOf,
    layer0_grads,
    layer1_grads,
    own_scores_grad,
)
from flux.moe.routing import Routing, tokens_of_rows
from flux.moe.rows import activate_rows
from flux.ops import autocast
from flux.ops.all_gather import all_gather
from flux.ops.grouped_wgrad import add_expert_grads, expert_grads, uses_kernel

Tensor = torch.Tensor
# Up to so many elements of an expert, torch adds the main_grads of all experts by one launch: a GPU adds as
# many in about the time in which the host makes a launch. Tensors without gaps are added faster.
_ADDED_AT_ONCE = 1 << 22


class SharedTokens:
    """`tokens_of_rows` of a routing for both backward passes of a call. That of layer 1 comes first and makes
    them, and that of layer 0 takes them away: nothing keeps them longer.
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None

    def keep(self, routing: Routing) -> Tensor:
        if self._tokens is None:
            self._tokens = tokens_of_rows(routing)
        return self._tokens

    def take(self, routing: Routing) -> Tensor:
        tokens, self._tokens = self._tokens, None
        return tokens_of_rows(routing) if tokens is None else tokens


def expert_layer(
    number: int,
    x: Tensor,
    weights: Sequence[Tensor],
    routing: Routing,
    fusion: bool,
    deferred: DeferredGrads | None = None,
    activation: str | None = None,
    scores: Tensor | None = None,
    tokens: SharedTokens | None = None,
) -> Tensor:
    """flux.moe.ag_scatter_gemm (number 0) or gemm_gather_rs (number 1) with one weight for each expert.
    The gradients are those of tokens that choose an expert once only, as with Megatron's routing maps.

    Args:
        fusion: add the gradients of weights to their `main_grad`, if all have one.
        deferred: leave the gradients of weights to its `compute`.
        activation: of x, before layer 1. Its result is made again in the backward pass.
        scores: of layer 1: the routing weights [tokens, k] that this rank gave `route`, which get a gradient.
            So `route` itself need not be recorded, which takes the host longer than the call.
        tokens: the same for both layers of a call.
    """
    shared = SharedTokens() if tokens is None else tokens
    how = (fusion, deferred, activation, shared.keep if number else shared.take)
    result: Tensor = _apply(number, how, routing, x, scores, *weights)
    return result


How = tuple[bool, DeferredGrads | None, str | None, TokensOf]


class _Layer(torch.autograd.Function):
    # Each pass stacks the weights, and under autocast casts them. Copies are not kept: those
    # of all layers would be as large as all experts.
    @staticmethod
    def forward(
        ctx: Any, number: int, how: How, routing: Routing, x: Tensor, scores: Tensor | None, *weights: Tensor
    ) -> Tensor:
        fusion, deferred, ctx.activation, ctx.tokens_of = how
        needs = ctx.needs_input_grad[5:]
        # Only if all collect: one product has the gradients of all.
        collect = fusion and all(needs) and all(getattr(w, "main_grad", None) is not None for w in weights)
        ctx.collecting, ctx.deferred = weights if collect else (), deferred
        ctx.leaves = () if deferred is None else weights
        weight, ctx.places = stacked(weights)
        x, weight = autocast.cast_if_enabled(x, weight)
        ctx.number, ctx.sizes = number, routing[TENSORS:]
        ctx.save_for_backward(x, *routing[:TENSORS], scores, *weights)
        if ctx.activation is not None:
            x = activate_rows(x, routing.offsets, ctx.activation)
        layer = gemm_gather_rs if number else ag_scatter_gemm
        return layer(x, weight, routing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        routing = Routing._make([*saved[:TENSORS], *ctx.sizes])
        scores, weights = saved[TENSORS], saved[TENSORS + 1 :]
        weight = stacked(weights, ctx.places)[0].to(x.dtype)
        needs_x, needs_scores, *needs = ctx.needs_input_grad[3:]
        if needs_scores and torch.is_grad_enabled():
            routing = routing._replace(weights=_of_all_ranks(scores, routing))
        of_weights: OfWeights | None = partial(_of_weights, ctx.collecting) if any(needs) else None
        if of_weights is not None and ctx.deferred is not None:
            of_weights = partial(_defer, ctx.deferred, ctx.leaves, needs, of_weights)
        of_scores: Tensor | None = None
        if ctx.number:
            of_x, made, of_all = layer1_grads(
                grad, x, weight, routing, needs_x, needs_scores, of_weights, ctx.activation, ctx.tokens_of
            )
            if of_all is not None:
                of_scores = own_scores_grad(of_all, routing.group_name, routing.num_tokens, scores.dtype)
        else:
            given = x if of_weights else None
            of_x, made = layer0_grads(
                grad,
                given,
                weight,
                routing,
                None,
                needs_x,
                of_weights,
                distinct=True,
                tokens_of=ctx.tokens_of,
            )
        return None, None, None, of_x, of_scores, *(made or [None] * len(needs))


_apply: Any = _Layer.apply


def _of_all_ranks(scores: Tensor, routing: Routing) -> Tensor:
    """A routing's weights as a function of this rank's, for gradients of gradients."""
    rows = padded(scores.float(), routing.max_tokens)
    return all_gather(rows, group=routing.group_name).view(routing.weights.shape)


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
    collecting: Sequence[Any], grad: Tensor, x: Tensor, offsets: Tensor
) -> Sequence[Tensor | None]:
    """What autograd gets for each weight. collecting: all weights, if their gradients go into main_grad."""
    if not collecting:
        return expert_grads(grad, x, offsets).unbind()  # type: ignore[no-any-return]
    main_grads = [weight.main_grad for weight in collecting]
    whole = as_one(main_grads)
    if whole is not None and main_grads[0].numel() > _ADDED_AT_ONCE and not uses_kernel(grad, x, whole):
        whole = None
    add_expert_grads(grad, x, offsets, main_grads if whole is None else whole)
    return _placeholders(collecting, x.dtype)


def _placeholders(weights: Sequence[Any], dtype: torch.dtype) -> Sequence[Tensor | None]:
    """`placeholder` of each weight."""
    if any(not hasattr(w, "grad_added_to_main_grad") or getattr(w, "zero_out_wgrad", False) for w in weights):
        return [placeholder(weight, dtype) for weight in weights]
    for weight in weights:
        weight.grad_added_to_main_grad = True
    # Nobody reads them, so all have the same memory, as Megatron's own.
    one = torch.empty_like(weights[0], dtype=dtype, requires_grad=False)
    return one.expand(len(weights), *one.shape).unbind()
