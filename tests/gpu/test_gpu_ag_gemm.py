"""AllGather+GEMM with all ranks on one GPU: the kernels, slots, signals and epochs are the real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import pytest
import torch
from emulate_graphs import EmulatedGraphRanks

import flux
from flux._native import core
from flux.testing import AgGemmCase, GemmRsCase
from flux.testing.emulate import EmulatedRanks

DTYPES = [torch.bfloat16, torch.float16]
# Rows of a shard (around one block of 128, and more), n, k.
SHAPES = [(1, 8, 8), (127, 200, 72), (128, 64, 64), (129, 264, 520), (300, 1032, 200)]
TRANSPORTS = [pytest.param(False, id="pushed"), pytest.param(True, id="copied")]


def gpu_inputs(
    case: AgGemmCase,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
    made = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
    biases = [bias for _, _, bias in made if bias is not None]
    return [x for x, _, _ in made], [weight for _, weight, _ in made], biases or None


def assert_results(case: AgGemmCase, results: list[torch.Tensor], what: str = "") -> None:
    for rank, result in enumerate(results):
        assert torch.equal(result, case.expected(rank, "cuda")), f"rank {rank} of {case} {what}"


def assert_gathered(case: AgGemmCase, results: list[torch.Tensor], what: str = "") -> None:
    for rank, result in enumerate(results):
        assert torch.equal(result, case.gathered("cuda")), f"rank {rank} of {case} {what}"


def gathered_everywhere(case: AgGemmCase) -> Callable[[int], torch.Tensor]:
    """What all_gather gives each rank."""
    return lambda rank: case.gathered("cuda")


def assert_exact(ranks: EmulatedRanks, case: AgGemmCase, config: int = -1, copied: bool = False) -> None:
    xs, weights, biases = gpu_inputs(case)
    results = ranks.ag_gemm(
        xs, weights, biases, transpose_weight=case.transpose_weight, config=config, copied=copied
    )
    ranks.check()
    assert_results(case, results, f"config {config}")


def delay(ranks: EmulatedRanks, rank: int, cycles: int) -> None:
    """Lets one rank come late to its next call."""
    with torch.cuda.stream(ranks.streams[rank]):
        torch.cuda._sleep(cycles)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("config", [t.id for t in core.tile_configs() if t.supports_gathering])
def test_every_tile_shape_and_cluster(world_size: int, config: int, copied: bool) -> None:
    ranks = EmulatedRanks(world_size)
    layouts = (False, True) if core.tile_configs()[config].supports_transposed_weight else (False,)
    for cluster in (1, 2, 3):
        for number, (rows, n, k) in enumerate(SHAPES):
            flags = number + cluster
            for transpose_weight in layouts:
                case = AgGemmCase(
                    rows * world_size,
                    n,
                    k,
                    world_size,
                    DTYPES[flags % 2],
                    transpose_weight,
                    bias=flags % 3 == 0,
                    seed=flags,
                )
                assert_exact(ranks, case, config | cluster << 8, copied)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rows", [128, 300, 700])
@pytest.mark.parametrize("chunk_rows", [128, 256, 384, 1024])
def test_any_size_of_copies(world_size: int, rows: int, chunk_rows: int) -> None:
    ranks = EmulatedRanks(world_size)
    for seed in range(3):
        case = AgGemmCase(rows * world_size, 264, 136, world_size, seed=seed)
        xs, weights, _ = gpu_inputs(case)
        results = ranks.ag_gemm(xs, weights, copied=True, chunk_rows=chunk_rows)
        ranks.check()
        assert_results(case, results)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_shapes_back_to_back_without_waiting(world_size: int, copied: bool) -> None:
    """Ranks run ahead of each other as far as the protocol lets them: nothing joins their streams."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    for batch in range(5):
        cases = [
            AgGemmCase(
                world_size * rng.randint(1, 400),
                8 * rng.randint(1, 128),
                8 * rng.randint(1, 40),
                world_size,
                seed=20 * batch + i,
            )
            for i in range(20)
        ]
        inputs = [gpu_inputs(case) for case in cases]
        torch.cuda.synchronize()
        results = []
        for xs, weights, _ in inputs:
            if rng.random() < 0.3:
                delay(ranks, rng.randrange(world_size), 300_000)
            results.append(ranks.ag_gemm(xs, weights, join=False, copied=copied))
        ranks.check()
        for case, outs in zip(cases, results, strict=True):
            assert_results(case, outs)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_operators_take_turns_on_one_workspace(world_size: int) -> None:
    """What is pushed shares epochs, slots and signal words with gemm_rs; what is copied comes in between."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    for batch in range(5):
        calls: list[Callable[[], list[torch.Tensor]]] = []
        checks: list[tuple[str, Callable[[int], torch.Tensor]]] = []
        for i in range(24):
            rows, n, k = rng.randint(1, 400), 8 * rng.randint(1, 128), 8 * rng.randint(1, 40)
            m, seed = rows * world_size, 24 * batch + i
            op = ("ag_gemm", "gemm_rs", "all_gather", "copied")[i % 4 if i < 8 else rng.randrange(4)]
            if op == "gemm_rs":
                scattered = GemmRsCase(m, n, k, world_size, seed=seed)
                parts = [scattered.inputs(rank, "cuda") for rank in range(world_size)]
                partial_xs, partial_weights = [x for x, _, _ in parts], [w for _, w, _ in parts]
                calls.append(partial(ranks.gemm_rs, partial_xs, partial_weights, join=False))
                checks.append((f"{op} {scattered}", partial(scattered.expected, device="cuda")))
                continue
            case = AgGemmCase(m, n, k, world_size, seed=seed)
            xs, weights, _ = gpu_inputs(case)
            if op == "all_gather":
                calls.append(partial(ranks.all_gather, xs, join=False))
                checks.append((f"{op} {case}", gathered_everywhere(case)))
            else:
                calls.append(partial(ranks.ag_gemm, xs, weights, join=False, copied=op == "copied"))
                checks.append((f"{op} {case}", partial(case.expected, device="cuda")))
        torch.cuda.synchronize()
        results = []
        for call in calls:
            if rng.random() < 0.3:
                delay(ranks, rng.randrange(world_size), 300_000)
            results.append(call())
        ranks.check()
        for (what, expected), outs in zip(checks, results, strict=True):
            for rank, out in enumerate(outs):
                assert torch.equal(out, expected(rank)), f"rank {rank}: {what}"


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_several_weights_for_rows_gathered_once(world_size: int, copied: bool) -> None:
    """While one rank still multiplies what it has gathered, the others already send for the next call."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    rounds = []
    for seed in range(12):
        first = AgGemmCase(rng.randint(1, 300) * world_size, 520, 136, world_size, bias=True, seed=seed)
        cases = [first, replace(first, n=264), replace(first, n=1032, bias=False)]
        rounds.append((cases, [gpu_inputs(case) for case in cases]))
    torch.cuda.synchronize()
    results = []
    for _, inputs in rounds:
        xs = inputs[0][0]
        outs = []
        for number, (_, weights, biases) in enumerate(inputs):
            outs.append(ranks.ag_gemm(xs, weights, biases, join=False, copied=copied, reuse=number > 0))
            delay(ranks, rng.randrange(world_size), 200_000)
        results.append((outs, ranks.collect(xs, join=False, copied=copied)))
    ranks.check()
    for (cases, _), (outs, gathered) in zip(rounds, results, strict=True):
        for case, out in zip(cases, outs, strict=True):
            assert_results(case, out)
        assert_gathered(cases[0], gathered)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gathered_rows(world_size: int, copied: bool) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n, k) in enumerate([*SHAPES, (700, 64, 1032)]):
        case = AgGemmCase(rows * world_size, n, k, world_size, DTYPES[number % 2], seed=number)
        xs, weights, _ = gpu_inputs(case)
        results = ranks.ag_gemm(xs, weights, copied=copied)
        collected = ranks.collect(xs, copied=copied)
        ranks.check()
        assert_results(case, results)
        assert_gathered(case, collected, "collected")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_that_are_gathered_beside_gemm_rs(world_size: int) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n, k) in enumerate([*SHAPES, (700, 64, 1032)]):
        case = AgGemmCase(rows * world_size, 8, k, world_size, DTYPES[number % 2], seed=number)
        beside = GemmRsCase(rows * world_size, n, 264, world_size, DTYPES[number % 2], seed=number)
        xs = gpu_inputs(case)[0]
        made = [beside.inputs(rank, "cuda") for rank in range(world_size)]
        ranks.begin_all_gather(xs, chunk_rows=256)
        products = ranks.gemm_rs([x for x, _, _ in made], [w for _, w, _ in made])
        gathered = ranks.all_gather(xs, copied=True, begun=True, chunk_rows=256)
        ranks.check()
        for rank, product in enumerate(products):
            assert torch.equal(product, beside.expected(rank, "cuda")), (rank, beside)
        assert_gathered(case, gathered, "gathered beside gemm_rs")


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_all_gather_back_to_back_without_waiting(world_size: int, copied: bool) -> None:
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    cases = [
        AgGemmCase(rows * world_size, 8, k, world_size, DTYPES[seed % 2], seed=seed)
        for seed, (rows, k) in enumerate(
            [(rows, k) for rows, _, k in SHAPES]
            + [(rng.randint(1, 900), 8 * rng.randint(1, 200)) for _ in range(25)]
        )
    ]
    inputs = [gpu_inputs(case)[0] for case in cases]
    torch.cuda.synchronize()
    results = []
    for xs in inputs:
        if rng.random() < 0.3:
            delay(ranks, rng.randrange(world_size), 300_000)
        results.append(ranks.all_gather(xs, join=False, copied=copied))
    ranks.check()
    for case, outs in zip(cases, results, strict=True):
        assert_gathered(case, outs)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("op", ["ag_gemm", "all_gather"])
