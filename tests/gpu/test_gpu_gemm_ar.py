"""GEMM+AllReduce, AllReduce and ReduceScatter with all ranks on one GPU: kernels, buffers and epochs are the
real ones.
"""

from __future__ import annotations

import pytest
import torch
from emulated import DTYPES, EmulatedInt8Ranks, Problem, check_back_to_back, check_replays, problem
from int8_model import data, model

import flux
from flux._native import core
from flux.ops import gemm as products
from flux.ops.gemm_ar import rms_norm
from flux.testing import GemmRsCase
from flux.testing.emulate import EmulatedRanks

ONE_SHOT, TWO_SHOT = 0, 1
FIRST = 2  # tile that sums; those before it have 16 rows
SHAPES = [(1, 8, 8), (1, 4096, 256), (5, 136, 72), (16, 1024, 512), (64, 520, 264), (130, 264, 520)]
# Several tiles for each CTA, which gives one away while it computes the next.
SEVERAL_TILES = [(1, 8200, 264), (192, 2056, 520)]


def assert_exact(ranks: EmulatedRanks, case: GemmRsCase, mode: int, config: int = -1) -> None:
    Problem("gemm_ar", case).run(ranks, mode=mode, config=config)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_every_tile_that_sums(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for tile in range(FIRST, core.NUM_SWAP_AB):
        for number, (m, n, k) in enumerate(SHAPES + SEVERAL_TILES):
            split = [1, 2, 4][(tile + number) % 3]
            if split > core.swap_ab_stage_blocks(tile, k) or split * world_size > 16:
                split = 1
            case = GemmRsCase(
                m, n, k, world_size, DTYPES[number % 2], number % 2 == 1, bias=number % 3 == 0, seed=tile
            )
            sharers = 2 if split == 1 and number % 2 and core.swap_ab_in_pairs(tile) else 1
            assert_exact(ranks, case, mode, core.FIRST_SWAP_AB + tile | split << 8 | sharers << 16)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_what_the_cost_model_chooses_and_more_rows_than_a_launch_takes(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (m, n, k) in enumerate([(4, 512, 1024), (64, 1032, 200), (300, 520, 136)]):
        assert_exact(ranks, GemmRsCase(m, n, k, world_size, DTYPES[number % 2], bias=True), mode)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_shapes_back_to_back_without_waiting(world_size: int) -> None:
    check_back_to_back(world_size, [("gemm_ar", {"mode": mode}) for mode in (ONE_SHOT, TWO_SHOT)])


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_graph_replay(mode: int) -> None:
    def made(seed: int) -> list[Problem]:
        return [problem("gemm_ar", 24, 520, 264, 4, bias=True, seed=seed)]

    check_replays(made, lambda ranks, problems: [(0, problems[0].call(ranks, mode=mode))])


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (9, 1032, -1),
        (140, 1032, -1),
        (140, 1032, core.FIRST_SWAP_AB + 3 | 1 << 8 | 1 << 16),  # several tiles of rows
        # In two launches: several rows for each CTA, which writes norms where others might still read.
        (1025, 4104, -1),
        # Rows that fit into a CTA's memory, but not with the norm's weight, and rows that do not.
        (4, 40960, -1),
        (2, 131072, -1),
        (1, 4104, -1),
    ],
)
def test_residual_and_norm(
    mode: int, dtype: torch.dtype, world_size: int, m: int, n: int, config: int
) -> None:
    ranks = EmulatedRanks(world_size)
    made = problem("gemm_ar", m, n, 264, world_size, dtype, bias=True)
    case = made.case
    residual = case.residual("cuda")
    norm_weight = torch.linspace(0.5, 1.5, n, device="cuda").to(dtype)
    how = {"mode": mode, "residual": residual, "config": config}
    results, plain = made.call(ranks, norm_weight=norm_weight, **how), made.call(ranks, **how)
    ranks.check()
    total = case.expected_sum("cuda").double() + residual.double()
    norm = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6) * norm_weight.double()
    for rank in range(world_size):
        assert torch.equal(results[world_size + rank].double(), total.to(dtype).double())
        assert torch.equal(plain[rank], results[world_size + rank])
        # One rounding, and the error of an fp32 sum of squares, which is far below it.
        limit = torch.finfo(dtype).eps * norm.abs() + 1e-7
        assert ((results[rank].double() - norm).abs() <= limit).all()
        assert torch.equal(results[rank], results[0])


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_reduce_with_residual_and_norm(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    # The last with many threads, and several vectors for each of them.
    for m, n in [(1, 64), (5, 4096), (17, 12288), (277, 4000)]:
        case = GemmRsCase(m, n, 64, world_size, torch.bfloat16, seed=m)
        partials = [products.reference(*case.inputs(rank, "cuda")[:2]) for rank in range(world_size)]
        residual = torch.arange(m * n, device="cuda").view(m, n).remainder(5).mul(2).sub(4).bfloat16()
        norm_weight = torch.arange(n, device="cuda").remainder(3).add(1).bfloat16()
        torch.cuda.synchronize()
        added = ranks.all_reduce(partials, mode=mode, residual=residual, join=False)
        both = ranks.all_reduce(partials, mode=mode, residual=residual, norm_weight=norm_weight, join=False)
        ranks.check()
        expected = case.expected_sum("cuda") + residual
        for rank in range(world_size):
            assert torch.equal(added[rank], expected) and torch.equal(both[world_size + rank], expected), (
                m,
                n,
            )
            torch.testing.assert_close(both[rank], rms_norm(expected, norm_weight, 1e-6))


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(world_size: int, dtype: torch.dtype) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n) in enumerate([(1, 8), (3, 1000), (2, 2048), (1, 8)]):
        # Every element carries its place and the marks of all ranks: a row of another rank shows.
        case = GemmRsCase(rows * world_size, n, 64, world_size, dtype, seed=number)
        partials = [products.reference(*case.inputs(rank, "cuda")[:2]) for rank in range(world_size)]
        torch.cuda.synchronize()
        # Both buffers, and one of them again; sums of all rows between them.
        scattered = [ranks.reduce_scatter(partials, join=False) for _ in range(3)]
        summed = ranks.all_reduce(partials, mode=number % 2, join=False)
        scattered.append(ranks.reduce_scatter(partials, join=False))
        ranks.check()
        for rank in range(world_size):
            assert torch.equal(summed[rank], case.expected_sum("cuda"))
            for results in scattered:
                assert torch.equal(results[rank], case.expected(rank, "cuda")), f"rank {rank} of {case}"


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_reduce_scatter_as_int8(world_size: int, dtype: torch.dtype) -> None:
    """The bits of the definition. Sums of 16 bits between them."""
    ranks = EmulatedInt8Ranks(world_size)
    for number, (rows, n) in enumerate([(1, 8), (3, 1000), (130, 2048), (1, 8)]):
        wholes = [data((world_size, rows, n), 10 * number + rank, dtype) for rank in range(world_size)]
        xs = [whole.cuda() for whole in wholes]
        torch.cuda.synchronize()
        found = [ranks.reduce_scatter_int8(xs, rounds_own=call == 1, join=False) for call in range(3)]
        if dtype != torch.float32:
            ranks.reduce_scatter([x.view(-1, n) for x in xs], join=False)
        found.append(ranks.reduce_scatter_int8(xs, join=False))
        ranks.check()
        for call, results in enumerate(found):
            for rank, result in enumerate(results):
                total = model([whole[rank] for whole in wholes], rank, rounds_own=call == 1)[0]
                assert torch.equal(result.cpu(), total.to(dtype)), f"call {call}, rank {rank}, {rows} x {n}"


