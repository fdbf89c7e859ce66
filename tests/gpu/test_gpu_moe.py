"""The routing kernel on one GPU, for every rank of every layout, against the same routing on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flux._native import core
from flux.moe import reference
from flux.testing.moe_data import MoeCase, random_case

BLOCK_M = 128


def ids_of(case: MoeCase) -> torch.Tensor:
    ids = torch.full((case.world_size, case.max_tokens, case.top_k), -1, dtype=torch.int32)
    for rank, tokens in enumerate(case.tokens):
        ids[rank, :tokens] = case.routing(rank)[0]
    return ids


def launch(layout: Any, ids: torch.Tensor, arrays: list[torch.Tensor], scratch: torch.Tensor) -> None:
    torch.ops.flux._moe_route(ids, arrays, scratch, layout.rank, layout.ep_size, layout.num_experts, BLOCK_M)


def check(case: MoeCase, ids: torch.Tensor) -> None:
    for rank in range(case.world_size):
        layout = core.MoeLayout(
            case.world_size, rank, case.ep_size, case.num_experts, case.top_k, case.max_tokens
        )
        shapes = [t.shape for t in reference.routing_tensors(layout, BLOCK_M, ids)]
        expected = [torch.empty(shape, dtype=torch.int32) for shape in shapes]
        core.moe_route(layout, BLOCK_M, ids.data_ptr(), [array.data_ptr() for array in expected])
        arrays = [torch.full_like(array, 77, device="cuda") for array in expected]
        scratch = torch.full((layout.route_scratch_words,), 99, dtype=torch.int32, device="cuda")
        launch(layout, ids.cuda(), arrays, scratch)
        for number, (array, other) in enumerate(zip(arrays, expected, strict=True)):
            assert torch.equal(array.cpu(), other), f"array {number} of rank {rank}, {case}"


@pytest.mark.parametrize("number", range(60))
def test_random_layouts(number: int) -> None:
    case = random_case(number)
    check(case, ids_of(case))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "ep_size"),
    [(2048, 256, 8, 1), (2048, 256, 8, 4), (1025, 8, 2, 2), (3000, 1500, 16, 1), (4000, 128, 1, 4)],
)
def test_large_layouts(tokens: int, experts: int, top_k: int, ep_size: int) -> None:
    case = MoeCase((tokens, tokens - 7, 3, tokens), 2, 2, experts, top_k, ep_size)
    check(case, ids_of(case))


def test_experts_that_are_named_twice() -> None:
    case = MoeCase((700, 600), 2, 2, 12, 6, 2)
    ids = ids_of(case)
    ids[..., 3] = ids[..., 0]
    ids[..., 5] = ids[..., 4]
    check(case, ids)


def test_graph_replays_follow_their_input() -> None:
    case = MoeCase((600, 600), 2, 2, 16, 4, 2)
    layout = core.MoeLayout(2, 1, 2, 16, 4, 600)
    first, second = ids_of(case), ids_of(MoeCase((600, 600), 2, 2, 16, 4, 2, skew="skewed", seed=1))
    expected = [reference.routing_tensors(layout, BLOCK_M, ids) for ids in (first, second)]
    ids = first.cuda()
    arrays = [torch.empty_like(array, device="cuda") for array in expected[0]]
    scratch = torch.empty(layout.route_scratch_words, dtype=torch.int32, device="cuda")
    launch(layout, ids, arrays, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(layout, ids, arrays, scratch)
    for source, wanted in ((second, expected[1]), (first, expected[0])):
        ids.copy_(source)
        graph.replay()
        for array, other in zip(arrays, wanted, strict=True):
            assert torch.equal(array.cpu(), other)


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
    ids = ids_of(case)
    layout = core.MoeLayout(case.world_size, 0, case.ep_size, case.num_experts, case.top_k, case.max_tokens)
    on_gpu = reference.routing_tensors(layout, BLOCK_M, ids.cuda())
    for array, other in zip(on_gpu, reference.routing_tensors(layout, BLOCK_M, ids), strict=True):
        assert torch.equal(array.cpu(), other)
