"""GEMM+ReduceScatter, AllGather+GEMM and AllGather with all ranks on one GPU."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import DTYPES, How, Problem, check_back_to_back, check_replays, delay, problem
from torch import Tensor

import flux
from flux._native import core
from flux.plan.choose import PlanInput, plan_gemm_rs
from flux.plan.gather import plan_ag_gemm
from flux.testing.emulate import EmulatedRanks

# Rows of a shard (around one block of 128, and more), n, k.
SHAPES = [(1, 8, 8), (64, 64, 64), (127, 200, 72), (128, 64, 64), (129, 264, 520), (600, 1032, 200)]
PUSHED, COPIED = {"copied": False}, {"copied": True}
TRANSPORTS = [pytest.param(False, id="pushed"), pytest.param(True, id="copied")]
TILES = [
    (op, how, config)
    for op, supports in (("gemm_rs", "supports_sending"), ("ag_gemm", "supports_gathering"))
    for how in (PUSHED, COPIED)
    for config in (-1, *(tile.id for tile in core.tile_configs() if getattr(tile, supports)))
]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize(("op", "how", "config"), TILES)
def test_every_tile_shape_and_cluster(op: str, how: How, config: int, world_size: int) -> None:
    """-1: the one that the model chooses."""
    ranks = EmulatedRanks(world_size)
    both = config < 0 or core.tile_configs()[config].supports_transposed_weight
    for cluster in (1, 2) if (op, how) == ("gemm_rs", COPIED) else (1, 2, 3):
        options = {**how, "config": config if config < 0 else config | cluster << 8}
        if op == "gemm_rs":
            options["chunks"] = cluster
        for number, (rows, n, k) in enumerate(SHAPES):
            flags = number + cluster
            for transposed in (False, True) if both else (False,):
                made = (rows, n, k, world_size, DTYPES[flags % 2], transposed, flags % 3 == 0, flags)
                problem(op, *made).run(ranks, **options)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rows", [128, 300, 700])
@pytest.mark.parametrize("chunk_rows", [128, 256, 384, 1024])
def test_any_size_of_copies(world_size: int, rows: int, chunk_rows: int) -> None:
    ranks = EmulatedRanks(world_size)
    for seed in range(3):
        made = problem("ag_gemm", rows, 264, 136, world_size, seed=seed)
        made.run(ranks, copied=True, chunk_rows=chunk_rows)


# What is pushed shares epochs, slots and signal words with gemm_rs; what is copied comes in between.
WAYS = {"pushed": PUSHED, "copied": COPIED}
MIXES: dict[str, list[tuple[str, How]]] = {
    "gemm_rs": [("gemm_rs", PUSHED)],
    **{f"{op}, {way}": [(op, WAYS[way])] for op in ("ag_gemm", "all_gather") for way in WAYS},
    "all": [("ag_gemm", PUSHED), ("gemm_rs", PUSHED), ("all_gather", PUSHED), ("ag_gemm", COPIED)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_many_shapes_back_to_back_without_waiting(world_size: int, mix: str) -> None:
    check_back_to_back(world_size, MIXES[mix])


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_several_weights_for_rows_gathered_once(world_size: int, copied: bool) -> None:
    """While one rank still multiplies what it has gathered, the others already send for the next call."""
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    rounds = []
    for seed in range(12):
        first = problem("ag_gemm", rng.randint(1, 300), 520, 136, world_size, bias=True, seed=seed)
        others = [replace(first.case, n=264), replace(first.case, n=1032, bias=False)]
        rounds.append([first, *(Problem("ag_gemm", case) for case in others)])
    torch.cuda.synchronize()
    results = []
    for problems in rounds:
        outs = []
        for number, each in enumerate(problems):
            each.xs = problems[0].xs
            outs.append(each.call(ranks, join=False, copied=copied, reuse=number > 0))
            delay(ranks, rng.randrange(world_size), 200_000)
        results.append((outs, ranks.collect(problems[0].xs, join=False, copied=copied)))
    ranks.check()
    for problems, (outs, gathered) in zip(rounds, results, strict=True):
        for each, out in zip(problems, outs, strict=True):
            each.assert_exact(out)
        Problem("all_gather", problems[0].case).assert_exact(gathered)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_that_are_gathered_beside_gemm_rs(world_size: int) -> None:
    ranks = EmulatedRanks(world_size)
    for number, (rows, n, k) in enumerate([*SHAPES, (700, 64, 1032)]):
        gathered = problem("all_gather", rows, 8, k, world_size, DTYPES[number % 2], seed=number)
        beside = problem("gemm_rs", rows, n, 264, world_size, DTYPES[number % 2], seed=number)
        ranks.begin_all_gather(gathered.xs, chunk_rows=256)
        products = beside.call(ranks)
        gathered.run(ranks, copied=True, begun=True, chunk_rows=256)
        beside.assert_exact(products)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("op", ["ag_gemm", "all_gather"])
def test_x_may_be_overwritten_behind_the_call(op: str, copied: bool) -> None:
    """On its stream: a rank that is done has not left rows behind that still have to travel."""
    world_size = 3
    ranks = EmulatedRanks(world_size)
    problems = [problem(op, 300, 264, 2048, world_size, seed=seed) for seed in range(8)]
    given = [each.xs for each in problems]
    xs = [torch.empty_like(x) for x in given[0]]
    torch.cuda.synchronize()
    results = []
    for number, (each, new) in enumerate(zip(problems, given, strict=True)):
        each.xs = xs
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                xs[rank].copy_(new[rank])
        delay(ranks, number % world_size, 500_000)
        results.append(each.call(ranks, join=False, copied=copied))
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                xs[rank].fill_(7)
    ranks.check()
    for each, result in zip(problems, results, strict=True):
        each.assert_exact(result)


@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
def test_bitwise_repeatable_however_rows_travel(op: str) -> None:
    ranks, gathers, rows = EmulatedRanks(4), op == "ag_gemm", 200 if op == "ag_gemm" else 512
    g = torch.Generator("cuda").manual_seed(0)
    xs, weights = (
        [torch.randn(count, 328, generator=g, device="cuda").bfloat16() for _ in range(4)]
        for count in (rows, 520)
    )
    select = core.select_ag_gemm if gathers else core.select_gemm_rs
    config = select(4 * rows if gathers else rows, 520, 328, False, 4, ranks.num_sms).config
    call = getattr(ranks, op)
    first = call(xs, weights, config=config)
    for number in range(20):
        again = call(xs, weights, config=config, copied=gathers and number % 2 == 1)
        ranks.check()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"call {number}"
    atol, rtol = flux.testing.tolerance(328, torch.bfloat16, 1 if gathers else 4)
    whole = torch.cat(xs).double()
    parts = [x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True)]
    shards = (
        [*torch.stack(parts).sum(0).chunk(4)] if not gathers else [whole @ w.double().t() for w in weights]
    )
    for result, exact in zip(first, shards, strict=True):
        assert ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all()


def test_graph_replay() -> None:
    def made(seed: int) -> list[Problem]:
        first = problem("ag_gemm", 200, 520, 136, 4, bias=True, seed=seed)
        second, gathered = Problem("ag_gemm", replace(first.case, n=264)), Problem("all_gather", first.case)
        second.xs = gathered.xs = first.xs
        return [first, second, gathered, problem("gemm_rs", 200, 520, 136, 4, bias=True, seed=seed)]

    def calls(ranks: EmulatedRanks, problems: list[Problem]) -> Iterator[tuple[int, list[Tensor]]]:
        first, second, gathered, reduced = problems
        yield 0, first.call(ranks)
        yield 1, second.call(ranks, reuse=True)
        yield 2, ranks.collect(first.xs)
        yield 3, reduced.call(ranks)
        yield 2, gathered.call(ranks)
        yield 3, reduced.call(ranks)
        yield 0, first.call(ranks)

    check_replays(made, calls)


def assert_nothing_wrong(
    of: Problem, results: list[Tensor], missing: int, may_differ: Collection[int] = ()
) -> None:
    """Gathered rows: own ones are exact, those of the missing rank NaN, and of the others each element is one
    or the other.

    Args:
        may_differ: ranks whose rows are not looked at.
    """
    world_size = len(results)
    for rank in set(range(world_size)) - {missing}:
        shards = zip(results[rank].chunk(world_size), of.expected(rank).chunk(world_size), strict=True)
        for source, (got, want) in enumerate(shards):
            what = f"rows of rank {source} on rank {rank}"
            if source == rank:
                assert torch.equal(got, want), what
            elif source == missing:
                assert got.isnan().all(), what
            elif source not in may_differ:
                assert (got.isnan() | (got == want)).all(), what


@pytest.mark.parametrize(
    ("op", "copied"),
    [("gemm_rs", False), *((op, c) for op in ("ag_gemm", "all_gather") for c in (False, True))],
)
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_rank_that_never_comes_is_named(missing: int, op: str, copied: bool) -> None:
    ranks = EmulatedRanks(4, timeout_s=0.3)
    problems = [problem(op, 200, 520, 136, 4, seed=seed) for seed in range(7)]
    # Both buffers then hold rows of earlier calls, which must not pass for those that never come.
    for each in problems[:3]:
        each.run(ranks, copied=copied)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    results = problems[3].call(ranks, absent={missing}, copied=copied)
    end.record()
    with pytest.raises(flux.CommTimeoutError) as caught:
        ranks.check()
    error = caught.value
    assert (error.op, error.peer, error.epoch, error.seen) == (op, missing, 4, 3)
    assert error.rank != missing and (op != "gemm_rs" or error.tile is not None)
    assert 250 < start.elapsed_time(end) < 3000
    # Later kernels see that the workspace is lost, and do not wait again.
    start.record()
    later = [each.call(ranks, absent={missing}, copied=copied) for each in problems[4:]]
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 250
    if op == "gemm_rs":
        return
    assert_nothing_wrong(problems[3], results, missing)
    for each, results in zip(problems[4:], later, strict=True):
        # Ranks that do not wait for each other any more push nothing; but the host, which has not asked for
        # errors since, goes on copying into buffers that a peer may still read.
        assert_nothing_wrong(each, results, missing, may_differ=range(4) if copied else ())


@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
def test_a_late_rank_gets_its_result_or_an_error_but_never_another_calls_rows(op: str) -> None:
    ranks = EmulatedRanks(2, timeout_s=0.3)
    problems = [problem(op, 200, 520, 136, 2, seed=seed) for seed in range(4)]
    problems[0].run(ranks)
    # Rank 0 gives up in the first call and runs on through the other two, while rank 1 has started none.
    for each in problems[1:]:
        each.call(ranks, absent={1})
    with pytest.raises(flux.CommTimeoutError):
        ranks.check()
    first, second = (each.call(ranks, absent={0})[1] for each in problems[1:3])
    torch.cuda.synchronize()
    assert torch.equal(first, problems[1].expected(1)), "what rank 0 sent before it gave up is whole"
    if op == "ag_gemm":
        assert torch.equal(second[200:], problems[2].expected(1)[200:]), "own rows wait for nobody"
        second = second[:200]
    assert second.isnan().all(), "rank 0 has sent nothing for this call"


@pytest.mark.parametrize("copied", TRANSPORTS)
def test_collected_rows_of_a_missing_rank_are_no_rows_of_an_earlier_call(copied: bool) -> None:
    missing, ranks = 1, EmulatedRanks(3, timeout_s=0.3)
    problems = [problem("ag_gemm", 200, 520, 136, 3, seed=seed) for seed in range(3)]
    for each in problems[:2]:  # both buffers hold rows
        each.run(ranks, copied=copied)
    how: Any = {"absent": {missing}, "copied": copied}
    problems[2].call(ranks, **how)
    collected = ranks.collect(problems[2].xs, **how)
    with pytest.raises(flux.CommTimeoutError):
        ranks.check()
    assert_nothing_wrong(Problem("all_gather", problems[2].case), collected, missing)


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


# Batch invariance: random data, rows in batches of many sizes, compared bit by bit.
POOL = 300  # rows from which batches are drawn
PROBLEMS = [(264, 520), (4096, 1024), (1280, 4096), (2056, 136)]  # n, k
SIZES = [1, 2, 5, 16, 33, 64, 100, 128, 129, 200, 257, 300]  # rows of a batch, or of a shard


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


class Bits:
    """The bits that each row had first; counts rows that had others later."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self.differing = 0

    def see(self, rows: list[int], result: torch.Tensor) -> None:
        assert len(rows) == len(result)
        for row, values in zip(rows, result.cpu(), strict=True):
            self.differing += not torch.equal(self._known.setdefault(row, values), values)