def test_a_rank_that_never_comes_to_a_scatter_is_named() -> None:
    ranks = EmulatedRanks(3, timeout_s=0.3)
    xs = [torch.ones(6, 64, device="cuda").bfloat16() for _ in range(3)]
    results = ranks.reduce_scatter(xs, absent={1})
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    assert (caught.value.op, caught.value.peer, caught.value.epoch) == ("reduce_scatter", 1, 1)
    for rank in (0, 2):
        assert results[rank].isnan().all(), "a result without one rank's part passes for a result"


def test_a_nan_that_looks_like_nothing_arrives_as_a_nan() -> None:
    ranks = EmulatedRanks(2)
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")
    x.view(torch.int16)[0, :16] = -1
    for result in ranks.all_reduce([x, x], mode=ONE_SHOT):
        ranks.check()
        assert result[0, :16].isnan().all() and (result[0, 16:] == 0).all()


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_a_rank_that_never_comes_is_named(mode: int) -> None:
    ranks = EmulatedRanks(4, timeout_s=0.3)
    made = problem("gemm_ar", 16, 520, 136, 4)
    made.run(ranks, mode=mode)
    results = made.call(ranks, mode=mode, absent={2})
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    assert (caught.value.op, caught.value.epoch) == ("gemm_ar", 2)
    assert caught.value.rank != 2
    if mode == ONE_SHOT:
        assert caught.value.peer == 2
    for rank in (0, 1, 3):
        assert results[rank].isnan().any(), "a result without one rank's part passes for a result"
