"""Measured times of the ways to run a problem, and estimates for problems that lie between measured ones.

Pure functions: no torch, no GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

# Ways to run an operator. "parts": one after the other by flux's own operators, "composed": gemm_ar as
# gemm_rs and all_gather, "torch": by torch and its collectives.
WAYS = ("fused", "composed", "parts", "torch")
# The smallest gain for which a plan leaves its default, by what an estimate rests on: this problem, others
# with its weight, others with similar weights (docs/design/plan.md).
MARGINS = {"measured": 0.02, "between": 0.04, "similar": 0.06}
# Added if a time is the sum of the times of its parts, which were timed alone.
SUMMED_MARGIN = 0.01
# Two numbers of rows are neighbours up to this ratio, two weights up to this many doublings of n and of k.
_MAX_STEP = 4.0
_MAX_DISTANCE = 1.0
_SIMILAR = 3
# What a call takes whatever its size: cuBLAS needs 5.2 us for 1 row of 4096 x 1024, 7.1 for 4096 x 2048.
_FIXED_US = 3.0

# The time of the fused way by the cost model, of m, n and k: it knows the steps in which tiles fill SMs.
Model = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Fact:
    """Times of one problem.

    Attributes:
        op: name of the operator; of mixtures of experts with what else distinguishes their problems.
        ranks, m, n, k: as in `flux.Plan`. Sums and gathers have all elements as m, and no n and k.
        dtype: bytes of an element.
        us: microseconds by way.
        noise: spread of the samples, relative to their median.
        source: file of the measurement.
        older: the kernels have changed since.
        summed: ways whose time is the sum of the times of its parts.
    """

    op: str
    ranks: int
    dtype: int
    m: int
    n: int
    k: int
    us: dict[str, float]
    noise: float = 0.0
    source: str = ""
    older: bool = False
    summed: tuple[str, ...] = ()

    @property
    def problem(self) -> tuple[str, int, int, int, int, int]:
        return self.op, self.ranks, self.dtype, self.m, self.n, self.k

    @property
    def weight(self) -> tuple[str, int, int, int, int]:
        return self.op, self.ranks, self.dtype, self.n, self.k


@dataclass(frozen=True)
class Estimate:
    """The expected time of one way.

    Attributes:
        margin: the gain from which on a plan prefers it.
        source: what it rests on, as text.
    """

    way: str
    us: float
    margin: float
    source: str


@dataclass(frozen=True)
class Tuning:
    """The facts that decide on a device. Ranks of a group have equal ones.

    Attributes:
        source: the files, as text for users.
        forced: a way that all problems take for which it exists, to measure it.
        problem: why the facts could not be read, or None. Then there are none.
    """

    facts: tuple[Fact, ...] = ()
    source: str = "no measurements"
    forced: str | None = None
    problem: str | None = None
    _weights: dict[tuple[str, int, int, int, int], list[Fact]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for fact in sorted(self.facts, key=lambda fact: fact.m):
            self._weights.setdefault(fact.weight, []).append(fact)

    @property
    def digest(self) -> str:
        """Equal for tunings that decide alike."""
        told = repr((self.forced, sorted((fact.problem, sorted(fact.us.items())) for fact in self.facts)))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def estimates(
        self, op: str, ranks: int, dtype: int, m: int, n: int, k: int, model: Model | None = None
    ) -> tuple[Estimate, ...]:
        """Expected times of the ways to run a problem, the fastest first; none without facts near it."""
        found = _between(self._weights.get((op, ranks, dtype, n, k), ()), m, model)
        found = found or self._similar(op, ranks, dtype, m, n, k, model)
        return tuple(sorted(found, key=lambda each: each.us))

    def _similar(
        self, op: str, ranks: int, dtype: int, m: int, n: int, k: int, model: Model | None
    ) -> list[Estimate]:
        near: list[tuple[float, list[Estimate]]] = []
        for (*kind, other_n, other_k), facts in self._weights.items():
            if kind != [op, ranks, dtype] or not other_n or not n:
                continue
            distance = abs(math.log2(other_n / n)) + abs(math.log2(max(other_k, 1) / max(k, 1)))
            if 0 < distance <= _MAX_DISTANCE and (found := _between(facts, m, model)):
                size = n * max(k, 1) / (other_n * max(other_k, 1))
                bend = _ratio(model, (m, n, k), (m, other_n, other_k))
                near.append((distance, [_scaled(each, size, bend) for each in found]))
        near = sorted(near, key=lambda each: each[0])[:_SIMILAR]
        if not near:
            return []
        shares = [1 / distance for distance, _ in near]
        common = set.intersection(*({each.way for each in found} for _, found in near))
        merged = []
        for way in sorted(common):
            each = [next(e for e in found if e.way == way) for _, found in near]
            us = _mean([e.us for e in each], shares)
            margin = MARGINS["similar"] + max(e.margin for e in each) - MARGINS["measured"]
            merged.append(Estimate(way, us, margin, f"like {len(near)} similar weights, {each[0].source}"))
        return merged


NO_FACTS = Tuning()


def choose(
    estimates: Iterable[Estimate], default: str, possible: Sequence[str]
) -> tuple[Estimate, Estimate] | None:
    """The estimate of the way to take instead of the default one, and that of the default; None: stay."""
    known = {each.way: each for each in estimates if each.way in possible}
    if default not in known:
        return None
    ours, best = known[default], min(known.values(), key=lambda each: each.us)
    margin = max(best.margin, ours.margin)
    return (best, ours) if best.us < ours.us * (1 - margin) else None


def _between(facts: Sequence[Fact], m: int, model: Model | None) -> list[Estimate]:
    """Estimates for m rows by the measurements of one weight: of this m, or of a smaller and a larger one."""
    below = max((fact for fact in facts if fact.m <= m), key=lambda fact: fact.m, default=None)
    above = min((fact for fact in facts if fact.m >= m), key=lambda fact: fact.m, default=None)
    if below is None or above is None or above.m > _MAX_STEP * max(below.m, 1):
        return []
    return list(_interpolated(below, above, m, model))


def _interpolated(below: Fact, above: Fact, m: int, model: Model | None) -> Iterator[Estimate]:
    exact = below.m == above.m
    share = 0.0 if exact else math.log(m / below.m) / math.log(above.m / below.m)
    bends = [_ratio(model, (m, fact.n, fact.k), (fact.m, fact.n, fact.k)) for fact in (below, above)]
    least = MARGINS["measured" if exact else "between"]
    where = "measured in" if exact else f"between m = {below.m} and {above.m} of"
    source = f"{where} {below.source}"
    if below.older or above.older:
        source += ", older kernel"
    for way in below.us.keys() & above.us.keys():
        summed = way in below.summed or way in above.summed
        margin = max(least, below.noise, above.noise) + (SUMMED_MARGIN if summed else 0.0)
        ends = [below.us[way], above.us[way]]
        if way == "fused" and not exact:
            ends = [us * (bend or 1.0) for us, bend in zip(ends, bends, strict=True)]
        us = _mean(ends, [1 - share, share])
        yield Estimate(way, us, margin, source + (", sum of its parts" if summed else ""))


def _scaled(estimate: Estimate, size: float, bend: float | None) -> Estimate:
    """The time of a weight that is `size` times as large. bend: the ratio of the fused way's by the model."""
    if estimate.way == "fused" and bend is not None:
        return replace(estimate, us=estimate.us * bend)
    fixed = min(_FIXED_US, estimate.us)
    return replace(estimate, us=fixed + (estimate.us - fixed) * size)


def _ratio(model: Model | None, problem: tuple[int, int, int], other: tuple[int, int, int]) -> float | None:
    """The model's time of a problem over that of another one; None without a model of both."""
    if model is None or problem == other:
        return None if model is None else 1.0
    times = model(*problem), model(*other)
    return times[0] / times[1] if min(times) > 0 else None


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    """The weighted geometric mean."""
    return math.exp(sum(s * math.log(v) for v, s in zip(values, shares, strict=True)) / sum(shares))
