"""Holds the plan against all stored measurements: what it would choose, and what was fastest.

    python benchmarks/regret.py

Regret is the time of the way that the plan chooses over that of the fastest way that was measured. Rows of
older runs count too, but the bar is on the newest measurement of each problem.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from flux.fp8.scales import Scaling
from flux.measured import files
from flux.measured.times import NO_FACTS, Fact, Tuning, scaled
from flux.plan.choose import PLANNERS, PlanInput, model_of, planned
from flux.plan.moe import choose_parts
from tuning_facts import FILE, machine_of, measured  # noqa: E402

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
        return "parts" if choose_parts(tuning, *where) else "fused"
    op, _ = _operands(fact)
    return planned(op, problem_of(fact, tuning)).way if op in PLANNERS else "fused"


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


def line(name: str, held: Sequence[Held]) -> str:
    regrets = [each.regret for each in held]
    worst = max(held, key=lambda each: each.regret)
    fact = worst.fact
    at = f"{fact.op} p{fact.ranks} {fact.m}x{fact.n}x{fact.k}: {worst.way}, not {worst.best}"
    return f"{name:<52} {len(held):>4}  {geomean(regrets):.4f}  {max(regrets):.3f}  {at}"


def report() -> Iterator[str]:
    _, facts = files.read(FILE)
    shipped = Tuning(facts)
    same, none = lambda _: shipped, lambda _: NO_FACTS
    yield f"{'':<52} rows  mean    worst"
    for op, group in groupby(facts, key=lambda fact: fact.op.split()[0].replace(",", " in fp8")):
        some = list(group)
        for name, tuning_for in (("as without measurements", none), ("as shipped", same)):
            if held := hold(some, tuning_for):
                yield line(f"{op}, {name}", held)
    for name, tuning_for in (
        ("all, as without measurements", none),
        ("all, as shipped", same),
        ("interpolated, this row left out", without_rows(facts)),
        ("interpolated, this weight left out", without_weight(facts)),
    ):
        some = [fact for fact in facts if tuning_for(fact).estimates(*fact.problem) or tuning_for is none]
        yield line(name, hold(some, tuning_for))
        if off := errors(facts, tuning_for):
            yield f"  estimated ratios off by {geomean(off):.3f}, {max(off):.2f} at worst ({len(off)} ratios)"
    here = files.read(FILE)[0]
    of_here = (found for result, _, _, found in measured() if machine_of(result.machine) == here)
    stored = [fact for found in of_here for fact in found]
    yield line("every stored run, as without measurements", hold(stored, none))
    yield line("every stored run, as shipped", hold(stored, same))


if __name__ == "__main__":
    print("\n".join(report()))
