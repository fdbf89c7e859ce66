"""flux.batch_invariant: the bits of a row do not depend on the batch. Random data, compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from effort import some

import flux
from flux import _invariance
from flux._native import core
from flux.plan import sums as plan_sums
from flux.plan.choose import PlanInput, plan_gemm, plan_gemm_rs
from flux.plan.gather import plan_ag_gemm
from flux.testing import spawn

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROWS_OF_POOL = 24
Results = dict[str, dict[int, torch.Tensor]]


class Problem:
    """Rows from which batches are drawn, and all other arguments. x and weight differ from rank to rank."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        draw = random.Random(seed)
        self.dtype = DTYPES[seed % len(DTYPES)]
        self.rank, self.world_size = rank, world_size
        self.n, self.k = draw.choice((8, 40, 72, 200)), draw.choice((16, 48, 136, 520))
        same, own = (torch.Generator().manual_seed(number) for number in (seed, seed + 1000 * (rank + 1)))

        def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.x = normal(own, ROWS_OF_POOL, self.k)
        self.weight = normal(own, self.n, self.k)
        self.gathered_x = normal(same, ROWS_OF_POOL, self.k)
        self.residual, self.bias = normal(same, ROWS_OF_POOL, self.n), normal(same, self.n)
        self.norm_weight = normal(same, self.n)
        self.terms = normal(own, ROWS_OF_POOL, self.n)

    def run(self, batch: list[int], scatters: bool = True) -> list[tuple[str, list[int], torch.Tensor]]:
        """Every operator for these rows: its name, the rows of its result, and the result."""
        rows = len(batch) // self.world_size
        mine = batch[rows * self.rank : rows * (self.rank + 1)]
        x, residual, weight, bias = self.x[batch], self.residual[batch], self.weight, self.bias
        norm, total = flux.gemm_ar(x, weight, bias, residual=residual, norm_weight=self.norm_weight)
        normed, summed = flux.all_reduce(self.terms[batch], residual=residual, norm_weight=self.norm_weight)
        results = [
            ("gemm", batch, flux.gemm(x, weight, bias)),
            ("gemm_rs", mine, flux.gemm_rs(x, weight, bias)),
            ("ag_gemm", batch, flux.ag_gemm(self.gathered_x[mine], weight, bias)),
            ("gemm_ar", batch, flux.gemm_ar(x, weight, bias)),
            ("gemm_ar with residual", batch, total),
            ("norm of gemm_ar", batch, norm),
            ("all_reduce", batch, flux.all_reduce(self.terms[batch])),
            ("all_reduce with residual", batch, summed),
            ("norm of all_reduce", batch, normed),
        ]
        if scatters:
            results.append(("reduce_scatter", mine, flux.reduce_scatter(self.terms[batch])))
        return results