def drawn(rng: random.Random, rows: int) -> list[int]:
    return [rng.randrange(POOL) for _ in range(rows)]


@pytest.mark.parametrize(("n", "k"), PROBLEMS)
def test_gemm(n: int, k: int) -> None:
    rng, x, weight, bias = random.Random(n), normal(0, POOL, k), normal(1, n, k), normal(2, n)
    inside, outside = Bits(), Bits()
    for rows in [*SIZES, 1000, 4000]:
        batch = drawn(rng, rows)
        with flux.batch_invariant():
            inside.see(batch, flux.gemm(x[batch], weight, bias))
        outside.see(batch, flux.gemm(x[batch], weight, bias))
    assert inside.differing == 0
    assert outside.differing > 0 or (n, k) != (1280, 4096), "this problem can fail"


def operands(world_size: int, n: int, k: int) -> list[list[torch.Tensor]]:
    """POOL rows of x, and the weight, of each rank."""
    return [[normal(100 * i + r, rows, k) for r in range(world_size)] for i, rows in enumerate((POOL, n))]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), PROBLEMS)
def test_gemm_rs_and_ag_gemm(world_size: int, n: int, k: int) -> None:
    rng, ranks = random.Random(n), EmulatedRanks(world_size)
    xs, weights = operands(world_size, n, k)
    scattered, gathered, own_not_rounded = Bits(), Bits(), Bits()
    for shard in SIZES:
        m, batch = shard * world_size, drawn(rng, shard * world_size)
        with flux.batch_invariant():
            problem = PlanInput("cuda", m, n, k, xs[0].dtype, False, world_size, None, ranks.num_sms)
            rs, ag = plan_gemm_rs(problem), plan_ag_gemm(problem)
        assert rs.by_flux and ag.by_flux
        for bits, rounds_own in ((scattered, True), (own_not_rounded, False)):
            outs = ranks.gemm_rs([x[batch] for x in xs], weights, config=rs.choice, rounds_own=rounds_own)
            ranks.check()
            for rank, out in enumerate(outs):
                bits.see(batch[shard * rank : shard * (rank + 1)], out)
        mine = [xs[0][batch[shard * rank : shard * (rank + 1)]] for rank in range(world_size)]
        outs = ranks.ag_gemm(mine, weights, config=ag.choice)
        ranks.check()
        gathered.see(batch, outs[-1])
    assert scattered.differing == 0 and gathered.differing == 0
    assert own_not_rounded.differing > 0, "this problem can fail"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), PROBLEMS)