def test_x_may_be_overwritten_behind_the_call(op: str, copied: bool) -> None:
    """On its stream: a rank that is done has not left rows behind that still have to travel."""
    world_size = 3
    ranks = EmulatedRanks(world_size)
    cases = [AgGemmCase(300 * world_size, 264, 2048, world_size, seed=seed) for seed in range(8)]
    inputs = [gpu_inputs(case) for case in cases]
    xs = [torch.empty_like(x) for x in inputs[0][0]]
    torch.cuda.synchronize()
    results = []
    for number, (new, weights, _) in enumerate(inputs):
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                xs[rank].copy_(new[rank])
        delay(ranks, number % world_size, 500_000)
        if op == "ag_gemm":
            results.append(ranks.ag_gemm(xs, weights, join=False, copied=copied))
        else:
            results.append(ranks.all_gather(xs, join=False, copied=copied))
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                xs[rank].fill_(7)
    ranks.check()
    for case, outs in zip(cases, results, strict=True):
        (assert_results if op == "ag_gemm" else assert_gathered)(case, outs)


def test_bitwise_repeatable_however_rows_travel() -> None:
    ranks = EmulatedRanks(4)
    g = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(200, 328, generator=g, device="cuda").bfloat16() for _ in range(4)]
    weights = [torch.randn(520, 328, generator=g, device="cuda").bfloat16() for _ in range(4)]
    config = core.select_ag_gemm(800, 520, 328, False, 4, ranks.num_sms).config
    first = ranks.ag_gemm(xs, weights, config=config)
    for number in range(20):
        again = ranks.ag_gemm(xs, weights, config=config, copied=number % 2 == 1)
        ranks.check()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"call {number}"
    atol, rtol = flux.testing.tolerance(328, torch.bfloat16)
    for result, weight in zip(first, weights, strict=True):
        exact = torch.cat(xs).double() @ weight.double().t()
        assert ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all()


