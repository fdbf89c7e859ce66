"""``flux doctor``: is this machine fit for flux, and if not, what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flux.bench.machine import now
from flux.bench.report import make_console
from flux.cli import findings, links
from flux.cli.findings import Finding

_NAME_WIDTH = 28
_MARKS = {"ok": "[green]✓[/]", "info": " ", "bad": "[bold red]✗[/]"}


def examine(*, active: bool) -> Iterator[Finding]:
    """All findings, in the order they are shown. ``active``: also measure (most of a minute on GPUs)."""
    for check in (findings.versions, findings.native, findings.gpus):
        yield from check()
    yield from links.links(active=active)
    for check in (findings.multicast, findings.shared_memory, findings.environment):
        yield from check()


def command(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the findings to this file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only look, measure nothing.")] = False,
) -> None:
    """Look at this machine: versions, native library, GPUs, links, memory, environment.

    Exit status 1 if something is wrong; each wrong thing comes with a line of advice.
    """
    console = make_console()
    found: list[Finding] = []
    # Line by line: whatever hangs comes right after the last one.
    for finding in examine(active=not quick):
        if not found or finding.section != found[-1].section:
            console.print(f"\n[bold]{finding.section}[/]")
        found.append(finding)
        line = Table.grid(padding=(0, 2))
        line.add_column(width=_NAME_WIDTH)
        line.add_row(f"{_MARKS[finding.state]} {escape(finding.name)}", escape(finding.value))
        console.print(line)
    bad = [f for f in found if f.state == "bad"]
    console.print()
    for finding in bad:
        console.print(
            f"[bold red]✗[/] {escape(finding.name)}: {escape(finding.advice or finding.value)}",
            soft_wrap=True,
        )
    if not bad:
        console.print("[green]Nothing is wrong.[/]")
    if json_file is not None:
        report = {"schema": 1, "date": now(), "ok": not bad, "findings": [asdict(f) for f in found]}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    raise typer.Exit(1 if bad else 0)
