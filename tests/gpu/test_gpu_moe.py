"""Mixtures of experts on one GPU: the routing kernel, for every rank of each layout, against the same routing
on the host; both layers with all ranks, which run the real kernels; and one rank's part of the experts, as
vLLM's adapter calls it: exact where C++ repeats it, and in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from flux._native import core
from flux.integrations.vllm.experts import own_experts
from flux.moe import reference, routing, rows
from flux.moe.routing import checked_shapes, route_on_host
from flux.ops import grouped_gemm
from flux.testing.emulate_moe import EmulatedMoeRanks
from flux.testing.moe_data import SKEWS, MoeCase, random_case

BLOCK_M = 128


def choices(case: MoeCase, wide: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For every rank its experts, which int64 can hold too, and its weights: a number of their own each."""
    made = []
    for rank, tokens in enumerate(case.tokens):
        ids = case.routing(rank)[0]
        weights = torch.arange(tokens * case.top_k).view(tokens, case.top_k) + rank / 8
        made.append((ids.long() if wide else ids, weights))
    return made


def expected_of(case: MoeCase, own: list[tuple[torch.Tensor, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """For every rank the arrays of its routing, made on the host, and the weights of all."""
    p, limit = case.world_size, case.max_tokens
    every = torch.full((p, limit, case.top_k), -1, dtype=torch.int32)
    all_weights = torch.zeros(every.shape)
    for rank, (ids, weights) in enumerate(own):
        every[rank, : len(ids)], all_weights[rank, : len(ids)] = ids, weights
    results = []
    for rank in range(p):
        layout = core.MoeLayout(p, rank, case.ep_size, case.num_experts, case.top_k, limit)
        shapes = checked_shapes(p, case.num_experts, case.ep_size, limit, 0, case.top_k)
        results.append([*route_on_host(layout, every, shapes), all_weights])
    return results


def assert_equal(results: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], what: object) -> None:
    for rank, (tensors, others) in enumerate(zip(results, expected, strict=True)):
        for number, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
            assert torch.equal(tensor.cpu(), other), f"array {number} of rank {rank}, {what}"


def check(case: MoeCase, own: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    ids, weights = ([tensor.cuda() for tensor in tensors] for tensors in zip(*own, strict=True))
    sizes = case.num_experts, case.ep_size, case.max_tokens
    expected = expected_of(case, own)
    if case.world_size == 1:
        assert_equal([alone(case, ids[0], weights[0])], expected, case)
        return
    ranks = EmulatedMoeRanks(case.world_size)
    # Three times, as the third call uses the buffer of the first.
    results = [ranks.route_by_kernel(ids, weights, *sizes, join=False) for _ in range(3)]
    ranks.check()
    for result in results:
        assert_equal(result, expected, case)


def alone(case: MoeCase, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The kernel for a group of one."""
    shapes = checked_shapes(1, case.num_experts, 1, case.max_tokens, 0, case.top_k)
    arrays = [torch.full(shape, 77, dtype=torch.int32, device="cuda") for shape in shapes]
    all_weights = torch.full((1, case.max_tokens, case.top_k), 77.0, device="cuda")
    layout = core.MoeLayout(1, 0, 1, case.num_experts, case.top_k, case.max_tokens)
    scratch = torch.full((layout.route_scratch_words,), 99, dtype=torch.int32, device="cuda")
    sizes = (0, 0, 1, case.num_experts, BLOCK_M)
    torch.ops.flux._moe_route(ids, weights, arrays, all_weights, scratch, *sizes)
    return [*arrays, all_weights]


@pytest.mark.parametrize("number", range(60))
def test_random_layouts(number: int) -> None:
    case = random_case(number)
    check(case, choices(case, wide=number % 2 == 0))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "ep_size"),
    [(2048, 256, 8, 1), (2048, 256, 8, 4), (1025, 8, 2, 2), (3000, 1500, 16, 1), (3500, 128, 1, 4)],
)
def test_large_layouts(tokens: int, experts: int, top_k: int, ep_size: int) -> None:
    case = MoeCase((tokens, tokens - 7, 3, tokens), 2, 2, experts, top_k, ep_size)
    check(case, choices(case))


@pytest.mark.parametrize(("experts", "top_k"), [(750, 8), (8, 2)])
def test_more_tokens_than_few_threads_count(experts: int, top_k: int) -> None:
    case = MoeCase((60000,), 1, 1, experts, top_k, 1)
    check(case, choices(case))


def test_experts_that_are_named_twice_and_numbers_that_are_nobodys() -> None:
    case = MoeCase((700, 600), 2, 2, 12, 6, 2)
    own = choices(case, wide=True)
    for ids, _ in own:
        ids[..., 3] = ids[..., 0]
        ids[..., 5] = ids[..., 4]
    own[1][0][7] = 2**31 - 1
    check(case, own)
    own[1][0][7] = -1
    own[1][0][8, 2] = 12
    expected = expected_of(case, own)
    own[1][0][7], own[1][0][8, 2] = 2**33, 2**32 + 12  # expert 0 and 12 in their lower words
    ids, weights = ([tensor.cuda() for tensor in tensors] for tensors in zip(*own, strict=True))
    ranks = EmulatedMoeRanks(2)
    results = ranks.route_by_kernel(ids, weights, 12, 2, 700)
    ranks.check()
    assert_equal(results, expected, case)


def test_weights_that_look_as_if_they_had_not_arrived() -> None:
    case = MoeCase((40, 40), 2, 2, 4, 2, 1)
    ids = [torch.zeros(40, 2, dtype=torch.int32, device="cuda") for _ in range(2)]
    weights = [torch.full((40, 2), -1, dtype=torch.int32, device="cuda").view(torch.float32)] * 2
    ranks = EmulatedMoeRanks(2)
    results = ranks.route_by_kernel(ids, weights, 4, 1, 40)
    ranks.check()
    assert all(torch.isnan(tensors[-1]).all() for tensors in results), case


def test_a_rank_that_does_not_come_is_named() -> None:
    case = MoeCase((40, 40), 2, 2, 4, 2, 1)
    own = [(ids.cuda(), weights.cuda()) for ids, weights in choices(case)]
    ranks = EmulatedMoeRanks(2, timeout_s=0.5)
    ids, weights = ([pair[i] for pair in own] for i in (0, 1))
    ranks.route_by_kernel(ids, weights, 4, 1, 40, absent=(1,))
    with pytest.raises(flux.CommTimeoutError, match=r"moe\.route: rank 0 waited .* of peer 1"):
        ranks.check()


def test_graph_replays_follow_their_input() -> None:
    first, second = (MoeCase((600,), 2, 2, 16, 4, skew=skew, seed=1) for skew in ("even", "skewed"))
    (ids, weights), other = (tuple(t.cuda() for t in choices(case)[0]) for case in (first, second))
    alone(first, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors = alone(first, ids, weights)
    for case in (second, first):
        ids.copy_(other[0] if case is second else choices(first)[0][0])
        graph.replay()
        assert_equal([tensors], expected_of(case, choices(case)), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "n"), [(1, 1, 8), (300, 8, 4096), (77, 5, 2056), (20000, 3, 264)]
)
def test_weighted_sums_in_one_pass(dtype: torch.dtype, tokens: int, top_k: int, n: int) -> None:
    g = torch.Generator("cuda").manual_seed(n)
    products = torch.randint(-4, 5, (500, n), generator=g, device="cuda").to(dtype)
    positions = torch.randint(-100, 500, (2, tokens, top_k), generator=g, device="cuda").clamp(min=-1).int()
    weights = torch.randint(1, 3, positions.shape, generator=g, device="cuda").float()
    weights[positions < 0] = float("nan")  # of experts elsewhere: not to be read
    out = torch.full((2 * tokens + 1, n), 7, dtype=dtype, device="cuda")
    torch.ops.flux._moe_combine(products, positions, weights, out[:-1])
    expected = reference.weighted_sum(products, positions, weights).to(dtype)
    assert torch.equal(out[:-1].view(expected.shape), expected)
    assert (out[-1] == 7).all(), "written beside the result"


def test_the_same_by_torch_on_the_gpu() -> None:
    """What routes where the kernel does not apply."""
    case = random_case(5)
    ids, _ = case.all_choices()
    layout = core.MoeLayout(case.world_size, 0, case.ep_size, case.num_experts, case.top_k, case.max_tokens)
    on_gpu = reference.routing_tensors(layout, BLOCK_M, ids.cuda())
    *expected, _ = expected_of(case, choices(case))[0]  # but for the weights
    for array, other in zip(on_gpu, expected, strict=True):
        assert torch.equal(array.cpu(), other)


def check_layers(ranks: EmulatedMoeRanks, case: MoeCase, config: int, per_chunk: int, ctas: int) -> None:
    layouts, p = ranks.route(case), range(case.world_size)
    how = f"of {case}, {config}, {per_chunk}, {ctas}"
    xs, w1s, w2s = ([make(r).cuda() for r in p] for make in (case.x, case.w1, case.w2))
    if (config + per_chunk) % 2:  # as the backward passes have them
        w1s, w2s = ([w.transpose(1, 2).contiguous().transpose(1, 2) for w in ws] for ws in (w1s, w2s))
    out0 = ranks.ag_scatter_gemm(xs, w1s, config=config)
    ranks.check()
    for r in p:
        expected = case.layer0(r)
        assert torch.equal(out0[r][: len(expected)].cpu(), expected), f"layer 0, rank {r} {how}"
    hs = [case.hidden_rows(r, layouts[r].max_rows).cuda() for r in p]
    out1 = ranks.gemm_gather_rs(hs, w2s, config=config, tiles_per_chunk=per_chunk, communication_ctas=ctas)
    ranks.check()
    for r in p:
        assert torch.equal(out1[r].cpu(), case.layer1(r)), f"layer 1, rank {r} {how}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("skew", SKEWS)
def test_layouts_and_skews(world_size: int, skew: str) -> None:
    ranks = EmulatedMoeRanks(world_size)
    number = 0
    for ep_size in [d for d in (1, 2, 3, 4) if world_size % d == 0]:
        for tokens in (1, 140, 300):
            case = MoeCase(
                (tokens,) * (world_size - 1) + (max(1, tokens // 2),),
                264,
                72,
                4 * ep_size,
                3,
                ep_size,
                torch.bfloat16 if number % 2 else torch.float16,
                skew,
                0.2 * (number % 2),
                seed=number,
            )
            check_layers(ranks, case, (0, 3, 5, 9)[number % 4], 1 + number % 2, (1, 0, 5)[number % 3])
            number += 1


@pytest.mark.parametrize("config", [0, 3, 5, 9])
@pytest.mark.parametrize("ep_size", [1, 3])
def test_long_rows(config: int, ep_size: int) -> None:
    """The next tile is asked for in the middle of one; chunks are wider than what a thread sums at a time."""
    ranks = EmulatedMoeRanks(3)
    for seed in range(3):  # both buffers, and one of them again
        case = MoeCase((260, 200, 60), 1608, 1608, 6, 4, ep_size, torch.bfloat16, "skewed", 0.1, seed=seed)
        check_layers(ranks, case, config, 2, 5 * seed)


EXPERTS, HIDDEN, COLUMNS, TOP_K = 8, 264, 72, 4


@pytest.fixture
def one_rank() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def layer(seed: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, experts, their weights, w13 and w2, on the CPU. All products are exact in 16 bits, because gates are
    32 or 0, and so is silu of them; all sums in fp32.
    """
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=g).float()

    x, gates = integers(0, 1, tokens, HIDDEN), torch.zeros(EXPERTS, COLUMNS, HIDDEN)
    x[:, 0], gates[:, :, 0] = 1, 32 * integers(0, 1, EXPERTS, COLUMNS)
    w13 = torch.cat((gates, integers(-1, 1, EXPERTS, COLUMNS, HIDDEN)), 1)
    w2 = integers(-1, 1, EXPERTS, HIDDEN, COLUMNS) * (integers(0, 3, EXPERTS, HIDDEN, COLUMNS) == 0) / 32
    ids, weights = integers(-1, EXPERTS - 1, tokens, TOP_K).int(), integers(1, 3, tokens, TOP_K)
    return [x.to(dtype), ids, weights, w13.to(dtype), w2.to(dtype)]


def expected(x: torch.Tensor, ids: Any, weights: Any, *experts: torch.Tensor) -> torch.Tensor:
    made = reference.moe_mlp(x.float(), ids, weights, *(each.float() for each in experts))
    return made.to(x.dtype)


def on_gpu(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.cuda() for each in given]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 300, 2049])
def test_layers_are_repeated(
    tokens: int, dtype: torch.dtype, one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise AssertionError("launched by Python")

    kept = []
    for seed in range(4):
        given = layer(seed, tokens, dtype)
        kept.append((own_experts(*on_gpu(given), one_rank), expected(*given)))
        for module, name in ((routing, "_kernel"), (grouped_gemm, "_kernel"), (rows, "_combine_kernel")):
            monkeypatch.setattr(module, name, refuses)
    for result, right in kept:
        assert torch.equal(result.cpu(), right)


def test_a_graph_is_captured_between_known_calls(one_rank: str) -> None:
    tokens = 300
    held = on_gpu(layer(0, tokens, torch.bfloat16))
    for _ in range(2):
        own_experts(*held, one_rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = own_experts(*held, one_rank)
    for seed in range(1, 4):
        given = layer(seed, tokens, torch.bfloat16)
        for there, new in zip(held, given, strict=True):
            there.copy_(new)
        graph.replay()
        assert torch.equal(replayed.cpu(), expected(*given))
        assert torch.equal(own_experts(*held, one_rank).cpu(), expected(*given))
