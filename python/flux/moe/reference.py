"""Mixture of experts with torch only; but for `moe_mlp`, nothing synchronises with a GPU."""

from __future__ import annotations

from typing import Any

import torch

from flux import _native
from flux._memory import wide_type
from flux.ops.grouped_gemm import activate

__all__ = ["moe_mlp"]

Tensor = torch.Tensor
GROUP_M = 16  # csrc/moe/plan.h: kGroupM


def moe_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str | None = "swiglu",
) -> Tensor:
    """The whole layer on one rank that holds all experts.

    Accumulated in fp32 (fp64 for fp64) throughout, and rounded once. No collective.

    Args:
        x: [T, H], floating.
        topk_ids: int32 or int64 [T, k], the experts of each token.
        topk_weights: floating [T, k].
        w1: [E, N, H], dtype and device of x.
        w2: [E, H, I], dtype and device of x; I is N, for "swiglu" N/2.
        activation: "swiglu", "silu", "gelu" or None.

    Returns:
        [T, H] in x's dtype.

    Example::

        from flux.moe.reference import moe_mlp

        x, w1, w2 = torch.randn(3, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 16)
        topk_ids, topk_weights = torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.full((3, 2), 0.5)
        assert moe_mlp(x, topk_ids, topk_weights, w1, w2).shape == (3, 64)
    """
    wide = wide_type(x.dtype)
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=wide, device=x.device)
    for expert in range(w1.shape[0]):
        tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
        hidden = activate(x[tokens].to(wide) @ w1[expert].to(wide).t(), activation)
        result = hidden @ w2[expert].to(wide).t()
        out.index_add_(0, tokens, result * topk_weights[tokens, choice].to(wide)[:, None])
    return out.to(x.dtype)


def routing_tensors(layout: Any, block_m: int, ids: Tensor) -> list[Tensor]:
    """A routing's tensors but weights, of a MoeLayout and what all ranks' tokens chose [p, max_tokens, k]."""
    p, limit, k = ids.shape
    device, rank, experts = ids.device, layout.rank, layout.local_experts
    ids = ids.long()
    local = ids - layout.slice_of(rank) * experts
    here = (local >= 0) & (local < experts)
    # Which tokens need which of this rank's experts, with sources in the order of their steps. This
    # permutation is its own inverse. It is computed on the device, to avoid a copy from the host.
    sources = torch.arange(p, device=device)
    order = (rank - sources) % p
    needs = torch.zeros(p, limit, experts + 1, dtype=torch.bool, device=device)
    needs = needs.scatter_(2, torch.where(here, local, experts), True)[..., :experts]
    by_expert = needs[order].permute(2, 0, 1)
    rank_of = by_expert.reshape(-1).cumsum(0).view(experts, p, limit) - 1
    row_of = rank_of.permute(1, 2, 0)[order]
    counts = by_expert.sum(2)
    offsets = torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0))
    positions = torch.where(here, row_of.gather(2, local.clamp(0, experts - 1)), -1)

    needed = needs.any(2)
    compact = (sources != rank) & (layout.ep_size > 1)
    slots, incoming, received = _number_tokens(needed, compact)
    first = sources[:, None] * limit
    rows = torch.full((layout.max_rows + 1,), -1, device=device)
    # Pairs without a row are scattered to one extra entry, which is dropped.
    target = torch.where(needs, row_of, layout.max_rows)
    rows[target] = (first + slots)[..., None].expand(target.shape)

    slices = torch.arange(layout.ep_size, device=device)[:, None, None]
    own = ids[rank]
    wanted = own // experts == slices  # of no slice if it is not routed
    compact = torch.full_like(slices[:, 0, 0], layout.ep_size > 1, dtype=torch.bool)
    sent, _, _ = _number_tokens(wanted.any(2), compact)
    firsts = torch.where(wanted, own % experts, experts).amin(2)
    firsts = torch.where(firsts < experts, firsts, -1)
    tiles, num_tiles = _schedule(layout, block_m, counts)
    tensors = [offsets, counts, rows[:-1], positions, incoming, received, sent, firsts]
    return [tensor.int().contiguous() for tensor in (*tensors, tiles, num_tiles)]


def _number_tokens(needed: Tensor, compact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slot row of each token [n, tokens], token of each slot row, and the number of slot rows."""
    n, limit = needed.shape
    tokens = torch.arange(limit, device=needed.device).expand(n, limit)
    slots = torch.where(compact[:, None], needed.cumsum(1) - 1, tokens)
    slots = torch.where(needed, slots, -1)
    found = torch.full((n, limit + 1), -1, device=needed.device)
    found.scatter_(1, torch.where(needed, slots, limit), tokens)
    count = slots.amax(1) + 1 if limit else slots.sum(1)
    return slots, found[:, :limit], count


def _schedule(layout: Any, block_m: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of the tile schedule, and their number."""
    own, rows = counts[:, 0], counts.sum(1)
    every = -(-rows // block_m)
    early = torch.where(own == rows, every, own // block_m)
    early[_native.core.MoeSendOrder(layout).early_experts :] = 0
    complete = torch.stack([early, every], 1)
    first = torch.nn.functional.pad(complete, (1, 0))[:, :-1]
    # Tile rows in the order in which they are computed.
    size, first = (complete - first).t().reshape(-1), first.t().reshape(-1)
    end = size.cumsum(0)
    entry = torch.arange(layout.max_tiles(block_m), device=counts.device)
    which = torch.searchsorted(end, entry, right=True).clamp(max=max(size.numel() - 1, 0))
    begin = (end - size)[which]
    group = (entry - begin) // GROUP_M * GROUP_M
    rows_of_tiles = (size[which] - group).clamp(max=GROUP_M)
    tiles = torch.stack([which % layout.local_experts, first[which] + group, begin + group, rows_of_tiles], 1)
    return torch.where((entry < end[-1])[:, None], tiles, 0), end[-1:]


def tokens_of_rows(rows: Tensor, incoming: Tensor) -> Tensor:
    """source * max_tokens + token of each row of a routing; for rows after the last one: any valid token."""
    limit = incoming.shape[1]
    slot_rows = rows.clamp(min=0)
    tokens = incoming.reshape(-1).index_select(0, slot_rows).clamp_(min=0)
    return tokens.add_(slot_rows.floor_divide_(limit), alpha=limit)


def weighted_sum(product: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """The wide sum of each token's rows [rows, n] over its choices [..., k], in order; -1: none here."""
    wide = wide_type(product.dtype)
    total = torch.zeros(*positions.shape[:-1], product.shape[1], dtype=wide, device=product.device)
    if product.shape[0] == 0:
        return total
    for j in range(positions.shape[-1]):
        position = positions[..., j].long()
        part = product[position.clamp(min=0)].to(wide) * weights[..., j, None].to(wide)
        total += torch.where((position >= 0)[..., None], part, 0)
    return total
