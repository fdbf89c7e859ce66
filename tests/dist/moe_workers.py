"""What ranks do in test_dist_layers.py with mixtures of experts; returns what went wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from dense_calls import wrong_layers
from dist_workers import differs

import flux
from flux.integrations.vllm.experts import summed_experts
from flux.moe import reference
from flux.testing.moe_data import SKEWS, MoeCase, random_case


def random_cases(rank: int, world_size: int, first: int, count: int) -> list[str]:
    dtypes = (torch.bfloat16, torch.float16)
    wrong = []
    for number in range(first, first + count):
        wrong += wrong_layers(random_case(number, world_size, dtypes), rank, device="cuda")
    flux.check()
    return wrong


def skews(rank: int, world_size: int) -> list[str]:
    p, wrong = world_size, []
    for number, skew in enumerate(SKEWS):
        for ep_size in [d for d in (1, 2, 4) if p % d == 0]:
            case = MoeCase((700,) * p, 264, 72, 16, 4, ep_size, skew=skew, seed=number)
            wrong += wrong_layers(case, rank, device="cuda")
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
        return [flux.moe.ag_scatter_gemm(x, w1, routing), flux.moe.gemm_gather_rs(hidden, w2, routing)]

    max_rows = world_size * 192 * min(2, 8 // world_size)
    ids, weights, x, w1, w2, hidden = held = inputs(cases[0])
    layers()  # workspaces are made here, collectively
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    wrong: list[str] = []
    for case in cases:
        for there, new in zip(held, inputs(case), strict=True):
            there.copy_(new)
        graph.replay()
        for name, result, expected in (
            ("0", results[0], case.layer0(rank)),
            ("1", results[1], case.layer1(rank)),
        ):
            wrong += differs(f"layer {name} of {case}, replayed", result[: len(expected)].cpu(), expected)
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


def vllms_experts(rank: int, world_size: int) -> list[str]:
    """Experts where all ranks have all tokens, called and captured. Exact in 16 bits: gates are 0 or so large
    that silu changes nothing, and few small integers are added up.
    """
    p, experts, hidden, columns, top_k = world_size, 16, 256, 64, 2
    g = torch.Generator().manual_seed(p)

    def sparse(low: int, high: int, entries: int, *shape: int) -> torch.Tensor:
        """Rows with integers in some places, else zeros."""
        places = torch.randint(shape[-1], (*shape[:-1], entries), generator=g)
        values = torch.randint(low, high + 1, places.shape, generator=g)
        return torch.zeros(shape).scatter_(-1, places, values.float())

    def inputs(tokens: int) -> list[torch.Tensor]:
        x = torch.randint(2, (tokens, hidden), generator=g).float()
        ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices.int()
        return [x, ids, torch.randint(1, 5, (tokens, top_k), generator=g) / 4]

    gates, ups = (sparse(*values, 1, experts, p, columns, hidden) for values in ((0, 1), (-2, 2)))
    w13 = torch.stack([32 * gates, ups], 2)
    w2 = sparse(-1, 1, 4, experts, hidden, p, columns)
    whole = w13.transpose(1, 2).reshape(experts, -1, hidden), w2.reshape(experts, hidden, -1)
    mine = [
        weight.cuda().bfloat16().contiguous()
        for weight in (w13[:, rank].reshape(experts, -1, hidden), w2[:, :, rank])
    ]
    group, wrong = dist.group.WORLD.group_name, []

    def on_gpu(x: torch.Tensor, *routing: torch.Tensor) -> list[torch.Tensor]:
        return [x.cuda().bfloat16(), *(t.cuda() for t in routing)]

    def check(name: str, result: torch.Tensor, made: list[torch.Tensor]) -> None:
        if not torch.equal(result.float().cpu(), reference.moe_mlp(*made, *whole)):
            wrong.append(name)

    for tokens in (1, p - 1, p + 1, 64, 700):
        made = inputs(tokens)
        check(f"{tokens} tokens", summed_experts(*on_gpu(*made), *mine, group, rank, p), made)
    held = on_gpu(*inputs(63))  # not a multiple of the ranks
    summed_experts(*held, *mine, group, rank, p)  # workspaces are made here, collectively
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = summed_experts(*held, *mine, group, rank, p)
    for number in range(3):
        made = inputs(63)
        for there, new in zip(held, on_gpu(*made), strict=True):
            there.copy_(new)
        graph.replay()
        check(f"replay {number}", replayed, made)
    flux.check()
    return wrong
