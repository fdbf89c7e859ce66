"""The experts of a layer as vLLM has them under tensor parallelism: every rank has all tokens, and of each
expert a part. Needs nothing of vLLM.
"""

from __future__ import annotations

import torch

import flux


def summed_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    group_name: str,
    rank: int,
    world_size: int,
) -> torch.Tensor:
    """For each token the weighted sum of its experts' results, over all ranks. A collective.

    Each rank is the owner of an equal share of the tokens: it sums them up and tells the others. Where the
    ranks do not divide the tokens, the last shares are filled up with tokens that choose no expert.

    Args:
        x: [tokens, H], the same on all ranks.
        topk_ids: int32 or int64 [tokens, k], the same on all ranks.
        topk_weights: floating [tokens, k], the same on all ranks.
        w13: [E, 2 * I/p, H], for each expert this rank's gate rows, then its up rows.
        w2: [E, H, I/p].
        group_name, rank, world_size: of torch's process group, this rank in it, and p.

    Returns:
        [tokens, H], a fresh tensor.
    """
    tokens = x.shape[0]
    share = -(-tokens // world_size)
    missing = share * world_size - tokens
    if missing:
        topk_ids = torch.nn.functional.pad(topk_ids, (0, 0, 0, missing), value=-1)
        topk_weights = torch.nn.functional.pad(topk_weights, (0, 0, 0, missing))
    own = slice(rank * share, (rank + 1) * share)
    with torch.no_grad():
        routing = flux.moe.route(topk_ids[own], topk_weights[own], w13.shape[0], group=group_name)
        # Shares are consecutive like the tokens, so routing.rows are indices in x.
        hidden = flux.grouped_gemm(x, w13, routing.offsets, rows=routing.rows, activation="swiglu")
        total = flux.moe.gemm_gather_rs(hidden, w2, routing)
        return flux.all_gather(total, group=group_name)[:tokens]
