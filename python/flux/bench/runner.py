"""Runs a suite: one function for all ranks, and two ways to start them (our own processes, or torchrun)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import flux
from flux import _env, machine
from flux.bench.cases import OPS
from flux.bench.cases.common import Candidate, Context
from flux.bench.model import FP8, FP8_RESULT, LINK_GB_PER_S, OTHERS, Row, Timing, derive, on_wire_bytes
from flux.bench.record import Record, write
from flux.bench.report import make_console
from flux.bench.suites import SHAPE, Problem
from flux.bench.timing import Timer, make_timer
from flux.testing.compare import first_wrong, passed


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    world: processes; tp: by how much the shapes are cut; alone: flux and the GEMM, without peers; ways: in
    which flux runs beside its plan.
    """

    problems: tuple[Problem, ...]
    suite: str
    device: str
    world: int
    tp: int
    dtype: str
    iters: int = 20
    rounds: int = 7
    link_gb_per_s: float = LINK_GB_PER_S
    alone: bool = False
    json_file: str | None = None
    skipped: tuple[str, ...] = ()
    timeout_s: float = 3600.0
    ways: tuple[str, ...] = ("parts",)

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of results, and of operands that are not fp8."""
        dtype: torch.dtype = getattr(torch, FP8_RESULT if self.dtype == FP8 else self.dtype)
        return dtype

    def public(self) -> dict[str, Any]:
        hidden = ("problems", "json_file", "skipped", "suite", "device")
        known = {key: value for key, value in asdict(self).items() if key not in hidden}
        return {**known, "tuning": _env.get("FLUX_TUNING")}


def run(settings: Settings, by: Callable[..., Any] | None = None, *more: Any, **variables: str) -> Any:
    """What rank 0 returns of ``by(rank, world_size, settings, *more)``, by default the record of `run_rank`.

    Under torchrun only rank 0 gets it, the others None. `variables`: of the ranks' environment.
    """
    by = by or run_rank
    machine.disable_multicast()
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if settings.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        os.environ.update(variables)
        dist.init_process_group(backend)
        try:
            return by(rank, world, settings, *more)
        finally:
            dist.destroy_process_group()
    if settings.world == 1:
        os.environ.update(variables)
        return by(0, 1, settings, *more)
    from flux.testing import spawn

    env = {**machine.NO_MULTICAST, **variables}
    if all(problem.op.startswith("layer") for problem in settings.problems):
        # Megatron requires it for its overlap, so measure with this setting.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    of_ranks = spawn(
        by, settings.world, settings, *more, timeout_s=settings.timeout_s, backend=backend, env=env
    )
    return of_ranks[0]


def run_rank(rank: int, world_size: int, settings: Settings) -> Record | None:
    """One rank's part of a run: checks and times every problem. Rank 0 keeps record and shows progress."""
    context = context_of(rank, world_size, settings)
    record = Record(
        version=flux.__version__,
        commit=machine.commit(),
        date=machine.now(),
        suite=settings.suite,
        device=settings.device,
        machine=machine.describe(settings.device) if rank == 0 else {},
        settings=settings.public(),
        skipped=list(settings.skipped),
    )
    with torch.no_grad():
        timer = make_timer(context.device, context.group)
        if context.cuda:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            here = range(min(local, torch.cuda.device_count())) if rank == 0 else ()
            read = [torch.device("cuda", i) for i in here]
            load = machine.smi_under_load([context.device], read)
            if load:
                record.machine["gpus_load"] = load
        with progress(rank == 0, len(settings.problems)) as (step, say):
            context = replace(context, say=say)
            for slow in machine.throttled(record.machine.get("gpus_load", [])):
                say(f"warning: {slow}")
            for problem in settings.problems:
                step(label(problem), None)
                stage = partial(step, label(problem), None)
                row = measure(problem, context, timer, settings, stage)
                record.rows.append(row)
                if rank == 0 and settings.json_file:
                    write(record, settings.json_file)
                step(label(problem), _outcome(row, settings))
    record.complete = True
    if rank == 0 and context.cuda:
        record.machine["gpus_after"] = machine.smi()
    if rank == 0 and settings.json_file:
        write(record, settings.json_file)
    return record if rank == 0 else None


