"""``flux bench``: what fusing gains on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flux.bench import plot as plots
from flux.bench import record as records
from flux.bench import suites
from flux.bench.cases import FAMILIES, OPS
from flux.bench.model import DTYPE_BYTES, FP8, LINK_GB_PER_S, SCALES
from flux.bench.record import Record
from flux.bench.report import TABLE_WIDTH, footer, make_console, render
from flux.bench.runner import Settings, run
from flux.bench.suites import Problem, Request
from flux.cli import compare, history, options
from flux.cli.options import counted, file, flag, named, real
from flux.cli.show import show_file
from flux.comm.workspace import MAX_WORLD_SIZE
from flux.testing import SpawnError

_CPU_PROCESSES = 4
# What measures nothing, and the options that it takes.
_OF_FILES = {"compare": {"ops"}, "history": {"ops", "model", "m"}, "--show": {"plot", "shown"}}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": FP8}


@dataclass(frozen=True)
class Asked:
    """What a user says of the rows to measure, as `command` takes it."""

    ops: tuple[str, ...] = ()
    suite: str | None = None
    model: tuple[str, ...] = ()
    m: tuple[int, ...] = ()
    n: int | None = None
    k: int | None = None
    dtype: str | None = None
    scales: tuple[str, ...] = ()
    world: int | None = None
    tp: int | None = None
    ep: tuple[int, ...] = ()
    imbalance: tuple[str, ...] = ()
    cpu: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Asked:
        """Of a command's options by name. What is repeated counts once."""
        mine: dict[str, Any] = {}
        for name in (field.name for field in fields(cls) if given.get(field.name) is not None):
            value = given[name]
            mine[name] = tuple(dict.fromkeys(value)) if isinstance(value, list) else value
        return cls(**mine)


def choose_problems(
    suite: suites.Suite | None, asked: Asked, ops: list[str], request: Request, tp: int
) -> tuple[list[Problem], list[str]]:
    """The rows to measure, and a line for everything that cannot be measured with this many processes.

    suite: None if all ops are of models, which are chosen by `request`.

    Raises ValueError for a shape that the op cannot take.
    """
    problems: list[Problem] = []
    skipped: dict[str, list[str]] = {}  # ops by the reason why they are left out
    for op in ops:
        spec = OPS[op]
        if spec.collective and request.world != tp or spec.collective and tp == 1:
            why = f"TP {tp} needs {tp} processes, this run has {request.world}"
            if request.world == 1:
                why = "2 ranks or more are needed (`flux verify` emulates ranks on one GPU)"
            skipped.setdefault(why, []).append(op)
            continue
        if spec.rows is not None:
            rows = spec.rows(replace(request, op=op))
        elif suite is None:
            raise ValueError(f"bench: {op} needs a suite")
        elif asked.n is not None and asked.k is not None:
            rows = [Problem(op, "custom", spec.custom, m, asked.n, asked.k) for m in suite.m]
        else:
            rows = suite.problems(op, spec.patterns)
        for problem in rows:
            if spec.collective and spec.deals_rows and problem.m % tp:
                raise ValueError(f"{op}: m must be divisible by the {tp} ranks, got m={problem.m}")
            problem.local(tp)
        if not rows and suite is not None and asked.ops:
            skipped.setdefault(f"suite {suite.name} has no shape for it", []).append(op)
        problems += rows
    return problems, [f"{', '.join(names)} left out: {why}" for why, names in skipped.items()]


def choose(asked: Asked) -> Settings:
    """Settings from what the user said and what the machine has.

    Raises ValueError naming the option to mend.
    """
    for op in asked.ops:
        if op not in OPS and op not in FAMILIES:
            known = ", ".join([*OPS, *FAMILIES])
            raise ValueError(f"bench: op expected to be one of {known}, got {op!r}")
        for name in FAMILIES.get(op, (op,)):
            if OPS[name].needs and find_spec(OPS[name].needs) is None:
                raise ValueError(f"bench: {op} expected {OPS[name].needs}, which is not installed")
    dtype = _DTYPES.get(asked.dtype or "", asked.dtype)
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise ValueError(f"bench: --dtype expected to be bf16, fp16, fp32 or fp8, got {dtype!r}")
    kinds = _kinds(dtype, asked.scales)
    ops = _measurable(asked.ops, bool(kinds))
    of_models = [op for op in ops if OPS[op].rows is not None]
    _check_shapes(asked, ops, of_models)
    gpus = 0 if asked.cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    world, tp = _world(asked, gpus)
    # Ops that are measured on models have their own names, and are not part of the main job.
    ops = ops or [
        op
        for op, spec in OPS.items()
        if spec.rows is None and not spec.by_name and (gpus or spec.collective) and (spec.scaled or not kinds)
    ]
    chosen = None
    if len(of_models) < len(ops):
        chosen = suites.load(asked.suite or ("default" if gpus else "cpu")).select(
            list(asked.model), list(asked.m)
        )
    request = Request("", bool(gpus), world, asked.model, asked.m, asked.imbalance, asked.ep)
    problems, skipped = choose_problems(chosen, asked, ops, request, tp)
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
        iters=20 if gpus else 5,
        rounds=7 if gpus else 5,
    )


