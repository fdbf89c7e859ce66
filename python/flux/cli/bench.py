"""``flux bench``: what fusing gains on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from flux.bench import plot as plots
from flux.bench import record as records
from flux.bench import suites
from flux.bench.cases import FAMILIES, OPS
from flux.bench.model import DTYPE_BYTES, LINK_GB_PER_S
from flux.bench.record import Record
from flux.bench.report import footer, make_console, render
from flux.bench.runner import Settings, run
from flux.bench.suites import Problem, Request
from flux.testing import SpawnError

_CPU_PROCESSES = 4


def choose_problems(
    suite: suites.Suite | None,
    ops: list[str],
    n: int | None,
    k: int | None,
    world: int,
    tp: int,
    request: Request,
) -> tuple[list[Problem], list[str]]:
    """The rows to measure, and a line for everything that cannot be measured with this many processes.

    suite: None if all ops are of models, which are chosen by `request`.

    Raises ValueError for a shape that the op cannot take.
    """
    problems: list[Problem] = []
    skipped = []
    for op in ops:
        spec = OPS[op]
        if spec.collective and world == 1:
            skipped.append(
                f"{op} left out: it needs 2 ranks or more (`flux verify` emulates ranks on one GPU)"
            )
            continue
        if spec.collective and world != tp:
            skipped.append(f"{op} left out: TP {tp} needs {tp} processes, this run has {world}")
            continue
        if spec.rows is not None:
            rows = spec.rows(replace(request, op=op))
        elif suite is None:
            raise ValueError(f"bench: {op} needs a suite")
        elif n is not None and k is not None:
            rows = [Problem(op, "custom", spec.custom, m, n, k) for m in suite.m]
        else:
            rows = suite.problems(op, spec.patterns)
        for problem in rows:
            m, _, _ = problem.local(tp)
            if spec.collective and spec.deals_rows and m % tp:
                raise ValueError(f"{op}: m must be divisible by the {tp} ranks, got m={m}")
        problems += rows
    return problems, skipped


def choose(
    ops: list[str],
    *,
    suite: str | None,
    models: list[str],
    m: list[int],
    n: int | None,
    k: int | None,
    dtype: str | None,
    world: int | None,
    tp: int | None,
    cpu: bool,
    imbalance: Sequence[str] = (),
    ep: Sequence[int] = (),
    layers: int = 4,
) -> Settings:
    """Settings from what the user said and what the machine has.

    Raises ValueError naming the option to mend.
    """
    for op in ops:
        if op not in OPS and op not in FAMILIES:
            known = ", ".join([*OPS, *FAMILIES])
            raise ValueError(f"bench: op expected to be one of {known}, got {op!r}")
    ops = [name for op in ops for name in FAMILIES.get(op, (op,))]
    of_models = [op for op in ops if OPS[op].rows is not None]
    if of_models and n is not None:
        raise ValueError(f"bench: --n and --k expected without {of_models[0]}, which takes --model")
    if (n is None) != (k is None):
        raise ValueError("bench: --n and --k come together")
    gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        given = int(os.environ["WORLD_SIZE"])
        if world is not None and world != given:
            raise ValueError(f"bench: --world {world}, but torchrun started {given} processes")
        world = given
    if world is None:
        # --tp without --world: as many processes as that, if the machine has them.
        world = min(tp or gpus, gpus) if gpus else tp or _CPU_PROCESSES
    if gpus and world > gpus:
        raise ValueError(
            f"bench: --world expected to be at most {gpus}, the GPUs of this machine, got {world}"
        )
    if world < 1 or (tp is not None and tp < 1):
        raise ValueError("bench: --world and --tp expected to be at least 1")
    tp = tp or world
    # The main job leaves out what is measured on models: it has its own names.
    shapes = [
        op for op, spec in OPS.items() if spec.rows is None and not spec.by_name and (gpus or spec.collective)
    ]
    ops = ops or shapes
    chosen = None
    if len(of_models) < len(ops):
        chosen = suites.load(suite or ("default" if gpus else "cpu")).select(models, m)
    request = Request("", bool(gpus), world, tuple(models), tuple(m), tuple(imbalance), tuple(ep), layers)
    problems, skipped = choose_problems(chosen, ops, n, k, world, tp, request)
    if not problems:
        raise ValueError(
            "bench: nothing to measure: " + ("; ".join(skipped) or "the suite has no such shape")
        )
    dtype = dtype or (chosen.dtype if chosen else "bfloat16" if gpus else "float32")
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"bench: --dtype expected to be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return Settings(
        problems=tuple(problems),
        suite=chosen.name if chosen else "models",
        device="cuda" if gpus else "cpu",
        world=world,
        tp=tp,
        dtype=dtype,
        skipped=tuple(skipped),
        iters=20 if gpus else 5,
        rounds=7 if gpus else 5,
    )


def show(record: Record, picture: Path | None) -> None:
    """Prints a result and draws it if asked."""
    console = make_console()
    console.print(render(record, console.width))
    if picture is not None:
        console.print(f"picture: {plots.plot(record, picture)}", highlight=False)


def command(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Ops: {', '.join(op for op, spec in OPS.items() if spec.rows is None)}. Default: all but "
            f"{', '.join(op for op, spec in OPS.items() if spec.by_name)}; on CPUs the collective ones. "
            f"Of models: {', '.join(FAMILIES)}, or one part: "
            f"{', '.join(op for op, spec in OPS.items() if spec.rows)}."
        ),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Suite by name, or a TOML file.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model; may be repeated.")] = None,
    m: Annotated[list[int] | None, typer.Option("--m", help="Rows (tokens); may be repeated.")] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="Columns, global; with --k instead of a suite's.")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Inner dimension, global.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.")] = None,
    world: Annotated[int | None, typer.Option(help="Processes; default: all GPUs, or 4 on a CPU.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism of the shapes; default: --world.")
    ] = None,
    ep: Annotated[
        list[int] | None,
        typer.Option(help="moe: slices of the experts, 1 to --world; may be repeated. Default: both ends."),
    ] = None,
    imbalance: Annotated[
        list[str] | None,
        typer.Option(help="moe: standard deviation of the experts' loads, or hot; may be repeated."),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="e2e: to how many layers a model is cut.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here, row by row.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result (png, pdf, svg; needs matplotlib).")
    ] = None,
    iters: Annotated[int | None, typer.Option(min=1, help="Calls in a burst.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Bursts of each candidate.")] = None,
    shown: Annotated[
        Path | None, typer.Option("--show", help="Show a stored result, measure nothing.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit status 2 if a row is under the bar.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Without peers: flux and the GEMM, to compare kernels quickly.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU path even if there are GPUs.")] = False,
    link: Annotated[
        float, typer.Option(min=1.0, help="GB/s of a GPU's links, for the floor.")
    ] = LINK_GB_PER_S,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which the run is stopped.")] = 3600.0,
    all_configs: Annotated[bool, typer.Option("--all-configs", hidden=True)] = False,
) -> None:
    """Time flux against the strongest alternatives here. Every shape is checked before it is timed.

    Without arguments: the default suite with TP = number of GPUs, or the CPU path with 4 processes.
    Exit status 1 if a result is wrong.
    """
    try:
        if plot is not None:
            plots.require_matplotlib()
        if shown is not None:
            show(records.read(shown), plot)
            return
        settings = choose(
            list(ops or []),
            suite=suite,
            models=list(model or []),
            m=list(m or []),
            n=n,
            k=k,
            dtype=dtype,
            world=world,
            tp=tp,
            cpu=cpu,
            imbalance=list(imbalance or []),
            ep=list(ep or []),
            layers=layers,
        )
        if all_configs and (settings.device != "cuda" or settings.suite == "models"):
            raise ValueError("bench: --all-configs needs GPUs, and ops that have tile shapes to choose")
    except (ValueError, RuntimeError, OSError) as error:
        make_console(stderr=True).print(f"[bold red]error[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    settings = replace(
        settings,
        iters=iters or settings.iters,
        rounds=rounds or (3 if all_configs else settings.rounds),
        link_gb_per_s=link,
        all_configs=all_configs,
        alone=alone,
        json_file=str(json_file) if json_file else None,
        timeout_s=timeout,
    )
    try:
        record = run(settings)
    except SpawnError as error:
        _explain_failure(error, settings)
        raise typer.Exit(1) from None
    if record is None:  # torchrun: rank 0 speaks for all
        return
    show(record, None if all_configs else plot)
    if any(not row.ok for row in record.rows):
        raise typer.Exit(1)
    if strict and not within_bar(record):
        raise typer.Exit(2)


def _explain_failure(error: SpawnError, settings: Settings) -> None:
    """The first rank that failed in full, the others in a line each: theirs are mostly consequences."""
    console = make_console(stderr=True)
    console.print(str(error.failures[0]), markup=False, highlight=False, soft_wrap=True)
    for failure in error.failures[1:]:
        last = str(failure).strip().splitlines()[-1]
        console.print(f"rank {failure.rank}: {last}", markup=False, highlight=False, soft_wrap=True)
    if settings.json_file and Path(settings.json_file).exists():
        console.print(f"rows measured before that are in {settings.json_file}", highlight=False)


def within_bar(record: Record) -> bool:
    """Whether every op of the record meets its bar (docs/benchmarks.md)."""
    return record.device == "cpu" or all(footer(record, op)[1].meets_bar for op in record.ops())
