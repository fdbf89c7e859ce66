"""The routing kernel on one GPU, for every rank of every layout, against the same routing on the host."""

from __future__ import annotations

import pytest
import torch

import flux
from flux._native import core
from flux.moe import reference
from flux.moe.routing import checked_shapes, route_on_host
from flux.testing.emulate_moe import EmulatedMoeRanks
from flux.testing.moe_data import MoeCase, random_case

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
