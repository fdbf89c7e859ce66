"""``flux verify``: are the results of every op exact on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from flux.bench import machine
from flux.bench.report import make_console
from flux.cli import verify_cases
from flux.cli.verify_cases import Outcome

_STYLE = {"exact": "green", "wrong": "bold red", "skipped": "yellow"}


def plan_runs(world: int | None, cpu: bool, timeout_s: float) -> Iterator[Iterator[Outcome]]:
    """Real ranks as far as there are GPUs, emulated ones on the first; without a GPU the CPU path."""
    gpus = 0 if cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    if not gpus:
        yield verify_cases.gemm(torch.device("cpu"))
        for size in [world] if world else [2, 4]:
            yield verify_cases.ranks(size, "cpu", timeout_s)
        return
    device = torch.device("cuda", 0)
    yield verify_cases.gemm(device)
    for size in [world] if world else [2, 4, 8]:
        if size > 1:
            yield verify_cases.emulated(size, device)
    real = [world] if world else sorted({2, gpus})
    for size in real:
        if 2 <= size <= gpus:
            yield verify_cases.ranks(size, "cuda", timeout_s)


def command(
    world: Annotated[int | None, typer.Option(min=1, max=8, help="Only this number of ranks.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the outcomes to this file.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Verify the CPU path even if there are GPUs.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one number of ranks.")] = 300.0,
) -> None:
    """Compare every op with exact results: integers in which each rank's part is marked, nothing rounds.

    Exit status 1 if anything differs by anything.
    """
    machine.disable_multicast()
    console, errors = make_console(), make_console(stderr=True)
    outcomes: list[Outcome] = []
    with errors.status("verifying") as status:
        for run in plan_runs(world, cpu, timeout):
            for outcome in run:
                outcomes.append(outcome)
                status.update(f"verifying {outcome.op}, {outcome.where}: {outcome.case}")
    table = Table(header_style="bold")
    for column in ("op", "ranks", "case", "result"):
        table.add_column(column)
    table.add_column("s", justify="right")
    previous = None
    for o in outcomes:
        if previous not in (None, (o.op, o.where)):
            table.add_section()
        previous = (o.op, o.where)
        result = f"[{_STYLE[o.state]}]{o.state}[/]" + (f" {escape(o.detail)}" if o.detail else "")
        table.add_row(o.op, o.where, o.case, result, f"{o.seconds:.2f}")
    console.print(table)
    wrong = sum(o.state == "wrong" for o in outcomes)
    skipped = sum(o.state == "skipped" for o in outcomes)
    exact = len(outcomes) - wrong - skipped
    text = f"{exact} exact, {wrong} wrong, {skipped} skipped"
    console.print(text, style="bold red" if wrong else "green", highlight=False)
    if json_file is not None:
        device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
        report = {
            "schema": 1,
            "date": machine.now(),
            "commit": machine.commit(),
            "machine": machine.describe(device),
            "ok": not wrong,
            "outcomes": [asdict(o) for o in outcomes],
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    raise typer.Exit(1 if wrong else 0)