def test_graph_replay() -> None:
    ranks = EmulatedGraphRanks(4)
    cases = [AgGemmCase(4 * 200, 520, 136, 4, bias=True, seed=seed) for seed in range(3)]
    others = [replace(case, n=264) for case in cases]
    reduced = [GemmRsCase(4 * 200, 520, 136, 4, seed=seed) for seed in range(3)]

    def all_inputs(number: int) -> tuple[list[torch.Tensor], ...]:
        xs, weights, biases = gpu_inputs(cases[number])
        _, other_weights, other_biases = gpu_inputs(others[number])
        assert biases is not None and other_biases is not None
        parts = [reduced[number].inputs(rank, "cuda") for rank in range(4)]
        return (
            xs,
            weights,
            biases,
            other_weights,
            other_biases,
            [x for x, _, _ in parts],
            [weight for _, weight, _ in parts],
        )

    static = all_inputs(0)

    def calls() -> list[list[torch.Tensor]]:
        xs, weights, biases, other_weights, other_biases, partial_xs, partial_weights = static
        return [
            ranks.ag_gemm(xs, weights, biases),
            ranks.ag_gemm(xs, other_weights, other_biases, reuse=True),
            ranks.collect(xs),
            ranks.gemm_rs(partial_xs, partial_weights),
            ranks.all_gather(xs),
            ranks.ag_gemm(xs, weights, biases),
        ]

    calls()  # makes room
    ranks.check()
    results, replay = ranks.capture(calls)
    for number in range(30):
        which = number % 3
        for old, new in zip(sum(static, []), sum(all_inputs(which), []), strict=True):
            old.copy_(new)
        for result in sum(results, []):
            result.fill_(7)
        replay()
        ranks.check()
        what = f"replay {number}"
        assert_results(cases[which], results[0], what)
        assert_results(others[which], results[1], what)
        assert_gathered(cases[which], results[2], what)
        for rank, result in enumerate(results[3]):
            assert torch.equal(result, reduced[which].expected(rank, "cuda")), f"{what}: gemm_rs, rank {rank}"
        assert_gathered(cases[which], results[4], what)
        assert_results(cases[which], results[5], what)


