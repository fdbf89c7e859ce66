"""Mixtures of experts in `flux verify`: routing and both layers, for layouts and loads of every kind."""

from __future__ import annotations

from dataclasses import replace

import torch

import flux
from flux.testing.compare import first_difference, first_wrong, successive
from flux.testing.emulate_moe import EmulatedMoeRanks
from flux.testing.moe_data import MoeCase


def named_cases(world_size: int, nodes: int = 1) -> list[tuple[str, MoeCase]]:
    p, several = world_size, nodes if nodes > 1 else 0
    even = (140,) * p
    uneven = tuple(20 + 60 * (rank % 3) for rank in range(p))
    ranks = p // nodes if several else 0
    base = MoeCase(even, 264, 72, 2 * p, 3, 1, torch.bfloat16, ranks_per_node=ranks)
    cases = [
        ("tensor parallel", base),
        ("expert parallel", replace(base, ep_size=p)),
        ("skewed loads", replace(base, skew="skewed", dtype=torch.float16)),
        ("all tokens to one expert", replace(base, skew="one expert", ep_size=p)),
        ("uneven ranks, dropped choices", replace(base, tokens=uneven, ep_size=p, dropped=0.3)),
        ("one token a rank", replace(base, tokens=(1,) * p)),
    ]
    if p % 2 == 0 and p > 2:
        cases.append(("tensor and expert parallel", replace(base, ep_size=2)))
    if several and nodes < p:
        cases.append(("expert parallel across nodes", replace(base, ep_size=nodes)))
    return cases


def rank_case(rank: int, case: MoeCase, device: torch.device) -> str:
    """Successive calls on one rank of a real group."""
    results = []
    for c in successive(case):
        ids, weights = (t.to(device) for t in c.routing(rank))
        routing = flux.moe.route(ids, weights, c.num_experts, ep_size=c.ep_size, max_tokens=c.max_tokens)
        hidden = c.hidden_rows(rank, routing.rows.shape[0]).to(device)
        layer0 = flux.moe.ag_scatter_gemm(c.x(rank).to(device), c.w1(rank).to(device), routing)
        results.append((c, layer0, flux.moe.gemm_gather_rs(hidden, c.w2(rank).to(device), routing)))
    flux.check()
    return first_wrong([_compare(rank, *result) for result in results])


def emulated_case(ranks: EmulatedMoeRanks, case: MoeCase) -> str:
    """As rank_case, with all ranks on one GPU and routing on the host."""
    said = []
    for c in successive(case):
        layouts, every = ranks.route(c), range(c.world_size)
        xs, w1s, w2s = ([make(rank).to(ranks.device) for rank in every] for make in (c.x, c.w1, c.w2))
        hidden = [c.hidden_rows(rank, layouts[rank].max_rows).to(ranks.device) for rank in every]
        torch.cuda.synchronize(ranks.device)
        layer0 = ranks.ag_scatter_gemm(xs, w1s, join=False)
        layer1 = ranks.gemm_gather_rs(hidden, w2s, join=False)
        ranks.check()
        said += [_compare(rank, c, layer0[rank], layer1[rank]) for rank in every]
    return first_wrong(said)


def _compare(rank: int, case: MoeCase, layer0: torch.Tensor, layer1: torch.Tensor) -> str:
    rows = case.layer0(rank)
    of_layer_0 = layer0[: len(rows)].cpu(), rows
    return first_difference({"layer 0": of_layer_0, "layer 1": (layer1.cpu(), case.layer1(rank))})