def _check_shapes(asked: Asked, ops: list[str], of_models: list[str]) -> None:
    """Refuses options of shapes that would change nothing."""
    n, k = asked.n, asked.k
    if of_models and n is not None:
        raise ValueError(f"bench: --n and --k expected without {of_models[0]}, which takes --model")
    if (n is None) != (k is None):
        only = "--n" if k is None else "--k"
        raise ValueError(f"bench: --n and --k come together, got only {only}")
    with_moe = any(op.startswith("moe") for op in ops)
    for option, value, used, expected in (
        ("--suite", asked.suite, not ops or len(of_models) < len(ops), "with ops that take no --model"),
        ("--model", asked.model, n is None, "without --n and --k, which are a model by themselves"),
        ("--imbalance", asked.imbalance, with_moe, "with moe"),
        ("--ep", asked.ep, with_moe, "with moe"),
    ):
        if value and not used:
            raise ValueError(f"bench: {option} expected {expected}, got {' '.join(ops) or 'no op'}")


def _world(asked: Asked, gpus: int) -> tuple[int, int]:
    """Processes, and tensor parallelism of the shapes."""
    world, tp, place = asked.world, asked.tp, options.torchrun()
    if place is not None:
        if world is not None and world != place[1]:
            raise ValueError(f"bench: --world {world}, but torchrun started {place[1]} processes")
        world = place[1]
    if world is None:
        # --tp without --world: as many processes as that, if the machine has them.
        world = min(tp or gpus, gpus) if gpus else tp or _CPU_PROCESSES
    if gpus and world > gpus:
        raise ValueError(
            f"bench: --world expected to be at most {gpus}, the GPUs of this machine, got {world}"
        )
    if world < 1 or (tp is not None and tp < 1):
        raise ValueError("bench: --world and --tp expected to be at least 1")
    if not gpus and world > MAX_WORLD_SIZE:
        raise ValueError(f"bench: --world expected to be at most {MAX_WORLD_SIZE} on CPUs, got {world}")
    return world, tp or world


