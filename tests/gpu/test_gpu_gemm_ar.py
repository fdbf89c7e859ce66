"""GEMM+AllReduce, AllReduce and ReduceScatter with all ranks on one GPU: kernels, buffers and epochs are the
real ones.
"""

from __future__ import annotations

import random

import pytest
import torch
from emulate_graphs import EmulatedGraphRanks
from emulate_int8 import EmulatedInt8Ranks

import flux
from flux._native import core
from flux.ops import gemm as products
from flux.ops.gemm_ar import rms_norm
from flux.ops.ways import int8_sum
from flux.testing import GemmRsCase
from flux.testing.emulate import EmulatedRanks

DTYPES = [torch.bfloat16, torch.float16]
ONE_SHOT, TWO_SHOT = 0, 1
SHAPES = [(1, 8, 8), (1, 4096, 256), (5, 136, 72), (16, 1024, 512), (64, 520, 264), (130, 264, 520)]
# Several tiles for each CTA, which gives one away while it computes the next.
SEVERAL_TILES = [(1, 8200, 264), (192, 2056, 520)]


def gpu_inputs(case: GemmRsCase) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    inputs = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
    return [x for x, _, _ in inputs], [weight for _, weight, _ in inputs], inputs[0][2]


def assert_exact(ranks: EmulatedRanks, case: GemmRsCase, mode: int, config: int = -1) -> None:
    xs, weights, bias = gpu_inputs(case)
    results = ranks.gemm_ar(
        xs, weights, bias, mode=mode, transpose_weight=case.transpose_weight, config=config
    )
    ranks.check()
    expected = case.expected_sum("cuda")
    for rank, result in enumerate(results):
        assert torch.equal(result, expected), f"rank {rank} of {case}, mode {mode}, config {config}"


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_every_swap_ab_tile(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for tile in range(core.NUM_SWAP_AB):
        for number, (m, n, k) in enumerate(SHAPES + SEVERAL_TILES):
            split = [1, 2, 4][(tile + number) % 3]
            if split > core.swap_ab_stage_blocks(tile, k) or split * world_size > 16:
                split = 1
            case = GemmRsCase(
                m, n, k, world_size, DTYPES[number % 2], number % 2 == 1, bias=number % 3 == 0, seed=tile
            )
            sharers = 2 if split == 1 and number % 2 and core.swap_ab_in_pairs(tile) else 1
            assert_exact(ranks, case, mode, core.FIRST_SWAP_AB + tile | split << 8 | sharers << 16)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_every_ordinary_tile_that_sums_in_its_launch(world_size: int, mode: int) -> None:
    """Single CTAs, pairs one above the other, two parts of K; edges everywhere, and several tiles a CTA."""
    ranks = EmulatedRanks(world_size)
    shapes = [(1, 8, 1024), (65, 1032, 1160), (130, 264, 1032), (300, 2056, 1096), (256, 4096, 1024)]
    alone, pair, split = 1, 2, 4
    for tile in core.tile_configs():
        if tile.block_n > 128:
            continue
        for number, (m, n, k) in enumerate(shapes):
            transposed = number % 2 == 1 and tile.block_n % 64 == 0
            for cluster in (alone, pair, split):
                if cluster == split and -(-m // 128) * -(-n // tile.block_n) > ranks.num_sms // 2:
                    continue
                case = GemmRsCase(
                    m, n, k, world_size, DTYPES[number % 2], transposed, bias=number % 3 == 0, seed=tile.id
                )
                assert_exact(ranks, case, mode, tile.id | cluster << 8)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_what_the_cost_model_chooses_and_more_rows_than_a_launch_takes(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (m, n, k) in enumerate([(4, 512, 1024), (64, 1032, 200), (300, 520, 136)]):
        assert_exact(ranks, GemmRsCase(m, n, k, world_size, DTYPES[number % 2], bias=True), mode)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_shapes_back_to_back_without_waiting(world_size: int) -> None:
    """Ranks run ahead of each other as far as the protocol lets them: nothing joins their streams."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    assert_exact(ranks, GemmRsCase(64, 1024, 64, world_size), TWO_SHOT)  # makes room
    for _ in range(5):
        calls = []
        for _ in range(20):
            case = GemmRsCase(
                rng.randint(1, 64),
                8 * rng.randint(1, 128),
                8 * rng.randint(1, 40),
                world_size,
                bias=rng.random() < 0.5,
                seed=rng.randint(0, 999),
            )
            calls.append((case, gpu_inputs(case), rng.randint(0, 1)))
        torch.cuda.synchronize()
        results = [
            ranks.gemm_ar(xs, weights, bias, mode=mode, join=False) for _, (xs, weights, bias), mode in calls
        ]
        ranks.check()
        for (case, _, mode), outs in zip(calls, results, strict=True):
            expected = case.expected_sum("cuda")
            for rank, out in enumerate(outs):
                assert torch.equal(out, expected), f"rank {rank} of {case}, mode {mode}"


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_graph_replay(mode: int) -> None:
    ranks = EmulatedGraphRanks(4)
    cases = [GemmRsCase(24, 520, 264, 4, bias=True, seed=seed) for seed in range(3)]
    xs, weights, bias = gpu_inputs(cases[0])
    assert bias is not None
    ranks.gemm_ar(xs, weights, bias, mode=mode)  # makes room
    ranks.check()
    results, replay = ranks.capture(lambda: ranks.gemm_ar(xs, weights, bias, mode=mode))
    for number in range(30):
        case = cases[number % 3]
        for static, new in zip((*xs, *weights), sum(map(list, gpu_inputs(case)[:2]), []), strict=True):
            static.copy_(new)
        bias.copy_(case.inputs(0, "cuda")[2])
        replay()
        ranks.check()
        for rank, result in enumerate(results):
            assert torch.equal(result, case.expected_sum("cuda")), f"replay {number}, rank {rank}"


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        # In a swap-AB tile, in ordinary ones, of which two CTAs may share one, and in two launches.
        (9, 1032, -1),
        (140, 1032, 5 | 1 << 8),
        (140, 1032, 5 | 4 << 8),
        (140, 1032, 9 | 1 << 8),
        (140, 1032, 0 | 1 << 8),
        # Several rows for each CTA, which writes norms where others might still read products.
        (1025, 4104, 0 | 1 << 8),
        # Rows that fit into a CTA's memory, but not with the norm's weight, and rows that do not.
        (4, 13312, 0 | 1 << 8),
        (5, 25600, 0 | 1 << 8),
        (2, 65536, -1),
        # Rows that CTAs share, also unevenly.
        (1, 4104, -1),
        (5, 8200, 5 | 1 << 8),
        # As many CTAs as a sweep says.
        (1, 4104, core.FIRST_SWAP_AB | 1 << 8 | 1 << 16 | 1 << 24),
        (5, 4104, core.FIRST_SWAP_AB | 1 << 8 | 1 << 16 | 7 << 24),
    ],
)
def test_residual_and_norm(
    mode: int, dtype: torch.dtype, world_size: int, m: int, n: int, config: int
) -> None:
    ranks = EmulatedRanks(world_size)
    case = GemmRsCase(m, n, 264, world_size, dtype, bias=True)
    xs, weights, bias = gpu_inputs(case)
    residual = case.residual("cuda")
    norm_weight = torch.linspace(0.5, 1.5, n, device="cuda").to(dtype)
    results = ranks.gemm_ar(
        xs, weights, bias, mode=mode, residual=residual, norm_weight=norm_weight, config=config
    )
    plain = ranks.gemm_ar(xs, weights, bias, mode=mode, residual=residual, config=config)
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


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
def test_all_reduce(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    # The last with many threads, and several vectors for each of them.
    for m, n in [(1, 8), (7, 1000), (33, 2048), (277, 4000)]:
        # Multiples of 2**rank below 2**(rank + 1): a missing or doubled one changes every element.
        xs = [torch.full((m, n), float(2**rank), device="cuda").bfloat16() for rank in range(world_size)]
        xs[0][:, ::3] = 0
        results = ranks.all_reduce(xs, mode=mode)
        ranks.check()
        expected = sum(x.float() for x in xs)
        assert isinstance(expected, torch.Tensor)
        for result in results:
            assert torch.equal(result.float(), expected), (m, n)


@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_all_reduce_with_residual_and_norm(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for m, n in [(1, 64), (5, 4096), (17, 12288)]:
        case = GemmRsCase(m, n, 64, world_size, torch.bfloat16, seed=m)
        xs, weights, _ = gpu_inputs(case)
        partials = [products.reference(x, weight) for x, weight in zip(xs, weights, strict=True)]
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
        xs, weights, _ = gpu_inputs(case)
        partials = [products.reference(x, weight) for x, weight in zip(xs, weights, strict=True)]
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
    """The bits of int8_sum, which the CPU tests compare with a model. Sums of 16 bits between them."""
    ranks = EmulatedInt8Ranks(world_size)
    for number, (rows, n) in enumerate([(1, 8), (3, 1000), (130, 2048), (1, 8)]):
        g = torch.Generator().manual_seed(number)
        shape = (world_size, rows, n)
        sizes = [torch.exp2(torch.randint(-6, 7, shape, generator=g).float()) for _ in range(world_size)]
        wholes = [(torch.randn(shape, generator=g) * size).to(dtype) for size in sizes]
        xs = [whole.cuda() for whole in wholes]
        torch.cuda.synchronize()
        found = [ranks.reduce_scatter_int8(xs, rounds_own=call == 1, join=False) for call in range(3)]
        if dtype != torch.float32:
            ranks.reduce_scatter([x.view(-1, n) for x in xs], join=False)
        found.append(ranks.reduce_scatter_int8(xs, join=False))
        ranks.check()
        travelled = [int8_sum.dequantised(*int8_sum.quantised(x.view(-1, n))).view(shape) for x in wholes]
        for call, results in enumerate(found):
            for rank, result in enumerate(results):
                total = torch.zeros(rows, n)
                for source in range(world_size):
                    whole = source == rank and call != 1
                    total += (wholes if whole else travelled)[source][rank]
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
    case = GemmRsCase(16, 520, 136, 4)
    assert_exact(ranks, case, mode)
    xs, weights, _ = gpu_inputs(case)
    results = ranks.gemm_ar(xs, weights, mode=mode, absent={2})
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    assert (caught.value.op, caught.value.epoch) == ("gemm_ar", 2)
    assert caught.value.rank != 2
    if mode == ONE_SHOT:
        assert caught.value.peer == 2
    for rank in (0, 1, 3):
        assert results[rank].isnan().any(), "a result without one rank's part passes for a result"
