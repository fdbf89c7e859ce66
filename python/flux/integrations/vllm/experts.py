"""The experts of a layer as vLLM has them under tensor parallelism: every rank has all tokens, and of each
expert a part. Needs nothing of vLLM.

Arguments of all functions:
    x: [tokens, H].
    topk_ids, topk_weights: int32 or int64, and floating [tokens, k].
    w13, w2: [E, 2 * I/p, H], for each expert this rank's gate rows, then its up rows; and [E, H, I/p].
    scales: of w13 and w2 in fp8, for blocks of 128 by 128. Rows are quantised in front of both GEMMs.

Results are fresh tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

import flux
from flux.ops.all_gather import awaited

P = ParamSpec("P")
Tensor = torch.Tensor
Scales = tuple[Tensor, Tensor]


def _without_gradients(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """As torch.no_grad(), which takes longer to enter than to look whether that is needed."""
    within: Callable[P, Tensor] = torch.no_grad()(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **others: P.kwargs) -> Tensor:
        return (within if torch.is_grad_enabled() else function)(*arguments, **others)

    return call


@_without_gradients
def summed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    group_name: str,
    rank: int,
    world_size: int,
    scales: Scales | None = None,
) -> Tensor:
    """For each token the weighted sum of its experts' results, over all ranks. A collective.

    Each rank is the owner of an equal share of the tokens: it sums them up and tells the others. Where the
    ranks do not divide the tokens, the last shares also have rows without a token, which choose no expert.
    x, ids and weights are the same on all ranks.
    """
    tokens = x.shape[0]
    share = -(-tokens // world_size)
    own = slice(rank * share, (rank + 1) * share)
    # Shares are consecutive like the tokens, so the routing's rows are indices in x.
    total = own_experts(x, topk_ids[own], topk_weights[own], w13, w2, group_name, scales, share)
    # The next kernel reads these rows, so nothing hides the gather.
    everything = awaited(total, group_name)
    return everything if share * world_size == tokens else everything[:tokens]


@_without_gradients
def experts_of_own_rows(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    group_name: str,
    slices: int = 1,
    scales: Scales | None = None,
) -> Tensor:
    """summed_experts where each rank has a part of the tokens, all parts equally large. A collective.

    Args:
        w13, w2: with `slices` [E/p, 2 * I, H] and [E/p, H, I].
        slices: p if ranks have whole experts, the first rank the first ones; else 1.
    """
    routing = flux.moe.route(topk_ids, topk_weights, slices * w13.shape[0], group=group_name, ep_size=slices)
    first, second = scales or (None, None)
    rows, how = _quantised(x, first)
    hidden = flux.moe.ag_scatter_gemm(rows, w13, routing, activation="swiglu", **how)
    hidden, how = _quantised(hidden, second)
    return flux.moe.gemm_gather_rs(hidden, w2, routing, **how)


@_without_gradients
def own_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    group_name: str,
    scales: Scales | None = None,
    share: int | None = None,
) -> Tensor:
    """For each token the weighted sum of what the experts of a group's ranks give. With a group of this rank
    alone nothing is exchanged, because every rank knows the experts of all tokens; the sum over ranks is left
    to the layer.

    Args:
        x: of all ranks of the group.
        topk_ids, topk_weights, w13, w2: or of some whole experts, with ids among them, and -1 for those that
            other ranks have.
        share: rows of the result, those after the last token are zeros. None: as many as there are tokens, on
            all ranks.
    """
    routing = flux.moe.route(topk_ids, topk_weights, w13.shape[0], group=group_name, max_tokens=share)
    if share is not None and routing.num_tokens != share:
        routing = routing._replace(num_tokens=share)
    first, second = scales or (None, None)
    rows, how = _quantised(x, first)
    hidden = flux.grouped_gemm(rows, w13, routing.offsets, rows=routing.rows, activation="swiglu", **how)
    hidden, how = _quantised(hidden, second)
    return flux.moe.gemm_gather_rs(hidden, w2, routing, **how)


def _quantised(x: Tensor, scale_w: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """Rows for a weight with such scales, and the further arguments of its GEMM."""
    if scale_w is None:
        return x, {}
    q, scale_x = flux.quantize(x, "group128")
    return q, {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": x.dtype}