def assert_nothing_wrong(
    results: list[torch.Tensor],
    expected: Callable[[int], torch.Tensor],
    missing: int,
    may_differ: Collection[int] = (),
) -> None:
    """Own rows are exact, those of the missing rank NaN, and of the others each element is one or the other.

    Args:
        may_differ: ranks whose rows are not looked at.
    """
    world_size = len(results)
    for rank in set(range(world_size)) - {missing}:
        shards = zip(results[rank].chunk(world_size), expected(rank).chunk(world_size), strict=True)
        for source, (got, want) in enumerate(shards):
            what = f"rows of rank {source} on rank {rank}"
            if source == rank:
                assert torch.equal(got, want), what
            elif source == missing:
                assert got.isnan().all(), what
            elif source not in may_differ:
                assert (got.isnan() | (got == want)).all(), what


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("op", ["ag_gemm", "all_gather"])
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_rank_that_never_comes_is_named(missing: int, op: str, copied: bool) -> None:
    ranks = EmulatedRanks(4, timeout_s=0.3)
    cases = [AgGemmCase(4 * 200, 520, 136, 4, seed=seed) for seed in range(7)]
    inputs = [gpu_inputs(case)[:2] for case in cases]

    def call(number: int, absent: Collection[int]) -> list[torch.Tensor]:
        xs, weights = inputs[number]
        if op == "ag_gemm":
            return ranks.ag_gemm(xs, weights, absent=absent, copied=copied)
        return ranks.all_gather(xs, absent=absent, copied=copied)

    def expected(number: int) -> Callable[[int], torch.Tensor]:
        if op == "all_gather":
            return gathered_everywhere(cases[number])
        return partial(cases[number].expected, device="cuda")

    # Both buffers then hold rows of earlier calls, which must not pass for those that never come.
    for number in range(3):
        results = call(number, ())
        ranks.check()
        for rank, result in enumerate(results):
            assert torch.equal(result, expected(number)(rank))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    results = call(3, {missing})
    end.record()
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    error = caught.value
    assert (error.op, error.peer, error.epoch, error.seen) == (op, missing, 4, 3)
    assert error.rank != missing
    assert 250 < start.elapsed_time(end) < 3000
    assert_nothing_wrong(results, expected(3), missing)
    # Later kernels see that the workspace is lost, and do not wait again.
    start.record()
    later = [call(number, {missing}) for number in (4, 5, 6)]
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 250
    for number, results in zip((4, 5, 6), later, strict=True):
        # Ranks that do not wait for each other any more push nothing; but the host, which has not asked for
        # errors since, goes on copying into buffers that a peer may still read.
        assert_nothing_wrong(results, expected(number), missing, may_differ=range(4) if copied else ())


