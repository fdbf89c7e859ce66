"""The two layers of flux.moe for experts whose weights are separate parameters, as Megatron's are: gradients
of weights go into main_grad if asked for, and weights that lie so in memory are read as one tensor.

Megatron's distributed optimizer moves all parameters into one buffer, in reverse order of registration: the
last expert's fc2, its fc1, then those of the expert before. So the experts of a layer are listed in reverse
here, and weights of one kind follow each other at a positive distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from flux._log import say_once
from flux._memory import padded
from flux.calls import transforms
from flux.layers.weight_grads import DeferredGrads, placeholder, store_grad
from flux.moe import ag_scatter_gemm, gemm_gather_rs
from flux.moe.autograd import OfWeights, TokensOf, Wanted, layer0_grads, layer1_grads, own_scores_grad
from flux.moe.routing import TENSORS, Routing, tokens_of_rows
from flux.moe.rows import activate_rows
from flux.ops.all_gather import all_gather
from flux.ops.wgrad import add_expert_grads, expert_grads, uses_kernel

Tensor = torch.Tensor
# Up to so many elements of an expert, torch adds the main_grads of all experts by one launch: a GPU adds as
# many in about the time in which the host makes a launch. Tensors without gaps are added faster.
_ADDED_AT_ONCE = 1 << 22
_ALIGNMENT = 16  # bytes: what TMA needs of an address, and of the distance of two experts
_PLAIN = {torch.Tensor, torch.nn.Parameter}


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
        x, weight = transforms.cast_if_enabled(x, weight)
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
            rows = padded(scores.float(), routing.max_tokens)
            everywhere = all_gather(rows, group=routing.group_name)  # a function of this rank's
            routing = routing._replace(weights=everywhere.view(routing.weights.shape))
        of_weights: OfWeights | None = partial(_of_weights, ctx.collecting) if any(needs) else None
        if of_weights is not None and ctx.deferred is not None:
            of_weights = partial(_defer, ctx.deferred, ctx.leaves, needs, of_weights)
        wanted = Wanted(needs_x, needs_scores, of_weights, ctx.tokens_of)
        of_scores: Tensor | None = None
        if ctx.number:
            of_x, made, of_all = layer1_grads(grad, x, weight, routing, wanted, ctx.activation)
            if of_all is not None:
                of_scores = own_scores_grad(of_all, routing.group_name, routing.num_tokens, scores.dtype)
        else:
            given = x if of_weights else None
            of_x, made = layer0_grads(grad, given, weight, routing, wanted, distinct=True)
        return None, None, None, of_x, of_scores, *(made or [None] * len(needs))


_apply: Any = _Layer.apply


def _defer(
    deferred: DeferredGrads,
    leaves: Sequence[Tensor],
    needs: Sequence[bool],
    of_weights: OfWeights,
    *operands: Tensor,
) -> list[None]:
    def compute() -> None:
        for leaf, needed, made in zip(leaves, needs, of_weights(*operands), strict=True):
            if needed:
                store_grad(leaf, made)

    deferred.defer(compute)
    return [None] * len(leaves)


def _of_weights(
    collecting: Sequence[Any], grad: Tensor, x: Tensor, offsets: Tensor
) -> Sequence[Tensor | None]:
    """What autograd gets for each weight. collecting: all weights, if their gradients go into main_grad."""
    if not collecting:
        return expert_grads(grad, x, offsets).unbind()
    main_grads = [weight.main_grad for weight in collecting]
    places = _places(main_grads)
    whole = None if places is None else _whole(main_grads, places)
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


class Places(NamedTuple):
    """Where weights lie that a view reads as one tensor."""

    addresses: list[int]
    distance: int  # elements from each weight to the next one


def stacked(weights: Sequence[Tensor], before: Places | None = None) -> tuple[Tensor, Places | None]:
    """The weights [E, N, K] of E experts, each [N, K], and where they lie: a view if they lie at equal
    distances, else a copy and None.

    Never a view where gradients of the result are recorded, for those would reach the first weight only.

    Args:
        before: the second result for these weights in the forward pass. If they are at the same addresses
            still, nothing else about them is looked at.
    """
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return torch.stack(list(weights)), None
    compiling = torch.compiler.is_compiling()
    same = before is not None and not compiling and _addresses(weights) == before.addresses
    places = before if same else _places(weights)
    if places is None:
        if not compiling:
            say_once("weights of a layer's experts do not lie at equal distances: each pass copies them")
        return torch.stack(list(weights)), None
    return _whole(weights, places), places


def _whole(tensors: Sequence[Tensor], places: Places) -> Tensor:
    first = tensors[0]
    return first.as_strided((len(tensors), *first.shape), (places.distance, first.shape[1], 1))


def lay_out(weights: Sequence[Tensor]) -> None:
    """Moves the weights of E experts into one new tensor, in their order; each becomes a part of it.

    Parameters stay the same objects, with the same values. While it runs, memory holds the weights twice.
    Leaves weights alone that lie at equal distances already, that share memory with other tensors, such as
    those in a buffer of Megatron's data parallelism, and those without memory (meta).
    """
    if len(weights) < 2 or _places(weights) is not None or not _may_move(weights):
        return
    first = weights[0]
    with torch.no_grad():
        whole = first.new_empty(len(weights), *first.shape, requires_grad=False)
        for weight, place in zip(weights, whole, strict=True):
            place.copy_(weight)
            weight.data = place


def _addresses(weights: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, weights))


def _places(weights: Sequence[Tensor]) -> Places | None:
    """Where the weights lie, if their distances are the same everywhere, and kernels can read them."""
    if torch.compiler.is_compiling() or not _alike(weights):
        return None
    first, size, addresses = weights[0], weights[0].numel(), _addresses(weights)
    if len(weights) == 1 or size == 0:
        return Places(addresses, size)
    width = first.element_size()
    start, step = addresses[0], addresses[1] - addresses[0]
    if start % _ALIGNMENT or step % _ALIGNMENT or step < size * width:
        return None
    end = start + len(weights) * step
    if addresses != list(range(start, end, step)):
        return None
    storage = first.untyped_storage()
    last = storage.data_ptr() + storage.nbytes() - size * width
    return Places(addresses, step // width) if addresses[-1] <= last else None


def _alike(weights: Sequence[Tensor]) -> bool:
    """Whether they are ordinary contiguous tensors, with memory, of one shape and dtype."""
    # By sets and maps: a layer may have a hundred experts, and these run in each pass.
    return (
        set(map(type, weights)) <= _PLAIN
        and len({weight.dtype for weight in weights}) == 1
        and len({weight.shape for weight in weights}) == 1
        and all(map(Tensor.is_contiguous, weights))
        and not weights[0].is_meta
    )


def _may_move(weights: Sequence[Tensor]) -> bool:
    """Whether each weight is alone in its memory, and may get another one."""

    def is_alone(weight: Tensor) -> bool:
        storage = weight.untyped_storage()
        own = storage.nbytes() == weight.numel() * weight.element_size()
        shared = weight.device.type == "cpu" and storage.is_shared()  # by processes; CUDA's always say so
        return own and not shared and not weight.is_inference()

    if not _alike(weights) or torch.is_inference_mode_enabled():
        return False
    apart = len({weight.data_ptr() for weight in weights}) == len(weights)
    on_one_device = len({weight.device for weight in weights}) == 1
    return apart and on_one_device and all(map(is_alone, weights))
