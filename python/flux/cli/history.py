"""``flux history FILES...``: one row over all results that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flux.bench import plot, record
from flux.bench.model import Row, derive
from flux.bench.plot import FLUX, GRID, INK, LOSS
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
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this model; may be repeated.")
    ] = None,
    m: Annotated[
        list[int] | None,
        typer.Option("--m", parser=options.whole(), metavar="N", help="Only these rows; may be repeated."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it (png, pdf, svg; needs matplotlib).")
    ] = None,
) -> None:
    """Follow each row over results of bench, by their dates."""
    options.only_rank_0()
    with options.refusing():
        if picture is not None:
            plot.check_suffix(picture)
            options.check_target("history: --plot", picture)
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
    if picture is not None:
        console.print(f"picture: {draw(found, picture)}", highlight=False, soft_wrap=True)


def draw(found: Rows, path: Path) -> Path:
    """A panel for each row: times of flux and of the best peer, one result after the other."""
    plt = plot.require_matplotlib()
    most = max(len(each) for each in found.values())
    wide = min(3, len(found))
    lines = -(-len(found) // wide)
    figure, axes = plt.subplots(
        lines, wide, figsize=(wide * max(3.6, 0.5 * most), 2.6 * lines), squeeze=False, layout="constrained"
    )
    for axis, each in zip(axes.flatten(), found.values(), strict=False):
        of_peers = [(i, d.peer) for i, (_, row) in enumerate(each) if (d := derive(row)).peer is not None]
        axis.plot(*zip(*of_peers, strict=True), color=LOSS, marker="o") if of_peers else None
        ours = [row.times["flux"] for _, row in each]
        middles = [timing.median for timing in ours]
        lows = [timing.median - timing.min for timing in ours]
        highs = [timing.max - timing.median for timing in ours]
        axis.errorbar(range(len(ours)), middles, yerr=[lows, highs], color=FLUX, marker="o", capsize=2)
        tallest = max([*(timing.max for timing in ours), *(peer for _, peer in of_peers if peer is not None)])
        axis.set_ylim(0, 1.1 * tallest)
        axis.set_xticks(range(len(each)), [result.commit[:7] for result, _ in each], rotation=60, fontsize=7)
        row = each[0][1]
        axis.set_title(f"{row.op} {row.name} TP {row.tp}, M = {row.m}, ms", fontsize=8, color=INK, loc="left")
        axis.grid(axis="y", color=GRID)
    for axis in axes.flatten()[len(found) :]:
        axis.set_axis_off()
    figure.suptitle("flux, and the best peer in grey", fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)
    return path