def test_a_late_rank_gets_its_result_or_an_error_but_never_another_calls_rows() -> None:
    ranks = EmulatedRanks(2, timeout_s=0.3)
    cases = [AgGemmCase(2 * 200, 520, 136, 2, seed=seed) for seed in range(4)]
    assert_exact(ranks, cases[0])
    calls = [gpu_inputs(case)[:2] for case in cases[1:]]
    # Rank 0 gives up in the first call and runs on through the other two, while rank 1 has started none.
    for xs, weights in calls:
        ranks.ag_gemm(xs, weights, absent={1})
    with pytest.raises(flux.CommTimeoutError):
        ranks.check()
    first = ranks.ag_gemm(*calls[0], absent={0})[1]
    second = ranks.ag_gemm(*calls[1], absent={0})[1]
    torch.cuda.synchronize()
    assert torch.equal(first, cases[1].expected(1, "cuda")), "what rank 0 sent before it gave up is whole"
    assert second[:200].isnan().all(), "rank 0 has sent nothing for this call"
    assert torch.equal(second[200:], cases[2].expected(1, "cuda")[200:]), "own rows wait for nobody"


@pytest.mark.parametrize("copied", TRANSPORTS)
def test_collected_rows_of_a_missing_rank_are_no_rows_of_an_earlier_call(copied: bool) -> None:
    missing, ranks = 1, EmulatedRanks(3, timeout_s=0.3)
    cases = [AgGemmCase(3 * 200, 520, 136, 3, seed=seed) for seed in range(3)]
    for case in cases[:2]:  # both buffers hold rows
        ranks.ag_gemm(*gpu_inputs(case)[:2], copied=copied)
        ranks.check()
    xs, weights, _ = gpu_inputs(cases[2])
    ranks.ag_gemm(xs, weights, absent={missing}, copied=copied)
    collected = ranks.collect(xs, absent={missing}, copied=copied)
    with pytest.raises(flux.CommTimeoutError):
        ranks.check()
    assert_nothing_wrong(collected, gathered_everywhere(cases[2]), missing)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("rows", [1, 3, 130])
def test_blocks_of_more_bytes_than_an_int_counts(rows: int, copied: bool) -> None:
    """128 rows have at least 2**31 bytes."""
    world_size, k = 2, 2**24 if rows == 1 else 2**23 + 8
    ranks = EmulatedRanks(world_size, timeout_s=20)
    # Bits, as far as 16 of them can tell columns, rows and ranks apart.
    columns = torch.arange(k, device="cuda", dtype=torch.int32) * 40503 >> 3
    full = torch.stack([(columns + 977 * row).to(torch.int16) for row in range(world_size * rows)])
    results = ranks.all_gather(list(full.view(torch.bfloat16).chunk(world_size)), copied=copied)
    ranks.check()
    for rank, result in enumerate(results):
        assert torch.equal(result.view(torch.int16), full), rank
