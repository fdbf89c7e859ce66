"""``flux compare A.json B.json``: which rows of two results are better, worse, or the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flux.bench import record
from flux.bench.model import Row
from flux.bench.report import make_console
from flux.cli import options

# Two runs of one measurement differ by up to this, even if the samples of each agree.
_SAME = 0.02
_STYLES = {"better": "green", "worse": "bold red", "same": "", "wrong": "bold red"}


@dataclass(frozen=True)
class Change:
    """One row in two results.

    Attributes:
        drift: by how much other candidates took longer in the second one: heat and power, not flux.
        noise: the smallest relative change that is not noise.
    """

    row: Row
    before: float
    after: float
    drift: float
    noise: float

    @property
    def ratio(self) -> float:
        """Time after over time before, without the drift."""
        return self.after / self.before / self.drift

    @property
    def verdict(self) -> str:
        if not self.row.ok:
            return "wrong"
        if abs(math.log(self.ratio)) <= math.log1p(self.noise):
            return "same"
        return "worse" if self.ratio > 1 else "better"


def changes(old: record.Record, new: record.Record) -> Iterator[Change]:
    before = {key(row): row for row in old.rows if "flux" in row.times}
    for row in new.rows:
        first = before.get(key(row))
        if first is None or (row.ok and "flux" not in row.times):
            continue
        mine, theirs = row.times, first.times
        # Other candidates of flux may have changed themselves.
        others = [name for name in mine.keys() & theirs.keys() if not name.startswith("flux")]
        drift = median([mine[name].median / theirs[name].median for name in others] or [1.0])
        spread = sum(times["flux"].spread for times in (mine, theirs) if "flux" in times)
        after = mine["flux"].median if "flux" in mine else math.nan
        yield Change(row, theirs["flux"].median, after, drift, max(_SAME, spread))


def command(
    files: Annotated[list[Path], typer.Argument(metavar="A.json B.json", show_default=False)],
) -> None:
    """Compare two results of bench. Exit status 1 if a row is worse, or wrong in the second file."""
    with options.refusing():
        options.only_rank_0()
        if len(files) != 2:
            raise ValueError(f"compare: expected two result files, got {len(files)}")
        old, new = map(record.read, files)
        found = list(changes(old, new))
        if not found:
            raise ValueError("compare: found no row that both files have")
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("op", "row", "M", "before, ms", "after, ms", "others", "change", "noise", ""):
        table.add_column(title, justify="left" if title in ("op", "row", "") else "right")
    for each in found:
        sizes = (each.row.op, f"{each.row.name} TP {each.row.tp}", str(each.row.m))
        times = (f"{each.before:.4f}", f"{each.after:.4f}", f"{each.drift - 1:+.1%}")
        judged = (f"{each.ratio - 1:+.1%}", f"{each.noise:.1%}", each.verdict)
        table.add_row(*sizes, *times, *judged, style=_STYLES[each.verdict])
    console = make_console(least=100)
    console.print(table)
    verdicts = [each.verdict for each in found]
    console.print(", ".join(f"{verdicts.count(name)} {name}" for name in _STYLES), highlight=False)
    if "worse" in verdicts or "wrong" in verdicts:
        raise typer.Exit(1)


def key(row: Row) -> tuple[object, ...]:
    return row.op, row.pattern, row.model, row.variant, row.scales, row.m, row.n, row.k, row.tp, row.dtype
