"""``flux tune``: times every way of every problem, and writes the file that FLUX_TUNING names.

Rows are added to the file one by one, so a run that ends early loses only the row that it was measuring, and
the next one goes on behind it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

import flux
from flux import _files
from flux import machine as machines
from flux._files import Count, Size
from flux.bench.cases.moe import MODELS
from flux.bench.model import DTYPE_BYTES, Row, in_way
from flux.bench.runner import Settings, context_of, label, measure, progress, run
from flux.bench.suites import Problem
from flux.bench.timing import all_max, make_timer
from flux.fp8.scales import kind_of
from flux.measured import files
from flux.measured.machine import Machine, of_device
from flux.measured.times import OLD_WAYS, WAYS, Fact, Tuning, choose, scaled
from flux.plan.moe import facts_op

# Microseconds between two launches, which the sum of the times of parts does not have: 0.3 to 0.7
# (benchmarks/results/tuning/2026-11-22-gemm_ar-launches-tp2-2xH200.json, sep and gemm + ar).
_BETWEEN_LAUNCHES_US = 0.5
# The collective of flux that is a part of an operator, as candidates are named.
_COLLECTIVES = {"gemm_ar": "all_reduce", "ag_gemm": "all_gather", "gemm_rs": "reduce_scatter"}
# The operators of mixtures of experts, as benchmarks and as plans name them.
_LAYERS = {"moe_layer0": "moe.ag_scatter_gemm", "moe_layer1": "moe.gemm_gather_rs"}
# Operators whose ways can be timed by themselves; gemm on GPUs only.
OPS = ("gemm_rs", "ag_gemm", "gemm_ar", "gemm_ar_norm", "all_reduce")


class _Planned(TypedDict):
    """A line of FLUX_RECORD_SHAPES."""

    op: str
    m: Count
    n: Size
    k: Size
    world_size: Count


@dataclass(frozen=True)
class Choice:
    """One problem before and after: microseconds of the usual way, and of the one that the plan now takes."""

    fact: Fact
    usual: str
    way: str

    @property
    def before(self) -> float:
        return self.fact.us[self.usual]

    @property
    def after(self) -> float:
        return self.fact.us[self.way]


@dataclass(frozen=True)
class Tuned:
    """What a run has measured. wrong: problems with wrong results; left: those without time."""

    choices: tuple[Choice, ...]
    wrong: tuple[str, ...] = ()
    left: int = 0


def tune(settings: Settings, file: Path, budget_s: float) -> Tuned | None:
    """Measures what the file does not have yet. Under torchrun only rank 0 gets the result.

    Raises:
        ValueError: the file is no tuning file, or is of another machine.
    """
    settings = replace(settings, ways=WAYS)
    tuned: Tuned | None = run(settings, _tune_rank, str(file), budget_s, FLUX_TUNING="off")
    return tuned


def known(file: Path) -> tuple[Machine | None, list[Fact]]:
    if not file.exists():
        return None, []
    machine, facts = files.read(file)
    return machine, list(facts)


def traced(file: Path, world: int) -> list[Problem]:
    """The problems of a file of FLUX_RECORD_SHAPES, else ValueError, that this many ranks have, each once."""
    problems: dict[Problem, None] = {}
    what = "file of FLUX_RECORD_SHAPES"
    for i, line in enumerate(_files.read_text(file, what).splitlines(), 1):
        where = f"{what} {file}: line {i}"
        told: _Planned = _files.parse(_Planned, _files.of_json(line, where), where)
        op, m, n, k, p = told["op"], told["m"], told["n"], told["k"], told["world_size"]
        if p == world and op in OPS:
            sizes = {"ag_gemm": (m, n * p, k), "all_reduce": (1, m * n, p)}.get(op, (m, n, k * p))
            problems[Problem(op, "trace", op, *sizes)] = None
    return list(problems)


def choices(facts: Sequence[Fact]) -> tuple[Choice, ...]:
    """What a plan takes of these problems, with their measurements and without."""
    tuning, found = Tuning(tuple(facts)), []
    for fact in facts:
        usual = "kernel" if "kernel" in fact.us else next(iter(fact.us))
        better = choose(tuning.estimates(*fact.problem), usual, tuple(fact.us))
        found.append(Choice(fact, usual, better[0].way if better else usual))
    return tuple(found)


def _key(problem: Problem, settings: Settings) -> tuple[str, int, int, int, int, int]:
    """Fact.problem of a problem."""
    m, n, k = problem.local(settings.tp)
    if problem.op == "all_reduce":
        m, n, k = m * n, 0, 0
    ranks = 1 if problem.op == "gemm" else settings.tp
    return problem.op, ranks, DTYPE_BYTES[settings.dtype], m, n, k


def _tune_rank(rank: int, world_size: int, settings: Settings, file: str, budget_s: float) -> Tuned | None:
    began = time.monotonic()
    context = context_of(rank, world_size, settings)
    path, here = Path(file), of_device(context.device)
    machine, facts = known(path)
    if machine is not None and (difference := machine.difference(here)):
        raise ValueError(f"{path} is of another machine: {difference}")
    done = {fact.problem for fact in facts}
    todo = [problem for problem in settings.problems if _key(problem, settings) not in done]
    wrong, left = [], 0
    about: dict[str, Any] = {
        "what": "flux tune",
        "flux": flux.__version__,
        "commit": machines.commit(),
        "date": machines.now(),
        "settings": settings.public(),
    }
    with torch.no_grad(), progress(rank == 0, len(todo)) as (step, say):
        timer = make_timer(context.device, context.group)
        context = replace(context, say=say)
        for problem in todo:
            # The clock of rank 0 decides for all.
            spent = [time.monotonic() - began if rank == 0 else 0.0]
            if all_max(spent, context.group, context.device)[0] > budget_s:
                left += 1
                continue
            step(label(problem), None)
            row = measure(problem, context, timer, settings)
            if row.ok:
                new = [replace(fact, source=f"flux tune, {about['date']}") for fact in facts_of(row)]
                facts = [fact for fact in facts if fact.problem not in {each.problem for each in new}] + new
            else:
                wrong.append(f"{label(problem)}: {row.check}")
            if rank == 0:
                _files.write(path, files.to_json(here, facts, **about))
            step(label(problem), "done" if row.ok else f"WRONG: {row.check}")
    return Tuned(choices(facts), tuple(wrong), left) if rank == 0 else None


def facts_of(row: Row, tuned: bool = False) -> Iterator[Fact]:
    """Facts of a row with several ways, and of parts timed alone. tuned: flux chose by measurements."""
    return (fact for fact in _facts(row, tuned) if len(fact.us) > 1)


def _facts(row: Row, tuned: bool) -> Iterator[Fact]:
    if not row.ok:
        return
    (m, n, k), times = row.local, {name: t.median * 1e3 for name, t in row.times.items()}
    # Of flux and of the GEMM: NCCL's times spread more, and by less than they differ.
    steady = (t for name, t in row.times.items() if t.role in ("flux", "gemm") or name.startswith("flux"))
    noise = max((t.spread for t in steady), default=0.0)
    dtype = DTYPE_BYTES[row.dtype]

    def fact(op: str, sizes: tuple[int, int, int], ways: dict[str, str], ranks: int) -> Iterator[Fact]:
        us = {way: round(times[name], 3) for way, name in ways.items() if name in times}
        if "kernel" in us or "composed" in us:
            yield Fact(op, ranks, dtype, *sizes, us, noise=round(noise, 4))

    ours = {way: in_way(way) for way in WAYS if in_way(way) in times}
    if row.scales:
        # Of several ranks torch's way is not timed: unlike peers it applies scales behind the product.
        if row.op in _COLLECTIVES or row.op == "gemm_ar_norm":
            op = scaled(row.op, kind_of(row.op, row.scales))
            yield from fact(op, (m, n, k), {_way_of(row): "flux"} | ours, row.tp)
        elif (row.op, row.scales) == ("gemm", "tensor") and (row.plan or {}).get("fused"):
            yield from fact(scaled("gemm", "tensor"), (m, n, k), {"kernel": "flux", "torch": "_scaled_mm"}, 1)
        return
    serial = next((name for name, t in row.times.items() if t.role == "serial"), "")
    gemms = {"kernel": "flux.gemm", "torch": "cuBLAS"}
    if tuned and row.op in ("gemm", "all_reduce"):
        return
    if row.op == "gemm":
        yield from fact("gemm", (m, n, k), {"kernel": "flux", "torch": "cuBLAS"}, 1)
    elif row.op == "all_reduce":
        yield from fact("all_reduce", (m * n, 0, 0), {"kernel": "flux", "torch": "NCCL"} | ours, row.tp)
    elif row.op == "gemm_ar_norm":
        yield from fact(row.op, (m, n, k), {"torch": serial, _way_of(row): "flux"} | ours, row.tp)
    elif row.op in _COLLECTIVES:
        part = _COLLECTIVES[row.op]
        elements = m * k if part == "all_gather" else m * n
        if not tuned:
            yield from fact("gemm", (m, n, k), gemms, 1)
            yield from fact(part, (elements, 0, 0), {"kernel": f"flux.{part}", "torch": "NCCL"}, row.tp)
        alone = [times[name] for name in gemms.values() if name in times]
        for whole in fact(row.op, (m, n, k), {"torch": serial, _way_of(row): "flux"} | ours, row.tp):
            together = min(alone, default=0.0) + times.get(f"flux.{part}", 0.0) + _BETWEEN_LAUNCHES_US
            yield _with_parts(whole, together if alone and f"flux.{part}" in times else None)
    elif row.op in _LAYERS and row.model in MODELS:
        model, ep = MODELS[row.model], re.match(r"EP(\d+)", row.variant)
        op = facts_op(_LAYERS[row.op], model.experts, model.top_k, int(ep[1]) if ep else 1)
        grouped = times.get("torch grouped_mm", 0.0)
        sooner = min(grouped, times.get("flux.grouped_gemm", grouped))
        for whole in fact(op, (row.m, n, k), {"kernel": "flux", "parts": in_way("parts")}, row.tp):
            yield _with_parts(whole, times[serial] - grouped + sooner if grouped and serial else None)


def _way_of(row: Row) -> str:
    """The way that the plan chose. Old rows do not name it."""
    plan = row.plan or {}
    way = plan.get("way") or ("composed" if "gemm_rs + all_gather" in plan.get("config", "") else "kernel")
    return OLD_WAYS.get(way, way)


def _with_parts(fact: Fact, together: float | None) -> Fact:
    """The fact, with the sum of the times of its parts if they were not timed together."""
    if together is None or "parts" in fact.us:
        return fact
    return replace(fact, us={**fact.us, "parts": round(together, 3)}, summed=("parts",))
