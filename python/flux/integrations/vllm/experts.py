"""The experts of a layer as vLLM has them under tensor parallelism: every rank has all tokens, and of each
expert a part. Needs nothing of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

import flux
from flux.ops.all_gather import awaited

P = ParamSpec("P")
Scales = tuple[torch.Tensor, torch.Tensor]


def _without_gradients(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """The function in torch's no_grad, which takes longer to enter than to look whether that is needed."""

    @functools.wraps(function)
    def call(*arguments: P.args, **others: P.kwargs) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return function(*arguments, **others)
        with torch.no_grad():
            return function(*arguments, **others)

    return call


@_without_gradients
def summed_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    group_name: str,
    rank: int,
    world_size: int,
    scales: Scales | None = None,
) -> torch.Tensor:
    """For each token the weighted sum of its experts' results, over all ranks. A collective.

    Each rank is the owner of an equal share of the tokens: it sums them up and tells the others. Where the
    ranks do not divide the tokens, the last shares also have rows without a token, which choose no expert.

    Args:
        x: [tokens, H], the same on all ranks.
        topk_ids: int32 or int64 [tokens, k], the same on all ranks.
        topk_weights: floating [tokens, k], the same on all ranks.
        w13: [E, 2 * I/p, H], for each expert this rank's gate rows, then its up rows.
        w2: [E, H, I/p].
        group_name, rank, world_size: of torch's process group, this rank in it, and p.
        scales: of w13 and w2 in fp8, for blocks of 128 by 128. Rows are quantised in front of both GEMMs.

    Returns:
        [tokens, H], a fresh tensor.
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
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    group_name: str,
    slices: int = 1,
    scales: Scales | None = None,
) -> torch.Tensor:
    """summed_experts where each rank has a part of the tokens, all parts equally large. A collective.

    Args:
        x, topk_ids, topk_weights: of this rank's tokens.
        w13, w2: as of summed_experts; with `slices` [E/p, 2 * I, H] and [E/p, H, I].
        slices: p if ranks have whole experts, the first rank the first ones; else 1.
        scales: as of summed_experts.

    Returns:
        [tokens, H], a fresh tensor.
    """
    routing = flux.moe.route(topk_ids, topk_weights, slices * w13.shape[0], group=group_name, ep_size=slices)
    first, second = scales or (None, None)
    rows, how = _quantised(x, first)
    hidden = flux.moe.ag_scatter_gemm(rows, w13, routing, activation="swiglu", **how)
    hidden, how = _quantised(hidden, second)
    return flux.moe.gemm_gather_rs(hidden, w2, routing, **how)


@_without_gradients
def own_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    group_name: str,
    scales: Scales | None = None,
    share: int | None = None,
) -> torch.Tensor:
    """For each token the weighted sum of what the experts of a group's ranks give. With a group of this rank
    alone nothing is exchanged, because every rank knows the experts of all tokens; the sum over ranks is left
    to the layer.

    Args:
        x: of all ranks of the group.
        topk_ids, topk_weights, w13, w2, scales: as of summed_experts; or of some whole experts, with ids
            among them, and -1 for those that other ranks have.
        share: rows of the result, those after the last token are zeros. None: as many as there are tokens, on
            all ranks.

    Returns:
        [tokens, H] or [share, H], a fresh tensor.
    """
    routing = flux.moe.route(topk_ids, topk_weights, w13.shape[0], group=group_name, max_tokens=share)
    if share is not None and routing.num_tokens != share:
        routing = routing._replace(num_tokens=share)
    first, second = scales or (None, None)
    rows, how = _quantised(x, first)
    hidden = flux.grouped_gemm(rows, w13, routing.offsets, rows=routing.rows, activation="swiglu", **how)
    hidden, how = _quantised(hidden, second)
    return flux.moe.gemm_gather_rs(hidden, w2, routing, **how)


def _quantised(x: torch.Tensor, scale_w: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows for a weight with such scales, and the further arguments of its GEMM."""
    if scale_w is None:
        return x, {}
    q, scale_x = flux.quantize(x, "group128")
    return q, {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": x.dtype}
