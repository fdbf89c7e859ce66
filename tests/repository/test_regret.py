"""The plan against all stored measurements: how much slower it is than the fastest way that was measured."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flux.fp8.scales import Scaling
from flux.measured import files
from flux.measured.times import NO_FACTS, Fact, Tuning, scaled
from flux.plan.choose import PLANNERS, PlanInput, model_of, planned
from flux.plan.moe import choose_parts

ROOT = Path(__file__).resolve().parents[2]
FILE = files.SHIPPED / "sm90-132-4.9TBs.json"  # of the machine with most measurements


# The bar: of the geometric mean, and of the worst row.
MEAN, WORST = 1.02, 1.10
_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Held:
    """One measurement against the plan."""

    fact: Fact
    way: str

    @property
    def best(self) -> str:
        return min(self.fact.us, key=lambda way: self.fact.us[way])

    @property
    def regret(self) -> float:
        return self.fact.us[self.way] / self.fact.us[self.best]


def chosen(fact: Fact, tuning: Tuning) -> str:
    """The way that the plan takes on four or two H200s that have these measurements."""
    if fact.op.startswith("moe"):
        where = (fact.op, fact.ranks, fact.dtype, fact.m, fact.n, fact.k)
        return "parts" if choose_parts(tuning, *where) else "kernel"
    op, _ = _operands(fact)
    return planned(op, problem_of(fact, tuning)).way if op in PLANNERS else "kernel"


def _operands(fact: Fact) -> tuple[str, Scaling | None]:
    """The operator, and how its operands are scaled."""
    for kind in ("tensor", "row", "block"):
        op = fact.op.removesuffix(scaled("", kind))
        if op != fact.op:
            return op, Scaling(kind, torch.bfloat16, fast=False)
    return fact.op, None


def problem_of(fact: Fact, tuning: Tuning) -> PlanInput:
    """What a planner of an H200 with these measurements is asked."""
    m, n, k = fact.m, fact.n, fact.k
    if fact.op == "all_gather":
        m, k = fact.ranks, fact.m // fact.ranks
    elif not n:
        m, n = 1, fact.m
    _, scaling = _operands(fact)
    return PlanInput("cuda", m, n, k, _DTYPES[fact.dtype], False, fact.ranks, None, 132, "", tuning, scaling)


def hold(facts: Iterable[Fact], tuning_for: Callable[[Fact], Tuning]) -> list[Held]:
    """Facts with more than one way, of which the plan's was measured."""
    held = (Held(fact, chosen(fact, tuning_for(fact))) for fact in facts if len(fact.us) > 1)
    return [each for each in held if each.way in each.fact.us]


def without_weight(facts: Sequence[Fact]) -> Callable[[Fact], Tuning]:
    """What remains without all measurements of a fact's weight: the plan must interpolate."""
    return lambda left: Tuning(tuple(fact for fact in facts if fact.weight != left.weight))


def without_rows(facts: Sequence[Fact]) -> Callable[[Fact], Tuning]:
    """What remains without this number of rows of its weight."""
    return lambda left: Tuning(tuple(fact for fact in facts if fact.problem != left.problem))


def errors(facts: Sequence[Fact], tuning_for: Callable[[Fact], Tuning]) -> list[float]:
    """By how much the estimated ratio of two ways is off, as a factor of 1 or more."""
    found = []
    for fact in facts:
        tuning = tuning_for(fact)
        model = model_of(_operands(fact)[0], problem_of(fact, tuning))
        us = {each.way: each.us for each in tuning.estimates(*fact.problem, model) if each.way in fact.us}
        first, *others = us or [""]
        for way in others:
            off = math.log((us[way] / us[first]) / (fact.us[way] / fact.us[first]))
            found.append(math.exp(abs(off)))
    return found


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


@pytest.fixture(scope="module")
def facts() -> tuple[Fact, ...]:
    return files.read(FILE)[1]


