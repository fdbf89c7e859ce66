"""``flux bench``: what fusing gains on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from flux.bench import html, suites
from flux.bench import plot as plots
from flux.bench import record as records
from flux.bench.cases import FAMILIES, OPS
from flux.bench.model import DTYPE_BYTES, FP8, LINK_GB_PER_S
from flux.bench.record import Record
from flux.bench.report import TABLE_WIDTH, footer, make_console, render
from flux.bench.runner import Settings, run
from flux.bench.suites import Problem, Request
from flux.cli import fp8_rows, history, options
from flux.cli.estimate import estimate
from flux.cli.options import real, whole
from flux.cli.show import show_file
from flux.comm.workspace import MAX_WORLD_SIZE
from flux.plan.nodes import SCHEDULES
from flux.testing import SpawnError

_CPU_PROCESSES = 4
DEFAULT_LAYERS = 4
_WITH_SHOW = {"plot", "shown", "html_file"}
# Options of a run on CPUs that keep it comparable with `make bench`.
_DEFAULT_RUN = {"json_file", "html_file", "plot", "cpu", "timeout", "strict", "yes"}


def choose_problems(
    suite: suites.Suite | None,
    ops: list[str],
    n: int | None,
    k: int | None,
    world: int,
    tp: int,
    request: Request,
    asked: bool,
) -> tuple[list[Problem], list[str]]:
    """The rows to measure, and a line for everything that cannot be measured with this many processes.

    suite: None if all ops are of models, which are chosen by `request`.
    asked: whether the user named the ops, and wants to know of each that has no row.

    Raises ValueError for a shape that the op cannot take.
    """
    problems: list[Problem] = []
    skipped: dict[str, list[str]] = {}  # ops by the reason why they are left out
    for op in ops:
        spec = OPS[op]
        if spec.collective and world == 1:
            why = "2 ranks or more are needed (`flux verify` emulates ranks on one GPU)"
            skipped.setdefault(why, []).append(op)
            continue
        if spec.collective and world != tp:
            why = f"TP {tp} needs {tp} processes, this run has {world}"
            skipped.setdefault(why, []).append(op)
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
            if spec.collective and spec.deals_rows and problem.m % tp:
                raise ValueError(f"{op}: m must be divisible by the {tp} ranks, got m={problem.m}")
            problem.local(tp)
        if not rows and suite is not None and asked:
            skipped.setdefault(f"suite {suite.name} has no shape for it", []).append(op)
        problems += rows
    return problems, [f"{', '.join(names)} left out: {why}" for why, names in skipped.items()]


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
    layers: int | None = None,
    nodes: int | None = None,
    scales: Sequence[str] = (),
) -> Settings:
    """Settings from what the user said and what the machine has.

    Raises ValueError naming the option to mend.
    """
    for op in ops:
        if op not in OPS and op not in FAMILIES:
            known = ", ".join([*OPS, *FAMILIES])
            raise ValueError(f"bench: op expected to be one of {known}, got {op!r}")
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": FP8}.get(dtype or "", dtype)
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise ValueError(f"bench: --dtype expected to be bf16, fp16, fp32 or fp8, got {dtype!r}")
    kinds = fp8_rows.kinds(dtype, scales)
    ops = fp8_rows.measurable(ops, bool(kinds))
    models, m = list(dict.fromkeys(models)), list(dict.fromkeys(m))
    of_models = [op for op in ops if OPS[op].rows is not None]
    if of_models and n is not None:
        raise ValueError(f"bench: --n and --k expected without {of_models[0]}, which takes --model")
    if (n is None) != (k is None):
        only = "--n" if k is None else "--k"
        raise ValueError(f"bench: --n and --k come together, got only {only}")
    with_moe, with_e2e = (any(op.startswith(family) for op in ops) for family in ("moe", "e2e"))
    for option, value, used, expected in (
        ("--suite", suite, not ops or len(of_models) < len(ops), "with ops that take no --model"),
        ("--model", models, n is None, "without --n and --k, which are a model by themselves"),
        ("--imbalance", imbalance, with_moe, "with moe"),
        ("--ep", ep, with_moe, "with moe"),
        ("--layers", layers, with_e2e, "with e2e"),
    ):
        if value and not used:
            raise ValueError(f"bench: {option} expected {expected}, got {' '.join(ops) or 'no op'}")
    gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    place = options.torchrun()
    ops = _on_nodes(ops, nodes, world, cpu)
    if place is not None:
        if world is not None and world != place[1]:
            raise ValueError(f"bench: --world {world}, but torchrun started {place[1]} processes")
        world = place[1]
    if world is None:
        # --tp without --world: as many processes as that, if the machine has them.
        world = min(tp or gpus, gpus) if gpus else tp or _CPU_PROCESSES
        world -= world % (nodes or 1)
    if gpus and world > gpus:
        raise ValueError(
            f"bench: --world expected to be at most {gpus}, the GPUs of this machine, got {world}"
        )
    if world < 1 or (tp is not None and tp < 1):
        raise ValueError("bench: --world and --tp expected to be at least 1")
    if not gpus and world > MAX_WORLD_SIZE:
        raise ValueError(f"bench: --world expected to be at most {MAX_WORLD_SIZE} on CPUs, got {world}")
    tp = tp or world
    # Ops that are measured on models have their own names, and are not part of the main job.
    shapes = [
        op for op, spec in OPS.items() if spec.rows is None and not spec.by_name and (gpus or spec.collective)
    ]
    if kinds:
        shapes = [op for op in shapes if OPS[op].scaled]
    asked, ops = bool(ops) and not nodes, ops or shapes
    chosen = None
    if len(of_models) < len(ops):
        chosen = suites.load(suite or ("default" if gpus else "cpu")).select(models, m)
    request = Request(
        "",
        bool(gpus),
        world,
        tuple(models),
        tuple(m),
        tuple(dict.fromkeys(imbalance)),
        tuple(dict.fromkeys(ep)),
        layers or DEFAULT_LAYERS,
    )
    problems, skipped = choose_problems(chosen, ops, n, k, world, tp, request, asked)
    problems = [replace(problem, scales=kind) for problem in problems for kind in kinds] or problems
    if not problems:
        raise ValueError(f"bench: nothing to measure: {'; '.join(skipped) or 'the suite has no such shape'}")
    return Settings(
        problems=tuple(problems),
        suite=chosen.name if chosen else "models",
        device="cuda" if gpus else "cpu",
        world=world,
        tp=tp,
        dtype=dtype or (chosen.dtype if chosen else "bfloat16" if gpus else "float32"),
        skipped=tuple(skipped),
        nodes=nodes or 1,
        ways=tuple(dict.fromkeys(s for of in SCHEDULES.values() for s in of)) if nodes else ("parts",),
        iters=20 if gpus else 5,
        rounds=7 if gpus else 5,
    )


def _on_nodes(ops: list[str], nodes: int | None, world: int | None, cpu: bool) -> list[str]:
    """The ops to measure on emulated nodes: those that were asked for, or all that have schedules for nodes.

    Raises ValueError naming the option to mend.
    """
    if nodes is None:
        return ops
    if options.torchrun() is not None:
        raise ValueError(
            "bench: --nodes expected without torchrun, where FLUX_NODE says which node a rank is on"
        )
    options.check_nodes("bench", nodes, world, cpu)
    possible = [op for op in OPS if op in SCHEDULES]
    for op in ops:
        if op not in possible:
            raise ValueError(f"bench: --nodes expected with {', '.join(possible)}, got {op}")
    return ops or possible


def _somebody_to_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty() and options.torchrun() is None


def confirm(settings: Settings, yes: bool) -> None:
    """Announces a run that is long or large for CPUs and asks for it. Without a terminal --yes is needed.

    Raises ValueError where nobody can be asked, typer.Exit if the answer is no.
    """
    expected = estimate(settings)
    if not expected.is_much or not options.speaks():
        return
    what = f"on these CPUs this run takes {expected}"
    if expected.seconds > settings.timeout_s:
        what += f", and --timeout {settings.timeout_s:g} would stop it"
    if not yes and not _somebody_to_ask():
        raise ValueError(f"bench: {what}: choose fewer or smaller rows with --model and --m, or add --yes")
    console = make_console(stderr=True)
    console.print(f"{what[0].upper()}{what[1:]}.", highlight=False, soft_wrap=True)
    if not yes and not typer.confirm("Go on?", err=True):
        raise typer.Exit(1)


def command(
    ctx: typer.Context,
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPS",
            show_default=False,
            help=f"Ops: {', '.join(op for op, spec in OPS.items() if spec.rows is None)}. Default: all but "
            f"{', '.join(op for op, spec in OPS.items() if spec.by_name)}; on CPUs the collective ones. "
            f"Of models: {', '.join(FAMILIES)}, or one part: "
            f"{', '.join(op for op, spec in OPS.items() if spec.rows)}.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"{', '.join(suites.available())}, or a TOML file with sizes."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this model; may be repeated.")
    ] = None,
    m: Annotated[
        list[int] | None,
        typer.Option("--m", parser=whole(), metavar="N", help="Rows (tokens); may be repeated."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            parser=whole(),
            metavar="N",
            help="Columns of the whole model; with --k instead of a suite's models.",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", parser=whole(), metavar="N", help="Inner dimension of the whole model."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="TYPE", help="bf16, fp16, fp32 or fp8.")] = None,
    scales: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="With --dtype fp8: tensor, row (and column) or block; may be repeated. Default: all.",
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(parser=whole(), metavar="N", help="Processes. Default: all GPUs, or 4 on a CPU."),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(parser=whole(), metavar="N", help="Tensor parallelism of the shapes. Default: --world."),
    ] = None,
    ep: Annotated[
        list[int] | None,
        typer.Option(
            parser=whole(),
            metavar="N",
            help="moe: into how many slices the experts are cut, a divisor of --world; may be repeated. "
            "Default: 1 and --world.",
        ),
    ] = None,
    imbalance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STD",
            help="moe: standard deviation of the experts' loads, 0 to 1, zipf or hot; may be repeated.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            parser=whole(2, MAX_WORLD_SIZE),
            metavar="N",
            help="The ranks on so many nodes, emulated on this machine.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(parser=whole(), metavar="N", help=f"e2e: layers of a model. Default: {DEFAULT_LAYERS}."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result here, row by row.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the result (png, pdf, svg; needs matplotlib)."),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with tables, plots and all samples."),
    ] = None,
    iters: Annotated[int | None, typer.Option(parser=whole(), metavar="N", help="Calls in a burst.")] = None,
    rounds: Annotated[
        int | None, typer.Option(parser=whole(), metavar="N", help="Bursts of each candidate.")
    ] = None,
    shown: Annotated[
        Path | None,
        typer.Option("--show", metavar="FILE", help="Show a JSON file of flux, measure nothing."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", metavar="", help="Exit status 1 if a row is under the bar (GPUs)."),
    ] = False,
    sustained: Annotated[
        bool, typer.Option("--sustained", metavar="", help="Also after 0.4 s without a rest (GPUs).")
    ] = False,
    neighbours: Annotated[
        bool,
        typer.Option("--neighbours", metavar="", help="Also after a short kernel of torch, and of flux."),
    ] = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", metavar="", help="Without peers: flux and the GEMM, to compare kernels quickly."
        ),
    ] = False,
    cpu: Annotated[
        bool, typer.Option("--cpu", metavar="", help="Use the CPU path even if there are GPUs.")
    ] = False,
    link: Annotated[
        float | None,
        typer.Option(
            parser=real(1.0),
            metavar="GB/S",
            help=f"Speed of a GPU's links, for the floor. Default: {LINK_GB_PER_S:g}.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(parser=real(1.0), metavar="SECONDS", help="After that the run is stopped."),
    ] = 3600.0,
    yes: Annotated[
        bool, typer.Option("--yes", metavar="", help="Start a run that is long for CPUs without asking.")
    ] = False,
    all_configs: Annotated[bool, typer.Option("--all-configs", hidden=True)] = False,
) -> None:
    """Time flux against the strongest alternatives here. Every shape is checked before it is timed.

    Without arguments: the default suite with TP = number of GPUs, or the CPU path with 4 processes.
    "compare A.json B.json" compares two results: exit status 1 if a row is worse.
    "history FILES" follows rows over results, with --model, --m and --plot.
    Exit status 1 if a result is wrong, 2 if an option is.
    """
    given = {p for p in ctx.params if str(ctx.get_parameter_source(p)).endswith("COMMANDLINE")}
    with options.refusing():
        if plot is not None:
            plots.check_suffix(plot)
            options.check_target("bench: --plot", plot)
        for option, target, others in (
            ("--plot", plot, {"--json": json_file, "--html": html_file}),
            ("--html", html_file, {"--json": json_file}),
        ):
            for other, file in others.items():
                if target is not None and target == file:
                    raise ValueError(
                        f"bench: {option} expected another file than {other}, got {str(target)!r}"
                    )
        options.check_target("bench: --html", html_file)
        if ops and ops[0] in history.OF_FILES:
            history.of_files(ctx, given, ops, model or [], m or [], plot)
            return
        if shown is not None:
            options.only_rank_0()
            if idle := [p.opts[0] for p in ctx.command.params if p.name in given - _WITH_SHOW]:
                raise ValueError(f"bench: --show measures nothing, expected without {', '.join(idle)}")
            show_file(shown, plot, html_file)
            return
        if options.torchrun() and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                "bench: RANK and WORLD_SIZE expected from torchrun, got them without MASTER_ADDR"
            )
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
            nodes=nodes,
            scales=list(scales or []),
        )
        on_gpus = settings.device == "cuda"
        for package in ("transformers", "accelerate"):
            if any(p.op.startswith("e2e") for p in settings.problems) and find_spec(package) is None:
                raise ValueError(f"bench: e2e needs {package}, which is not installed: pip install {package}")
        if sustained and (not on_gpus or all_configs):
            raise ValueError("bench: --sustained expected with GPUs, whose clocks fall, and no --all-configs")
        if link is not None and not on_gpus:
            raise ValueError(f"bench: --link expected with GPUs, got {link:g} for CPUs, which have no floor")
        if all_configs and (not on_gpus or settings.suite == "models" or plot or html_file):
            raise ValueError(
                "bench: --all-configs needs GPUs and ops with tile shapes to choose, no --plot and no --html"
            )
        settings = replace(
            settings,
            iters=iters or settings.iters,
            rounds=rounds or (3 if all_configs else settings.rounds),
            link_gb_per_s=link or LINK_GB_PER_S,
            all_configs=all_configs,
            alone=alone,
            sustained=sustained,
            neighbours=neighbours,
            json_file=str(json_file) if json_file else None,
            timeout_s=timeout,
        )
        if not on_gpus and given - _DEFAULT_RUN:
            confirm(settings, yes)
        options.check_target("bench: --json", json_file)
    try:
        record = run(settings)
    except SpawnError as error:
        _explain_failure(error, settings)
        raise typer.Exit(1) from None
    if record is None:  # torchrun: only rank 0 has the record
        return
    console = make_console(least=TABLE_WIDTH)
    console.print(render(record, console.width))
    for option, what, target, writer in (
        ("--plot", "picture", plot, plots.plot),
        ("--html", "report", html_file, html.write),
    ):
        if target is None:
            continue
        try:
            console.print(f"{what}: {writer(record, target)}", highlight=False, soft_wrap=True)
        except (ValueError, RuntimeError, OSError) as error:
            options.say_error(f"bench: {option} {target}: {error}")
            raise typer.Exit(1) from None
    if any(not row.ok for row in record.rows) or (strict and not within_bar(record)):
        raise typer.Exit(1)


def _explain_failure(error: SpawnError, settings: Settings) -> None:
    """Prints the first failure in full and the others, which are mostly consequences, in a line each."""
    console = make_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if options.timed_out(error):
        options.say_error(f"bench: stopped after {settings.timeout_s:g} s (--timeout)")
    else:
        say(str(error.failures[0]))
        for failure in error.failures[1:]:
            say(f"rank {failure.rank}: {str(failure).strip().splitlines()[-1]}")
    file = Path(settings.json_file or "")
    if file.is_file() and not records.read(file).complete:
        say(f"rows measured before that are in {file}")


def within_bar(record: Record) -> bool:
    """Whether every op of the record meets its bar (docs/benchmarks.md)."""
    return record.device == "cpu" or all(footer(record, op)[1].meets_bar for op in record.ops())
