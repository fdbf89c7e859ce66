"""``flux tune``: which way to run each operator on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flux.bench import tune
from flux.bench.model import FP8
from flux.bench.report import make_console
from flux.bench.runner import Settings
from flux.cli import options
from flux.cli.bench import Asked, choose
from flux.cli.options import counted, file, named, real
from flux.testing import SpawnError

_FILE = Path("flux-tuning.json")


def command(
    ctx: typer.Context,
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPS",
            show_default=False,
            help=f"Ops: gemm, {', '.join(tune.OPS)}. Default: all; on CPUs the collective ones.",
        ),
    ] = None,
    suite: Annotated[str | None, named("Suite of shapes, as of flux bench, or a TOML file.")] = None,
    model: options.Models = None,
    trace: Annotated[
        Path | None, file("Shapes that a program recorded with FLUX_RECORD_SHAPES=FILE.")
    ] = None,
    m: options.Rows = None,
    n: Annotated[int | None, counted("A shape: with --k.")] = None,
    k: Annotated[int | None, counted("A shape: with --n.")] = None,
    dtype: Annotated[str | None, named("bf16, fp16 or fp32.", metavar="T")] = None,
    tp: Annotated[int | None, counted("Ranks. Default: all GPUs, or 4 on a CPU.", least=2)] = None,
    cpu: options.OnCpu = False,
    budget: Annotated[
        float, typer.Option(parser=real(1.0), metavar="SECONDS", help="Begin no further row after that.")
    ] = 1800.0,
    iters: options.Burst = None,
    rounds: options.Rounds = None,
    out: Annotated[Path, file("Write or continue this file; FLUX_TUNING=FILE uses it.")] = _FILE,
) -> None:
    """Time every way to run each operator here, and write what plans choose by.

    A run that was stopped goes on where it ended. Exit status 1 if a result is wrong, 2 if an option is.
    """
    with options.refusing():
        settings = _settings(Asked.of({**ctx.params, "world": tp}), trace)
        settings = replace(
            settings,
            iters=iters or settings.iters,
            rounds=rounds or settings.rounds,
            timeout_s=budget + settings.timeout_s,
        )
        options.check_target("tune: --out", out)
        tune.known(out)
    try:
        tuned = tune.tune(settings, out, budget)
    except SpawnError as error:
        options.say_error(f"tune: {str(error.failures[0]).strip().splitlines()[-1]}")
        raise typer.Exit(1) from None
    if tuned is None:  # torchrun: only rank 0 has the result
        return
    console = make_console(least=100)
    console.print(table(tuned.choices))
    for line in (*tuned.wrong, *([f"{tuned.left} rows left: run it again to go on"] if tuned.left else [])):
        console.print(line, highlight=False)
    console.print(f"FLUX_TUNING={out} on all ranks uses this", highlight=False, soft_wrap=True)
    if tuned.wrong:
        raise typer.Exit(1)


def _settings(asked: Asked, trace: Path | None) -> Settings:
    known = ("gemm", *tune.OPS)
    if unknown := [op for op in asked.ops if op not in known]:
        raise ValueError(f"tune: op expected to be one of {', '.join(known)}, got {unknown[0]!r}")
    if trace is not None and (asked.suite or asked.model or asked.m or asked.n):
        raise ValueError("tune: --trace expected without other shapes")
    if asked.dtype in ("fp8", FP8):
        raise ValueError(f"tune: --dtype expected to be bf16, fp16 or fp32, got {asked.dtype!r}")
    settings = choose(asked)
    if trace is None:
        return settings
    problems = tune.traced(trace, settings.tp)
    if not problems:
        raise ValueError(f"tune: {trace} has no problem of {settings.tp} ranks")
    return replace(settings, problems=tuple(problems), suite=f"trace {trace.name}")


def table(choices: Sequence[tune.Choice]) -> Table:
    out = Table(title="us per call, before and after", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("op", "ranks", "m", "n", "k", "before", "after", "gain", "way", "others"):
        out.add_column(title, justify="left" if title in ("op", "way", "others") else "right")
    for each in choices:
        fact = each.fact
        others = (f"{way} {us:.1f}" for way, us in sorted(fact.us.items(), key=lambda item: item[1]))
        sizes = (fact.ranks, fact.m, fact.n, fact.k)
        out.add_row(
            fact.op,
            *map(str, sizes),
            f"{each.before:.1f}",
            f"{each.after:.1f}",
            f"{each.before / each.after:.2f}x",
            each.way,
            ", ".join(others),
        )
    return out
