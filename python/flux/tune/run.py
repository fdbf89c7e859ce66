"""``flux tune``: times every way of every problem, and writes the file that FLUX_TUNING names.

Rows are added to the file one by one, so a run that ends early loses only the row that it was measuring, and
the next one goes on behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

import flux
from flux import _files
from flux import machine as machines
from flux._files import Count, Size
from flux.bench.model import DTYPE_BYTES
from flux.bench.runner import Settings, context_of, label, measure, progress, run
from flux.bench.suites import Problem
from flux.bench.timing import all_max, make_timer
from flux.tune.facts import facts_of
from flux.tuning import store
from flux.tuning.facts import WAYS, Fact, Tuning, choose
from flux.tuning.machine import Machine, of_device

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
    """What a run has measured.

    wrong: problems whose results were wrong, which are not in the file.
    left: problems for which there was no time.
    """

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
    """What an earlier run has left."""
    if not file.exists():
        return None, []
    machine, facts = store.read(file)
    return machine, list(facts)


def traced(file: Path, world: int) -> list[Problem]:
    """The problems of a file of FLUX_RECORD_SHAPES that this many ranks have, each once.

    Raises:
        ValueError: the file cannot be read, or is no such file.
    """
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
        usual = "fused" if "fused" in fact.us else next(iter(fact.us))
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
    """One rank's part: all measure the same problems, rank 0 writes."""
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
                _files.write(path, store.to_json(here, facts, **about))
            step(label(problem), "done" if row.ok else f"WRONG: {row.check}")
    return Tuned(choices(facts), tuple(wrong), left) if rank == 0 else None