def test_the_shipped_files_are_made_of_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    texts = importlib.import_module("tuning_facts").texts()
    assert sorted(texts) == sorted(path.name for path in files.SHIPPED.glob("*.json"))
    for name, text in texts.items():
        written, made = json.loads((files.SHIPPED / name).read_text()), json.loads(text)
        for data in (written, made):
            for row in data["rows"]:
                row.pop("older", None)  # differs where a kernel has changed since the file was made
        assert written == made, f"{name}: run benchmarks/tuning_facts.py"


def test_the_plan_is_near_the_fastest_way_that_was_measured(facts: tuple[Fact, ...]) -> None:
    shipped = Tuning(facts)
    held = hold(facts, lambda fact: shipped)
    assert len(held) > 400
    regrets = [each.regret for each in held]
    assert geomean(regrets) <= MEAN and max(regrets) <= WORST
    # Without measurements it is not: the test can fail.
    assert max(each.regret for each in hold(facts, lambda fact: NO_FACTS)) > WORST


# What nothing near it tells by 10 %, and why: docs/design/plan.md, "What neighbours do not tell".
UNTOLD = {("gemm", 128, 6144, 4096)}
FP8_BYTES = 1


@pytest.mark.parametrize("leave_out", [without_rows, without_weight])
def test_interpolation_does_no_harm(
    facts: tuple[Fact, ...], leave_out: Callable[..., Callable[[Fact], Tuning]]
) -> None:
    """Left out, a row is chosen within the bar by what is near it, but for UNTOLD. The bar of torch's fp8
    products is wider.
    """
    tuning_for = leave_out(facts)
    some = [fact for fact in facts if tuning_for(fact).estimates(*fact.problem)]
    held, usual = hold(some, tuning_for), hold(some, lambda fact: NO_FACTS)
    assert len(held) > 100
    means = [
        geomean([each.regret for each in these if each.fact.dtype != FP8_BYTES]) for these in (held, usual)
    ]
    assert means[0] <= 1.0095 < 1.016 < means[1]
    torchs = [each for each in held if each.fact.op == scaled("gemm", "tensor")]
    assert geomean([each.regret for each in torchs]) <= 1.035
    assert max(each.regret for each in torchs) < 1.26
    others = [each for each in held if each not in torchs]
    over = {(row.op, row.m, row.n, row.k) for row in (each.fact for each in others if each.regret > WORST)}
    assert over == UNTOLD and max(each.regret for each in others) < 1.105
    without = {each.fact.problem: each.regret for each in usual}
    harm = [each.regret / without[each.fact.problem] for each in held if each.fact.problem in without]
    assert max(harm) <= 1.05 and sum(each > 1 for each in harm) <= 4
    assert geomean(errors(some, tuning_for)) < 1.05


def test_no_row_of_moe_gemm_ar_and_ag_gemm_is_slower_than_unfused(facts: tuple[Fact, ...]) -> None:
    """By more than the noise: that of the samples, and what two measurements of one way differ by."""
    shipped = Tuning(facts)
    for each in hold(facts, lambda fact: shipped):
        unfused = min(each.fact.us.get(way, 1e9) for way in ("parts", "torch"))
        if each.fact.op.split(".")[0] in ("moe", "gemm_ar", "ag_gemm"):
            assert each.fact.us[each.way] <= unfused * (1.04 + each.fact.noise), each


def test_a_wrong_choice_is_seen() -> None:
    fact = Fact("gemm_ar", 2, 2, 16, 4096, 2048, {"parts": 10.0, "torch": 5.0})
    (held,) = hold([fact], lambda _: NO_FACTS)
    assert (held.way, held.best, held.regret) == ("parts", "torch", 2.0)
    (held,) = hold([fact], lambda _: Tuning((fact,)))
    assert (held.way, held.regret) == ("torch", 1.0)
    slower = replace(fact, us={"parts": 10.0, "torch": 9.9})
    assert chosen(slower, Tuning((slower,))) == "parts"  # within the margin
