"""Exact problems of dense collectives with all ranks on one GPU: kernels, slots, signals and epochs are the
real ones (flux.testing.emulate).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flux._native import core
from flux.testing import AgGemmCase, GemmRsCase
from flux.testing.emulate import EmulatedRanks

T = TypeVar("T")
DTYPES = [torch.bfloat16, torch.float16]
How = dict[str, Any]  # options of calls
# Of random problems: most rows of a rank, or of a sum; most vectors of n and of k.
MOST = {
    "gemm_rs": (400, 128, 40),
    "ag_gemm": (400, 128, 40),
    "all_gather": (900, 1, 200),
    "gemm_ar": (64, 128, 40),
}


class EmulatedGraphRanks(EmulatedRanks):
    """Ranks whose calls can be captured, by each rank in a graph of its own, as real ranks do it. In one
    graph they would be branches. CUDA may run branches one after the other, and each waits for the others.
    """

    _recorded: list[Callable[[int], None]] | None = None

    def capture(self, calls: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Captures what `calls` launches on these ranks, and runs nothing.

        Returns:
            What `calls` returned, and a function that replays the graphs of all ranks at once.
        """
        recorded: list[Callable[[int], None]] = []
        self._recorded = recorded
        try:
            results = calls()
        finally:
            self._recorded = None
        graphs = []
        for rank, stream in enumerate(self.streams):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[rank], stream=stream):
                for launch in recorded:
                    launch(rank)
        return results, lambda: self._launch(lambda rank: graphs[rank].replay(), True, ())

    def _launch(self, launch: Callable[[int], None], join: bool, absent: Collection[int]) -> None:
        if self._recorded is None:
            super()._launch(launch, join, absent)
        else:
            self._recorded.append(launch)


class EmulatedInt8Ranks(EmulatedRanks):
    """Ranks that reduce-scatter with wire="int8"."""

    def reduce_scatter_int8(
        self,
        xs: Sequence[Tensor],
        *,
        rounds_own: bool = False,
        join: bool = True,
        absent: Collection[int] = (),
    ) -> list[Tensor]:
        """ReduceScatter of all ranks at once: for every rank its [rows, n] of the sum of all `xs`
        [world_size, rows, n]. rounds_own: what a rank has for itself is rounded to int8, too.
        """
        p, rows, n = xs[0].shape
        self._stored.reserve_exchange(core.int8_scatter_bytes(rows, n, p))
        sums = self._empty(xs[0], rows, n)

        def launch(rank: int) -> None:
            given = (self._stored.address(rank), self.num_sms, rounds_own)
            torch.ops.flux._reduce_scatter_int8(xs[rank], sums[rank], *given)

        self._launch(launch, join, absent)
        return sums


class Problem:
    """The operands of all ranks on the GPU, and what each rank must get.

    op: gemm_rs, ag_gemm, all_gather or gemm_ar.
    """

    def __init__(self, op: str, case: Any) -> None:
        self.op, self.case = op, case
        made = [case.inputs(rank, "cuda") for rank in range(case.world_size)]
        self.xs, self.weights, biases = (list(parts) for parts in zip(*made, strict=True))
        self.bias: Any = None if biases[0] is None else biases if op == "ag_gemm" else biases[0]

    def call(self, ranks: EmulatedRanks, **how: Any) -> list[Tensor]:
        if self.op == "all_gather":
            return ranks.all_gather(self.xs, **how)
        how["transpose_weight"] = self.case.transpose_weight
        results: list[Tensor] = getattr(ranks, self.op)(self.xs, self.weights, self.bias, **how)
        return results

    def expected(self, rank: int) -> Tensor:
        case, at = self.case, {"all_gather": ("gathered",), "gemm_ar": ("expected_sum",)}.get(self.op)
        result: Tensor = getattr(case, at[0])("cuda") if at else case.expected(rank, "cuda")
        return result

    def assert_exact(self, results: list[Tensor], *what: object) -> None:
        for rank, result in enumerate(results):
            assert torch.equal(result, self.expected(rank)), (rank, self.op, self.case, *what)

    def run(self, ranks: EmulatedRanks, **how: Any) -> None:
        results = self.call(ranks, **how)
        ranks.check()
        self.assert_exact(results, how)

    def copy_(self, other: Problem) -> None:
        """Takes the operands of another problem of the same sizes."""
        for old, new in zip(self._tensors(), other._tensors(), strict=True):
            old.copy_(new)

    def _tensors(self) -> list[Tensor]:
        biases = self.bias if isinstance(self.bias, list) else [] if self.bias is None else [self.bias]
        return [*self.xs, *self.weights, *biases]


def problem(op: str, rows: int, n: int, k: int, world_size: int, *options: Any, **more: Any) -> Problem:
    """rows: of a rank, or of a sum. options: those of a case behind its sizes."""
    kind = AgGemmCase if op in ("ag_gemm", "all_gather") else GemmRsCase
    m = rows if op == "gemm_ar" else rows * world_size
    return Problem(op, kind(m, n, k, world_size, *options, **more))


def delay(ranks: EmulatedRanks, rank: int, cycles: int) -> None:
    """Lets one rank come late to its next call."""
    with torch.cuda.stream(ranks.streams[rank]):
        torch.cuda._sleep(cycles)


def check_back_to_back(world_size: int, ways: list[tuple[str, How]]) -> None:
    """Random problems. Ranks run ahead of each other as far as the protocol lets them: nothing joins their
    streams, and now and then one is late.
    """
    ranks, rng = EmulatedRanks(world_size), random.Random(world_size)
    for op, how in ways:  # makes room
        rows, n, k = MOST[op]
        problem(op, rows, 8 * n, 8 * k, world_size).run(ranks, **how)
    for batch in range(5):
        calls = []
        for i in range(24):
            op, how = ways[i if i < len(ways) else rng.randrange(len(ways))]
            rows, n, k = (rng.randint(1, most) for most in MOST[op])
            more = {"bias": rng.random() < 0.5 and op != "all_gather", "seed": 24 * batch + i}
            calls.append((problem(op, rows, 8 * n, 8 * k, world_size, DTYPES[i % 2], **more), how))
        torch.cuda.synchronize()
        results = []
        for each, how in calls:
            if rng.random() < 0.3:
                delay(ranks, rng.randrange(world_size), 300_000)
            results.append(each.call(ranks, join=False, **how))
        ranks.check()
        for (each, how), result in zip(calls, results, strict=True):
            each.assert_exact(result, how)


def check_replays(
    made: Callable[[int], list[Problem]],
    calls: Callable[[EmulatedRanks, list[Problem]], Iterable[tuple[int, list[Tensor]]]],
) -> None:
    """Captures calls once and replays them with the operands of three seeds.

    calls: launches calls of the problems that `made` gives for a seed, and tells of each result the index of
        the problem whose answer it is.
    """
    ranks = EmulatedGraphRanks(4)
    static, rounds = made(0), [made(seed) for seed in range(3)]
    list(calls(ranks, static))  # makes room
    ranks.check()
    results, replay = ranks.capture(lambda: list(calls(ranks, static)))
    for number in range(30):
        now = rounds[number % 3]
        for old, new in zip(static, now, strict=True):
            old.copy_(new)
        for _, result in results:
            for each in result:
                each.fill_(7)
        replay()
        ranks.check()
        for index, result in results:
            now[index].assert_exact(result, f"replay {number}")
