"""Measured times of the ways to run a problem, and estimates for problems that lie between measured ones.

Pure functions: no torch, no GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, get_args

from flux._files import Count, Positive, Size, Within

# Ways to run an operator. "kernel": by one of flux, "parts": one after the other by flux's own operators,
# "composed": gemm_ar as gemm_rs and all_gather, "torch": by torch and its collectives.
_Way = Literal["kernel", "composed", "parts", "torch"]
WAYS: tuple[str, ...] = get_args(_Way)
OLD_WAYS = {"fused": "kernel"}  # in files of flux before 0.2
_Times = Annotated[dict[_Way, Positive], Within(1)]
# The smallest gain for which a plan leaves its default, by what an estimate rests on: this problem, others
# with its weight, others with similar weights (docs/design/plan.md). Errors of the last two are independent.
MARGINS = {"measured": 0.02, "between": 0.04, "similar": 0.05}
# Added if a time is the sum of the times of its parts, which were timed alone.
SUMMED_MARGIN = 0.01
# Two numbers of rows are neighbours up to this ratio, weights are similar up to this many doublings of n and
# k together.
_MAX_STEP = 4.0
_MAX_DISTANCE = 1.0
_SIMILAR = 3
# What a call takes whatever its size: cuBLAS needs 5.2 us for 1 row of 4096 x 1024, 7.1 for 4096 x 2048.
_FIXED_US = 3.0


def scaled(op: str, kind: str, fast: bool = False) -> str:
    """The name by which facts of an operator with fp8 operands go.

    Args:
        kind, fast: as of flux.fp8.scales.Scaling.
    """
    return f"{op}, {kind} scales" + (", fast" if fast else "")


class Modelled(NamedTuple):
    """What is known of the fused way without measurements.

    Attributes:
        us: its time by the cost model, which knows the steps in which tiles fill SMs; 0 if there is no model.
        carrier: what sends its data. Times are only interpolated between problems with the same carrier.
    """

    us: float
    carrier: str = ""


# Of m, n and k.
Model = Callable[[int, int, int], Modelled]


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
    ranks: Count
    dtype: Annotated[int, Within(1, 8)]
    m: Count
    n: Size
    k: Size
    us: Annotated[dict[str, float], _Times]
    noise: Annotated[float, Within(0.0, 1e3)] = 0.0
    source: str = ""
    older: bool = False
    summed: Annotated[tuple[str, ...], tuple[_Way, ...]] = ()

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


class _Near(NamedTuple):
    """Estimates for a problem by one weight's measurements, and how far these are from it, in doublings."""

    distance: float
    estimates: list[Estimate]


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
        """Expected times of the ways to run a problem, the fastest first; none without facts near it.

        A measurement of the problem itself decides alone. Otherwise other rows of its weight and similar
        weights count, each by its distance.
        """
        own = _near(self._weights.get((op, ranks, dtype, n, k), ()), m, n, k, model)
        if own is not None and own.distance == 0:
            return tuple(sorted(own.estimates, key=lambda each: each.us))
        found = (
            _near(facts, m, n, k, model)
            for (*kind, other_n, other_k), facts in self._weights.items()
            if kind == [op, ranks, dtype] and other_n and n and (other_n, other_k) != (n, k)
        )
        similar = sorted((near for near in found if near is not None), key=lambda near: near.distance)[
            :_SIMILAR
        ]
        return tuple(sorted(_merged(own, similar), key=lambda each: each.us))

    def measured(self, op: str, ranks: int, dtype: int, m: int, n: int, k: int) -> Fact | None:
        """The measurement of a problem, or None."""
        weight = self._weights.get((op, ranks, dtype, n, k), ())
        return next((fact for fact in weight if fact.m == m), None)


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


def _near(facts: Sequence[Fact], m: int, n: int, k: int, model: Model | None) -> _Near | None:
    """What the measurements of one weight tell about another one, or the same, with m rows."""
    below = max((fact for fact in facts if fact.m <= m), key=lambda fact: fact.m, default=None)
    above = min((fact for fact in facts if fact.m >= m), key=lambda fact: fact.m, default=None)
    if below is None or above is None or above.m > _MAX_STEP * max(below.m, 1):
        return None
    distance = _doublings(below.n, n) + _doublings(below.k, k)
    if distance > _MAX_DISTANCE:
        return None
    found = _of_weight(facts, (below, above), m, model)
    if distance:
        size = n * max(k, 1) / (below.n * max(below.k, 1))
        ratio = _ratio(model, (m, n, k), (m, below.n, below.k))
        found = [_scaled(each, size, ratio) for each in found]
    return _Near(distance + min(_doublings(below.m, m), _doublings(above.m, m)), found)