def context_of(rank: int, world_size: int, settings: Settings) -> Context:
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD if world_size > 1 else None
    context = Context(rank, world_size, settings.tp, device, settings.result_dtype, group)
    return context if settings.alone else context.with_twins(settings.ways)


def measure(
    problem: Problem,
    context: Context,
    timer: Timer,
    settings: Settings,
    stage: Callable[[str], object] = lambda text: None,
) -> Row:
    """One row: exact data first, then the clock. A wrong result is recorded and not timed."""
    stage("checking")
    spec = OPS[problem.op]
    local = problem.local(context.tp)
    on_wire = problem.on_wire(context.tp, on_wire_bytes(problem.pattern, settings.dtype))
    shape: dict[str, Any] = {name: getattr(problem, name) for name in SHAPE}
    on_wire = on_wire if spec.collective else 0
    row = Row(**shape, tp=context.tp, dtype=settings.dtype, local=local, wire_bytes=on_wire)
    # flux in every way in which it is timed.
    everybody = [context, *(replace(context, group=twin) for twin in context.twins.values())]
    row.check = _agree(first_wrong(spec.case.check(problem, each) for each in everybody), context)
    lineup = spec.case.prepare(problem, context)
    row.plan, row.notes = lineup.plan, lineup.notes
    roles = {c.role for c in lineup.candidates}
    if not row.ok:
        roles -= {"flux", "int8"}
    if settings.alone:
        roles &= {"flux", "gemm"}
    candidates = [c for c in lineup.candidates if c.role in roles]
    if not candidates:
        return row
    stage(f"timing {len(candidates)} candidates")
    _time(row, candidates, timer, settings)
    return row


def _time(row: Row, candidates: list[Candidate], timer: Timer, settings: Settings) -> None:
    calls = {c.name: c.call for c in candidates}
    compared = [c for c in candidates if c.role in ("flux", *OTHERS)]
    for call in calls.values():
        timer.warm(call)
    samples = timer.interleaved(calls, settings.iters, settings.rounds)
    told = "the host never got ahead of the GPU; its time is included"
    row.notes += [f"{name}: {told}" for name in timer.host_bound]
    row.times = {c.name: Timing(c.role, tuple(t / c.calls for t in samples[c.name])) for c in candidates}
    if settings.device == "cuda":
        row.host_us = {c.name: round(timer.host_us(c.eager or c.call), 2) for c in compared}


def _agree(mine: str, context: Context) -> str:
    """The first failure of any rank; without one, the message of the ranks, if other than "exact"."""
    if context.group is None:
        return mine
    told: list[Any] = [None] * context.world_size
    dist.all_gather_object(told, mine, group=context.group)
    return first_wrong(said if passed(said) else f"rank {rank}: {said}" for rank, said in enumerate(told))


def label(problem: Problem) -> str:
    side = f" ({problem.pattern})" if problem.op == "gemm" else ""
    names = (f"{problem.op}{side}", problem.model, problem.variant, problem.scales, f"M={problem.m}")
    return " ".join(filter(None, names))


def _outcome(row: Row, settings: Settings) -> str:
    if not row.ok:
        return f"WRONG: {row.check}"
    d = derive(row, settings.link_gb_per_s)
    if d.flux is None or d.peer is None:
        return "done"
    return f"{d.flux:.3f} ms, {d.peer_name} {d.peer:.3f} ms, {d.speedup:.2f}x"


@contextmanager
def progress(show: bool, total: int) -> Iterator[Any]:
    """A live bar on a terminal, else a line per row. Yields a function that takes a row's label, its outcome
    if it has one, and else what is done for it; and a function that takes a line of text.
    """
    if not show:
        yield lambda label, outcome, doing="": None, lambda text: None
        return
    console = make_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def step(label: str, outcome: str | None, doing: str = "") -> None:
            text = ": ".join(filter(None, (label, outcome or doing)))
            bar.update(task, description=text, advance=outcome is not None)
            if outcome is not None and not console.is_terminal:
                say(text)

        yield step, say
