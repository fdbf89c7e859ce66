"""What each rank of tests/dist/test_dist_moe.py does; returns what went wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import flux
from flux.testing.moe_data import SKEWS, MoeCase, random_case


def run(case: MoeCase, rank: int, group: Any = None) -> list[str]:
    ids, weights = (t.cuda() for t in case.routing(rank))
    x, w1, w2 = case.x(rank).cuda(), case.w1(rank).cuda(), case.w2(rank).cuda()
    routing = flux.moe.route(
        ids, weights, case.num_experts, group=group, ep_size=case.ep_size, max_tokens=case.max_tokens
    )
    expected0, expected1 = case.layer0(rank), case.layer1(rank)
    hidden = case.hidden_rows(rank, routing.rows.shape[0]).cuda()
    result0 = flux.moe.ag_scatter_gemm(x, w1, routing)[: len(expected0)].cpu()
    result1 = flux.moe.gemm_gather_rs(hidden, w2, routing).cpu()
    wrong = []
    for name, result, expected in (("layer 0", result0, expected0), ("layer 1", result1, expected1)):
        if not torch.equal(result, expected):
            wrong.append(f"{name} of {case}: {int((result != expected).sum())} of {expected.numel()} differ")
    return wrong


def random_cases(rank: int, world_size: int, first: int, count: int) -> list[str]:
    dtypes = (torch.bfloat16, torch.float16)
    wrong = []
    for number in range(first, first + count):
        wrong += run(random_case(number, world_size, dtypes), rank)
    flux.check()
    return wrong


def skews(rank: int, world_size: int) -> list[str]:
    p, wrong = world_size, []
    for number, skew in enumerate(SKEWS):
        for ep_size in [d for d in (1, 2, 4) if p % d == 0]:
            wrong += run(MoeCase((700,) * p, 264, 72, 16, 4, ep_size, skew=skew, seed=number), rank)
    return wrong


def graphs(rank: int, world_size: int) -> list[str]:
    """One capture, replayed with other tokens, experts and weights: routing and both layers are in it."""
    cases = [MoeCase((192,) * world_size, 264, 72, 8, 2, world_size, seed=seed) for seed in range(4)]

    def inputs(case: MoeCase) -> list[torch.Tensor]:
        ids, weights = case.routing(rank)
        made = (ids, weights, case.x(rank), case.w1(rank), case.w2(rank), case.hidden_rows(rank, max_rows))
        return [t.cuda() for t in made]

    def layers() -> list[torch.Tensor]:
        routing = flux.moe.route(ids, weights, 8, ep_size=world_size)
        return [
            flux.moe.ag_scatter_gemm(x, w1, routing),
            flux.moe.gemm_gather_rs(hidden, w2, routing),
        ]

    max_rows = world_size * 192 * min(2, 8 // world_size)
    ids, weights, x, w1, w2, hidden = held = inputs(cases[0])
    layers()  # workspaces are made here, collectively
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    wrong = []
    for case in cases:
        for there, new in zip(held, inputs(case), strict=True):
            there.copy_(new)
        graph.replay()
        for name, result, expected in zip(
            ("layer 0", "layer 1"), results, (case.layer0(rank), case.layer1(rank)), strict=True
        ):
            if not torch.equal(result[: len(expected)].cpu(), expected):
                wrong.append(f"{name} of {case}, replayed")
    flux.check()
    return wrong


def without_synchronisation(rank: int, world_size: int) -> list[str]:
    case = MoeCase((256,) * world_size, 264, 72, 8, 2, world_size)
    ids, weights = (t.cuda() for t in case.routing(rank))
    x, w1, w2 = case.x(rank).cuda(), case.w1(rank).cuda(), case.w2(rank).cuda()

    def layer() -> torch.Tensor:
        routing = flux.moe.route(ids, weights, 8, ep_size=world_size)
        return flux.moe.gemm_gather_rs(flux.moe.ag_scatter_gemm(x, w1, routing), w2, routing)

    expected = layer()  # workspaces are made here, collectively
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [] if torch.equal(result, expected) else ["two calls differ"]
