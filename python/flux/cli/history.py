"""``flux history FILES...``: one row over all results that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flux.bench import record
from flux.bench.model import Row, derive
from flux.bench.record import Record
from flux.bench.report import make_console
from flux.cli import compare, options

Rows = dict[tuple[object, ...], list[tuple[Record, Row]]]


def rows_of(results: Sequence[Record], models: Sequence[str], m: Sequence[int]) -> Rows:
    """The correct rows of these models and M (empty: all), by what they measure, in the order of dates."""
    found: Rows = {}
    for result in sorted(results, key=lambda each: each.date):
        for row in result.rows:
            wanted = (not models or row.model in models) and (not m or row.m in m)
            if wanted and row.ok and "flux" in row.times:
                which = (*compare.key(row), str(result.machine.get("gpu")))
                found.setdefault(which, []).append((result, row))
    return found


def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", show_default=False)],
    model: options.Models = None,
    m: options.Rows = None,
) -> None:
    """Follow each row over results of bench, by their dates."""
    options.only_rank_0()
    with options.refusing():
        found = rows_of([record.read(file) for file in files], model or (), m or ())
        if not found:
            raise ValueError("history: found no row of flux in these files")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("op", "row", "M", "date", "commit", "flux, ms", "best peer, ms", "speed-up", "spread"):
        table.add_column(title, justify="left" if title in ("op", "row", "date", "commit") else "right")
    for each in found.values():
        table.add_section()
        for result, row in each:
            d, flux = derive(row), row.times["flux"]
            where = (row.op, f"{row.name} TP {row.tp}", str(row.m), result.date[:10], result.commit[:7])
            peer = "–" if d.peer is None else f"{d.peer:.4f}"
            speed = "–" if d.speedup is None else f"{d.speedup:.3f}"
            table.add_row(*where, f"{flux.median:.4f}", peer, speed, f"{flux.spread:.1%}")
    console = make_console(least=110)
    console.print(table)