def test_gemm_ar_and_sums(world_size: int, n: int, k: int) -> None:
    rng, ranks = random.Random(n), EmulatedRanks(world_size)
    xs, weights = operands(world_size, n, k)
    terms, residual = [normal(300 + r, POOL, n) for r in range(world_size)], normal(400, POOL, n)
    norm_weight = normal(500, n)
    summed, reduced, normed = Bits(), Bits(), Bits()
    for rows in SIZES:
        batch = drawn(rng, rows)
        with flux.batch_invariant():
            products = [flux.gemm(x[batch], weight) for x, weight in zip(xs, weights, strict=True)]
        mode = int(core.all_reduce_mode(rows, n, world_size))
        # As flux.gemm_ar, which multiplies and sums one after the other in the mode.
        for out in ranks.all_reduce(products, mode=mode, residual=residual[batch]):
            summed.see(batch, out)
        ranks.check()
        outs = ranks.all_reduce([term[batch] for term in terms], mode=mode, residual=residual[batch])
        ranks.check()
        for out in outs:
            reduced.see(batch, out)
        # The kernel of all_reduce normalises in the mode, too. The number of rows decides between these.
        for mode in (0, 1):
            outs = ranks.all_reduce(
                [term[batch] for term in terms], mode=mode, residual=residual[batch], norm_weight=norm_weight
            )
            ranks.check()
            for out in outs[:world_size]:
                normed.see(batch, out)
    assert summed.differing == 0 and reduced.differing == 0 and normed.differing == 0
