"""``flux doctor``: is this machine fit for flux, and if not, what to do about it."""

from __future__ import annotations

import json
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

_MARKS = {"ok": "[green]✓[/]", "info": " ", "bad": "[bold red]✗[/]"}


def examine(*, active: bool) -> list[Finding]:
    """All findings, in the order they are shown. ``active``: also measure (seconds on GPUs)."""
    found: list[Finding] = []
    for check in (findings.versions, findings.native, findings.gpus):
        found += check()
    found += links.links(active=active)
    for check in (findings.multicast, findings.shared_memory, findings.environment):
        found += check()
    return found


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
    with make_console(stderr=True).status("looking at this machine"):
        found = examine(active=not quick)
    section = None
    table = Table.grid(padding=(0, 2))
    for finding in found:
        if finding.section != section:
            section = finding.section
            table.add_row(f"\n[bold]{section}[/]")
        table.add_row(f"{_MARKS[finding.state]} {escape(finding.name)}", escape(finding.value))
    console.print(table)
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