def _kinds(dtype: str | None, scales: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of scales to measure, none without fp8 operands."""
    if dtype != FP8:
        if scales:
            raise ValueError(f"bench: --scales expected with --dtype fp8, got --dtype {dtype}")
        return ()
    for kind in scales:
        if kind not in SCALES:
            raise ValueError(f"bench: --scales expected to be one of {', '.join(SCALES)}, got {kind!r}")
    return scales or SCALES


def _measurable(ops: tuple[str, ...], scaled: bool) -> list[str]:
    """The ops that were asked for, and of a family those that can be measured with such operands."""
    found = []
    for op in ops:
        can = [name for name in FAMILIES.get(op, (op,)) if (OPS[name].scaled if scaled else OPS[name].wide)]
        if not can:
            what = "another --dtype than fp8" if scaled else "--dtype fp8"
            raise ValueError(f"bench: {op} expected with {what}")
        found += can
    return list(dict.fromkeys(found))


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
        str | None, named(f"{', '.join(suites.available())}, or a TOML file with sizes.")
    ] = None,
    model: options.Models = None,
    m: options.Rows = None,
    n: Annotated[
        int | None, counted("Columns of the whole model; with --k instead of a suite's models.", "--n")
    ] = None,
    k: Annotated[int | None, counted("Inner dimension of the whole model.", "--k")] = None,
    dtype: Annotated[str | None, named("bf16, fp16, fp32 or fp8.", metavar="TYPE")] = None,
    scales: Annotated[
        list[str] | None,
        named(
            "With --dtype fp8: tensor, row (and column) or block; may be repeated. Default: all.",
            metavar="KIND",
        ),
    ] = None,
    world: Annotated[int | None, counted("Processes. Default: all GPUs, or 4 on a CPU.")] = None,
    tp: Annotated[int | None, counted("Tensor parallelism of the shapes. Default: --world.")] = None,
    ep: Annotated[
        list[int] | None,
        counted(
            "moe: into how many slices the experts are cut, a divisor of --world; may be repeated. "
            "Default: 1 and --world."
        ),
    ] = None,
    imbalance: Annotated[
        list[str] | None,
        named(
            "moe: standard deviation of the experts' loads, 0 to 1, zipf or hot; may be repeated.",
            metavar="STD",
        ),
    ] = None,
    json_file: Annotated[Path | None, file("Write the result here, row by row.", "--json")] = None,
    plot: Annotated[Path | None, file("Draw the result (png, pdf, svg; needs matplotlib).")] = None,
    iters: options.Burst = None,
    rounds: options.Rounds = None,
    shown: Annotated[Path | None, file("Show a JSON file of flux, measure nothing.", "--show")] = None,
    strict: Annotated[bool, flag("Exit status 1 if a row is under the bar (GPUs).", "--strict")] = False,
    alone: Annotated[
        bool, flag("Without peers: flux and the GEMM, to compare kernels quickly.", "--alone")
    ] = False,
    cpu: options.OnCpu = False,
    link: Annotated[
        float | None,
        typer.Option(
            parser=real(1.0),
            metavar="GB/S",
            help=f"Speed of a GPU's links, for the floor. Default: {LINK_GB_PER_S:g}.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(parser=real(1.0), metavar="SECONDS", help="After that the run is stopped.")
    ] = 3600.0,
) -> None:
    """Time flux against the strongest alternatives here. Every shape is checked before it is timed.

    Without arguments: the default suite with TP = number of GPUs, or the CPU path with 4 processes.
    Exit status 1 if a result is wrong, 2 if an option is.
    """
    given = {p for p in ctx.params if str(ctx.get_parameter_source(p)).endswith("COMMANDLINE")}
    with options.refusing():
        if plot is not None:
            plots.check_suffix(plot)
            options.check_target("bench: --plot", plot)
            if plot == json_file:
                raise ValueError(f"bench: --plot expected another file than --json, got {str(plot)!r}")
        what = "--show" if shown is not None else ops[0] if ops and ops[0] in _OF_FILES else ""
        if what:
            _of_files(what, ctx, given)
            return
        if options.torchrun() and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                "bench: RANK and WORLD_SIZE expected from torchrun, got them without MASTER_ADDR"
            )
        settings = _measuring(choose(Asked.of(ctx.params)), ctx.params)
        options.check_target("bench: --json", json_file)
    if options.speaks():
        on = f"{settings.world} {'GPUs' if settings.device == 'cuda' else 'CPU processes'}"
        make_console(stderr=True).print(f"rows: {len(settings.problems)}, on {on}", highlight=False)
    try:
        record = run(settings)
    except SpawnError as error:
        _explain_failure(error, settings)
        raise typer.Exit(1) from None
    if record is None:  # torchrun: only rank 0 has the record
        return
    console = make_console(least=TABLE_WIDTH)
    console.print(render(record, console.width))
    if plot is not None:
        try:
            console.print(f"picture: {plots.plot(record, plot)}", highlight=False, soft_wrap=True)
        except (ValueError, RuntimeError, OSError) as error:
            options.say_error(f"bench: --plot {plot}: {error}")
            raise typer.Exit(1) from None
    if any(not row.ok for row in record.rows) or (strict and not within_bar(record)):
        raise typer.Exit(1)


def _measuring(settings: Settings, given: dict[str, Any]) -> Settings:
    """The settings with what the user said of how to measure."""
    link = given["link"]
    if link is not None and settings.device != "cuda":
        raise ValueError(f"bench: --link expected with GPUs, got {link:g} for CPUs, which have no floor")
    return replace(
        settings,
        iters=given["iters"] or settings.iters,
        rounds=given["rounds"] or settings.rounds,
        link_gb_per_s=link or LINK_GB_PER_S,
        json_file=str(given["json_file"]) if given["json_file"] else None,
        timeout_s=given["timeout"],
        alone=given["alone"],
    )


def _of_files(what: str, ctx: typer.Context, given: set[str]) -> None:
    """Shows a file; or `compare` and `history`, which have commands of their own since 0.3."""
    options.only_rank_0()
    if idle := [p.opts[0] for p in ctx.command.params if p.name in given - _OF_FILES[what]]:
        raise ValueError(f"bench: {what} measures nothing, expected without {', '.join(idle)}")
    of = ctx.params
    if what == "--show":
        show_file(of["shown"], of["plot"])
        return
    make_console(stderr=True).print(f"`flux bench {what}` is `flux {what}` now", highlight=False)
    files = [Path(name) for name in of["ops"][1:]]
    if what == "compare":
        compare.command(files)
    else:
        history.command(files, of["model"], of["m"])


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
    path = Path(settings.json_file or "")
    if path.is_file() and not records.read(path).complete:
        say(f"rows measured before that are in {path}")


def within_bar(record: Record) -> bool:
    """Whether every op of the record meets its bar (docs/benchmarks.md)."""
    return record.device == "cpu" or all(footer(record, op)[1].meets_bar for op in record.ops())
