"""GEMM+ReduceScatter with all ranks on one GPU: the kernels, slots, signals and epochs are the real ones."""

from __future__ import annotations

import random

import pytest
import torch
from emulate_graphs import EmulatedGraphRanks

import flux
from flux._native import core
from flux.testing import GemmRsCase
from flux.testing.emulate import EmulatedRanks

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 8, 8), (64, 64, 64), (127, 200, 72), (129, 264, 520), (600, 1032, 200)]  # rows of a shard, n, k


def gpu_inputs(case: GemmRsCase) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    inputs = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
    return [x for x, _, _ in inputs], [weight for _, weight, _ in inputs], inputs[0][2]


def assert_exact(ranks: EmulatedRanks, case: GemmRsCase, config: int = -1) -> None:
    xs, weights, bias = gpu_inputs(case)
    results = ranks.gemm_rs(xs, weights, bias, transpose_weight=case.transpose_weight, config=config)
    ranks.check()
    for rank, result in enumerate(results):
        assert torch.equal(result, case.expected(rank, "cuda")), f"rank {rank} of {case}, config {config}"


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("config", [t.id for t in core.tile_configs() if t.supports_sending])
def test_every_tile_shape_and_cluster(world_size: int, config: int) -> None:
    ranks = EmulatedRanks(world_size)
    for cluster in (1, 2, 3):
        for number, (rows, n, k) in enumerate(SHAPES):
            flags = number + cluster
            case = GemmRsCase(
                rows * world_size, n, k, world_size, DTYPES[flags % 2], False, bias=flags % 3 == 0, seed=flags
            )
            assert_exact(ranks, case, config | cluster << 8)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_transposed_weight(world_size: int, bias: bool) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n, k) in enumerate(SHAPES):
        dtype = DTYPES[number % 2]
        assert_exact(ranks, GemmRsCase(rows * world_size, n, k, world_size, dtype, True, bias, seed=number))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tiles_that_copy_engines_carry(world_size: int) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n, k) in enumerate(SHAPES):
        for config in (1, 5 | 2 << 8, 4):
            case = GemmRsCase(
                rows * world_size, n, k, world_size, DTYPES[number % 2], bias=number % 3 == 0, seed=number
            )
            xs, weights, bias = gpu_inputs(case)
            for chunks in (1, 3):
                results = ranks.gemm_rs(xs, weights, bias, config=config, copied=True, chunks=chunks)
                ranks.check()
                for rank, result in enumerate(results):
                    assert torch.equal(result, case.expected(rank, "cuda")), (rank, case, config, chunks)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_shapes_back_to_back_without_waiting(world_size: int) -> None:
    """Ranks run ahead of each other as far as the protocol lets them: nothing joins their streams."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    largest = GemmRsCase(world_size * 400, 1024, 64, world_size)
    assert_exact(ranks, largest)
    for _ in range(5):
        cases = [
            GemmRsCase(
                world_size * rng.randint(1, 400), 8 * rng.randint(1, 128), 8 * rng.randint(1, 40), world_size
            )
            for _ in range(20)
        ]
        inputs = [gpu_inputs(case) for case in cases]
        torch.cuda.synchronize()
        results = [ranks.gemm_rs(xs, weights, join=False) for xs, weights, _ in inputs]
        ranks.check()
        for case, outs in zip(cases, results, strict=True):
            for rank, out in enumerate(outs):
                assert torch.equal(out, case.expected(rank, "cuda")), f"rank {rank} of {case}"


def test_bitwise_repeatable() -> None:
    ranks = EmulatedRanks(4)
    g = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(512, 320, generator=g, device="cuda").bfloat16() for _ in range(4)]
    weights = [torch.randn(520, 320, generator=g, device="cuda").bfloat16() for _ in range(4)]
    first = ranks.gemm_rs(xs, weights)
    for _ in range(20):
        again = ranks.gemm_rs(xs, weights)
        ranks.check()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    exact = sum(x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True))
    atol, rtol = flux.testing.tolerance(320, torch.bfloat16, 4)
    assert ((torch.cat(first).double() - exact).abs() <= atol + rtol * exact.abs()).all()


def test_graph_replay() -> None:
    ranks = EmulatedGraphRanks(4)
    cases = [GemmRsCase(4 * 200, 520, 136, 4, bias=True, seed=seed) for seed in range(3)]
    xs, weights, bias = gpu_inputs(cases[0])
    assert bias is not None
    ranks.gemm_rs(xs, weights, bias)  # makes room
    ranks.check()
    results, replay = ranks.capture(lambda: ranks.gemm_rs(xs, weights, bias))
    for number in range(30):
        case = cases[number % 3]
        for static, new in zip((*xs, *weights), sum(map(list, gpu_inputs(case)[:2]), []), strict=True):
            static.copy_(new)
        bias.copy_(case.inputs(0, "cuda")[2])
        replay()
        ranks.check()
        for rank, result in enumerate(results):
            assert torch.equal(result, case.expected(rank, "cuda")), f"replay {number}, rank {rank}"


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_rank_that_never_comes_is_named(missing: int) -> None:
    ranks = EmulatedRanks(4, timeout_s=0.3)
    case = GemmRsCase(4 * 200, 520, 136, 4)
    assert_exact(ranks, case)
    xs, weights, _ = gpu_inputs(case)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    ranks.gemm_rs(xs, weights, absent={missing})
    end.record()
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    error = caught.value
    assert (error.op, error.peer, error.epoch, error.seen) == ("gemm_rs", missing, 2, 1)
    assert error.rank != missing and error.tile is not None
    assert 250 < start.elapsed_time(end) < 3000
    # Later kernels see that the workspace is lost, and do not wait again.
    start.record()
    for _ in range(3):
        ranks.gemm_rs(xs, weights, absent={missing})
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 250


def test_a_late_rank_gets_its_result_or_an_error_but_never_another_calls_tiles() -> None:
    ranks = EmulatedRanks(2, timeout_s=0.3)
    cases = [GemmRsCase(2 * 200, 520, 136, 2, seed=seed) for seed in range(4)]
    assert_exact(ranks, cases[0])
    calls = [gpu_inputs(case)[:2] for case in cases[1:]]
    # Rank 0 gives up in the first call and runs on through the other two, while rank 1 has started none.
    for xs, weights in calls:
        ranks.gemm_rs(xs, weights, absent={1})
    with pytest.raises(flux.CommTimeoutError):
        ranks.check()
    first = ranks.gemm_rs(*calls[0], absent={0})[1]
    second = ranks.gemm_rs(*calls[1], absent={0})[1]
    torch.cuda.synchronize()
    assert torch.equal(first, cases[1].expected(1, "cuda")), "what rank 0 sent before it gave up is whole"
    assert second.isnan().all(), "rank 0 has sent nothing for this call"