def _doublings(size: int, other: int) -> float:
    return abs(math.log2(max(size, 1) / max(other, 1)))


def _merged(own: _Near | None, similar: Sequence[_Near]) -> Iterator[Estimate]:
    """The means of what the own weight and similar ones tell."""
    near = [*([own] if own else []), *similar]
    if not near:
        return
    tables = [(1 / distance, {each.way: each for each in found}) for distance, found in near]
    for way in sorted(tables[0][1]):
        told = [(share, table[way]) for share, table in tables if way in table]
        if own is None and len(told) < len(tables):
            continue
        us = _mean([each.us for _, each in told], [share for share, _ in told])
        like = f"{len(similar)} similar weight{'s' if len(similar) > 1 else ''}"
        first = told[0][1]
        if own is not None:
            source = f"{first.source}; {like}" if similar else first.source
            yield replace(first, us=us, source=source)
        else:
            margin = math.hypot(MARGINS["similar"], max(each.margin for _, each in told))
            yield Estimate(way, us, margin, f"like {like}, {first.source}")


def _of_weight(facts: Sequence[Fact], ends: tuple[Fact, Fact], m: int, model: Model | None) -> list[Estimate]:
    """Estimates for m rows by two measurements of one weight: of fewer and more rows, or twice of m."""
    exact = ends[0].m == ends[1].m
    least = MARGINS["measured" if exact else "between"]
    where = "measured in" if exact else f"between m = {ends[0].m} and {ends[1].m} of"
    source = f"{where} {ends[0].source}"
    if any(fact.older for fact in ends):
        source += ", older kernel"
    found = []
    for way in ends[0].us.keys() & ends[1].us.keys():
        summed = any(way in fact.summed for fact in ends)
        margin = max(least, *(fact.noise for fact in ends)) + (SUMMED_MARGIN if summed else 0.0)
        us = ends[0].us[way] if exact else _interpolated(facts, ends, m, way, model)
        found.append(Estimate(way, us, margin, source + (", sum of its parts" if summed else "")))
    return found


def _interpolated(
    facts: Sequence[Fact], ends: tuple[Fact, Fact], m: int, way: str, model: Model | None
) -> float:
    below, above = ends
    share = math.log(m / below.m) / math.log(above.m / below.m)
    times = [fact.us[way] for fact in ends]
    if way != "kernel" or model is None:
        return _mean(times, [1 - share, share])
    n, k = below.n, below.k
    carriers = [model(fact.m, n, k).carrier for fact in ends]
    if carriers[0] != carriers[1]:
        carrier = model(m, n, k).carrier
        alike = [fact for fact in facts if way in fact.us and model(fact.m, n, k).carrier == carrier]
        return _continued(sorted(alike, key=lambda fact: abs(math.log(fact.m / m))), m)
    ratios = [_ratio(model, (m, n, k), (fact.m, n, k)) or 1.0 for fact in ends]
    return _mean([us * ratio for us, ratio in zip(times, ratios, strict=True)], [1 - share, share])


def _continued(facts: Sequence[Fact], m: int) -> float:
    """The fused way's time beyond the sizes of facts, the nearest first: what a call takes, and a rate."""
    near = facts[0]
    us, size = near.us["kernel"], m / near.m
    if len(facts) > 1:
        rate = (facts[1].us["kernel"] - us) / (facts[1].m - near.m)
    else:
        rate = max(us - _FIXED_US, 0.0) / near.m
    return min(max(us + rate * (m - near.m), us * min(size, 1.0)), us * max(size, 1.0))


def _scaled(estimate: Estimate, size: float, bend: float | None) -> Estimate:
    """The time of a weight that is `size` times as large. bend: the ratio of the fused way's by the model."""
    if estimate.way == "kernel" and bend is not None:
        return replace(estimate, us=estimate.us * bend)
    fixed = min(_FIXED_US, estimate.us)
    return replace(estimate, us=fixed + (estimate.us - fixed) * size)


def _ratio(model: Model | None, problem: tuple[int, int, int], other: tuple[int, int, int]) -> float | None:
    """The model's time of a problem over that of another one; None without a model of both."""
    if model is None or problem == other:
        return None if model is None else 1.0
    times = model(*problem).us, model(*other).us
    return times[0] / times[1] if min(times) > 0 else None


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return math.exp(sum(s * math.log(v) for v, s in zip(values, shares, strict=True)) / sum(shares))
