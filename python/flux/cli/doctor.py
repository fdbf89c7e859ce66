"""``flux doctor``: is this machine fit for flux, and if not, what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux._files import parse, write_json
from flux.bench.report import make_console
from flux.cli import findings, links, options, vllm
from flux.cli import nodes as among_nodes
from flux.cli.findings import Finding
from flux.cli.options import counted, file, flag, named
from flux.machine import now

_NAME_WIDTH = 28
_MARKS = {"ok": ("✓", "green"), "info": (" ", ""), "bad": ("✗", "bold red")}


def examine(*, active: bool) -> Iterator[Finding]:
    """All findings, in the order they are shown. ``active``: also measure (most of a minute on GPUs)."""
    for check in (findings.versions, findings.native, findings.gpus):
        yield from check()
    yield from links.links(active=active)
    for check in (findings.multicast, findings.shared_memory, findings.environment):
        yield from check()


def report(found: Iterable[Finding], console: Console) -> list[Finding]:
    """Prints findings one by one, so that the last one shows which check hangs. Returns them all."""
    shown: list[Finding] = []
    # On a terminal that is too narrow for two columns, the value is on separate lines.
    stacked = console.width < 2 * _NAME_WIDTH
    for finding in found:
        if not shown or finding.section != shown[-1].section:
            console.print(Text(f"\n{finding.section}", style="bold"))
        shown.append(finding)
        name = Text.assemble(_MARKS[finding.state], f" {finding.name}")
        if stacked:
            console.print(name.append(f": {finding.value}"))
            continue
        line = Table.grid(padding=(0, 2))
        line.add_column(width=_NAME_WIDTH)
        line.add_row(name, finding.value)
        console.print(line)
    bad = [f for f in shown if f.state == "bad"]
    console.print()
    for finding in bad:
        said = f" {finding.name}: {finding.advice or finding.value}"
        console.print(Text.assemble(_MARKS["bad"], said), soft_wrap=True)
    if not bad:
        console.print("Nothing is wrong.", style="green")
    return shown


class _File(TypedDict):
    date: str
    findings: list[Finding]


def show(data: dict[str, Any], console: Console) -> None:
    told: _File = parse(_File, data)
    console.print(Text(f"flux doctor · {told['date']}", style="dim"))
    report(told["findings"], console)


def command(
    json_file: Annotated[Path | None, file("Also write the findings to this file.", "--json")] = None,
    quick: Annotated[bool, flag("Only look, measure nothing.", "--quick")] = False,
    model: Annotated[
        str | None,
        named(
            "Instead: what of a model (a folder, or a name in the hub's cache) runs on flux in vLLM.",
            "--vllm",
            metavar="MODEL",
        ),
    ] = None,
    tp: Annotated[int, counted("With --vllm: ranks.", "--tp")] = 2,
    nodes: Annotated[
        int | None,
        counted(
            "Instead: the links between so many nodes, under torchrun on all of them; else emulated.", least=2
        ),
    ] = None,
    links_file: Annotated[
        Path | None, file("With --nodes: write the rates, for FLUX_LINKS.", "--links")
    ] = None,
) -> None:
    """Look at this machine: versions, native library, GPUs, links, memory, environment.

    Exit status 1 if something is wrong; each wrong thing comes with a line of advice.
    """
    if nodes is None:
        options.only_rank_0()
    with options.refusing():
        options.check_target("doctor: --json", json_file)
        options.check_target("doctor: --links", links_file)
        if links_file is not None and nodes is None:
            raise ValueError("doctor: --links expected with --nodes")
        if nodes is not None:
            checks = among_nodes.examine(nodes, links_file)
        else:
            checks = examine(active=not quick) if model is None else vllm.examine(vllm.model(model), tp)
    found = report(checks, make_console()) if options.speaks() else list(checks)
    ok = all(finding.state != "bad" for finding in found)
    if json_file is not None and options.speaks():
        write_json({"schema": 1, "date": now(), "ok": ok, "findings": [asdict(f) for f in found]}, json_file)
    raise typer.Exit(0 if ok else 1)