class Known:
    """Results of rows, as the first batch had them."""

    def __init__(self, result: torch.Tensor) -> None:
        self.there = torch.zeros(ROWS_OF_POOL, dtype=torch.bool)
        self.bits = result.new_zeros(ROWS_OF_POOL, result.shape[1])

    def same(self, rows: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether all are as they are known; remembers the others. A row may occur several times."""
        new = ~self.there[rows]
        self.bits[rows[new]] = result[new]
        self.there[rows] = True
        return torch.equal(self.bits[rows], result)


def differing(problem: Problem, seed: int, batches: int = 5) -> set[str]:
    """Names of results in which a row had other bits in another batch, on any rank."""
    draw = random.Random(seed)
    known: dict[str, Known] = {}
    found: set[str] = set()
    for _ in range(batches):
        size = problem.world_size * draw.choice((1, 1, 2, 3, 7, 33))
        batch = [draw.randrange(ROWS_OF_POOL) for _ in range(size)]
        for name, rows, result in problem.run(batch):
            assert result.shape == (len(rows), problem.n)
            if not known.setdefault(name, Known(result)).same(torch.tensor(rows), result):
                found.add(name)
    # The ranks that own a row in different batches must agree, too.
    for name in ("gemm_rs", "reduce_scatter"):
        seen: list[Any] = [None] * problem.world_size
        dist.all_gather_object(seen, known[name])
        whole = Known(seen[0].bits)
        if not all([whole.same(each.there.nonzero()[:, 0], each.bits[each.there]) for each in seen]):
            found.add(name)
    return found


def random_cases(rank: int, world_size: int, cases: int) -> tuple[set[str], set[str]]:
    """What differs in the mode, and without it. Each number of ranks has problems of its own."""
    inside: set[str] = set()
    outside: set[str] = set()
    for seed in range(cases * world_size, cases * (world_size + 1)):
        problem = Problem(rank, world_size, seed)
        with flux.batch_invariant():
            inside |= differing(problem, seed)
        if seed % cases < 12:
            outside |= differing(problem, seed)
    return inside, outside


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_of_a_row_do_not_depend_on_the_batch(world_size: int) -> None:
    answers = spawn(random_cases, world_size, some(40))
    assert [inside for inside, _ in answers] == [set()] * world_size
    # The cases can fail: an owner of a row does not round its own product without the mode.
    assert any("gemm_rs" in outside for _, outside in answers)


def large_sums(rank: int, world_size: int) -> None:
    whole = Problem(rank, world_size, 0)
    batch = [row % ROWS_OF_POOL for row in range(world_size * 20)]
    with flux.batch_invariant():
        expected = whole.run(batch)[:-1]  # reduce_scatter does not split
        plan_sums.MAX_EXCHANGE_BYTES = 7 * whole.n * whole.dtype.itemsize
        flux.release()
        plan = flux.explain("gemm_ar", m=len(batch), n=whole.n, k=whole.k, dtype=whole.dtype)
        assert plan.by_flux and plan.way == "parts", plan
        for (name, _, before), (_, _, after) in zip(expected, whole.run(batch, scatters=False), strict=True):
            assert torch.equal(before, after), name


def test_sums_that_an_exchange_cannot_hold_are_made_of_parts() -> None:
    spawn(large_sums, 2)


def of_four(m: int, n: int, k: int) -> PlanInput:
    return PlanInput("cuda", m, n, k, torch.bfloat16, world_size=4, num_sms=132)


PLANNERS: dict[str, Callable[[int, int, int], Any]] = {
    "gemm": lambda m, n, k: plan_gemm(PlanInput("cuda", m, n, k, torch.bfloat16, num_sms=132)),
    "gemm_rs": lambda m, n, k: plan_gemm_rs(of_four(m, n, k)),
    "ag_gemm": lambda m, n, k: plan_ag_gemm(of_four(m, n, k)),
}


@pytest.mark.parametrize("op", PLANNERS)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (8192, 1024), (1280, 8192), (28672, 8192), (128, 512)])
def test_one_tile_shape_serves_any_number_of_rows(op: str, n: int, k: int) -> None:
    with flux.batch_invariant():
        plans = [PLANNERS[op](m, n, k) for m in (4, 8, 60, 128, 256, 300, 1024, 2048, 8192)]
    assert len({plan.config for plan in plans}) == 1
    assert all(plan.by_flux and plan.batch_invariant for plan in plans)
    assert plans[0].config < core.FIRST_SWAP_AB
    assert {plan.cluster for plan in plans} == {1}, "K is not split"
    assert "one tile shape" in str(plans[0])


def test_gemm_ar_runs_in_parts_with_any_number_of_rows() -> None:
    with flux.batch_invariant():
        for m in (1, 60, 128, 1024, 65536):
            plan = plan_sums.plan_gemm_ar(of_four(m, 4096, 1024))
            assert (plan.way, plan.by_flux, plan.batch_invariant) == ("parts", True, True)
        assert not plan_sums.plan_gemm_ar(of_four(1, 2**26, 1024)).by_flux, "no exchange holds a row"


def unfused(rank: int, world_size: int) -> list[str]:
    told = []
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    calls: list[Callable[[], object]] = [
        lambda: flux.gemm_rs(x, weight),
        lambda: flux.ag_gemm(x, weight),
        lambda: flux.gemm_ar(x, weight),
        lambda: flux.all_reduce(x),
        lambda: flux.reduce_scatter(x),
    ]
    for call in calls:
        with flux.batch_invariant(), pytest.raises(ValueError) as info:
            call()
        told.append(str(info.value))
        call()  # unfused, and the group works on
    return told


def test_unfused_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_FUSED", "off")
    ops = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter")
    for told in spawn(unfused, 2):
        for op, message in zip(ops, told, strict=True):
            assert message.startswith(f"{op}: batch_invariant: expected a call that runs fused")
            assert "FLUX_FUSED" in message


def test_operators_that_cannot_are_refused() -> None:
    x, weight, offsets = torch.ones(4, 16), torch.ones(2, 8, 16), torch.tensor([0, 2, 4], dtype=torch.int32)
    flux.grouped_gemm(x, weight, offsets)
    with flux.batch_invariant(), pytest.raises(ValueError, match="grouped_gemm: batch_invariant: expected"):
        flux.grouped_gemm(x, weight, offsets)


def test_the_mode_nests_and_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _invariance.active()
    with flux.batch_invariant():
        with flux.batch_invariant(False):
            assert not _invariance.active()
        assert _invariance.active()
        with pytest.raises(RuntimeError, match="ends it"), flux.batch_invariant(False):
            raise RuntimeError("ends it")
        assert _invariance.active()
    assert not _invariance.active()
    monkeypatch.setattr(_invariance, "_mode", None)
    monkeypatch.setenv("FLUX_BATCH_INVARIANT", "on")
    assert _invariance.active()
    with pytest.raises(TypeError, match="batch_invariant: enabled: expected a bool, got str"):
        flux.batch_invariant("off").__enter__()  # type: ignore[arg-type]
