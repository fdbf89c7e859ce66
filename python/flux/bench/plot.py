"""Plots a result: each candidate's time over the floor, and flux's speed-up over the best peer."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from flux.bench.model import OTHERS, Derived, Row
from flux.bench.record import Record
from flux.bench.report import heading, title_of

# The colours of all pictures of results.
FLUX = "#e4572e"
PEERS = ["#3d5a80", "#7a9cc6", "#98c1d9", "#b9c0c9", "#2a9d8f", "#8a6fb3", "#b08d57", "#6a994e", "#c77d9b"]
INK = "#22303c"
FAINT = "#6b7785"
LOSS = "#9aa3ad"
GRID = "#e7eaee"
EDGE = "#c9cfd6"

_MOST_ROWS = 40  # side by side
TALLEST = 3.0  # bars above it are cut and carry their value, so that one slow peer doesn't flatten the rest


def require_matplotlib() -> Any:
    """matplotlib.pyplot with a file backend; RuntimeError saying what to install if it is absent."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise RuntimeError("bench --plot needs matplotlib: pip install matplotlib") from error
    return plt


def check_suffix(path: Path) -> None:
    """Raises RuntimeError if matplotlib is absent, ValueError if it writes no files of this suffix."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    # Without pgf, which needs LaTeX.
    known = sorted(FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"})
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(
            f"bench: --plot expected a file that ends in .{', .'.join(known)}, got {str(path)!r}"
        )


def plot(record: Record, path: str | Path) -> Path:
    """Draws every op of ``record`` into one picture (PNG, PDF or SVG by suffix) and returns its path.

    Raises RuntimeError if matplotlib is absent, ValueError if there is nothing to draw.
    """
    plt = require_matplotlib()
    strips = [strip for op in record.ops() for strip in _strips(record, op)]
    if not strips:
        raise ValueError("bench: this result has no row of flux to plot")
    sizes = [_size(rows) for rows in strips]
    widths, heights = zip(*sizes, strict=True)
    style = {
        "font.size": 9,
        "text.parse_math": False,  # names from files may have a $
        "font.family": "DejaVu Sans",
        "axes.edgecolor": EDGE,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(max(widths), sum(heights) + 0.6), layout="constrained")
        parts = figure.subfigures(len(strips), 1, height_ratios=heights, squeeze=False)
        for (part,), rows in zip(parts, strips, strict=True):
            derived = [record.derived(row) for row in rows]
            times, speedups = part.subplots(2, 1, height_ratios=[3.0, 1.5])
            _times(times, record, rows, derived)
            _speedups(speedups, rows, derived)
        figure.supxlabel(heading(record).plain, fontsize=7.5, color=FAINT)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)
    return path


def _strips(record: Record, op: str) -> list[list[Row]]:
    """The rows of an op that flux ran, split into plots one below the other; groups are not split."""
    rows = [row for row in record.rows if row.op == op and "flux" in row.times]
    strips: list[list[Row]] = []
    for _, same in groupby(rows, _group):
        group = list(same)
        if not strips or len(strips[-1]) + len(group) > _MOST_ROWS:
            strips.append([])
        strips[-1] += group
    return strips


def _size(rows: list[Row]) -> tuple[float, float]:
    return min(max(7.0, 0.62 * len(rows) + 1.5), 26.0), 5.4


def base_of(derived: list[Derived]) -> str:
    """What times are drawn over (Derived.unit)."""
    return "floor" if any(d.floor for d in derived) else "best peer"


def colours_of(rows: list[Row]) -> dict[str, str]:
    """By the name of flux and of the others that do the same job, in the order of bars."""
    names = {name for row in rows for name, timing in row.times.items() if timing.role in OTHERS}
    some = [*PEERS, *[LOSS] * len(names)]
    return {"flux": FLUX, **dict(zip(sorted(names), some, strict=False))}


def _times(axis: Any, record: Record, rows: list[Row], derived: list[Derived]) -> None:
    """Grouped bars: each candidate's time over the floor. The floor itself is the line at 1."""
    colours, base = colours_of(rows), base_of(derived)
    names = list(colours)
    tallest = max(
        r.times[n].median / d.unit for r, d in zip(rows, derived, strict=True) for n in names if n in r.times
    )
    axis.set_ylim(0, TALLEST * 1.08 if tallest > TALLEST else tallest * 1.1)
    bar = 0.8 / len(names)
    for j, name in enumerate(names):
        at = [i + (j - (len(names) - 1) / 2) * bar for i, r in enumerate(rows) if name in r.times]
        pairs = [(r, d) for r, d in zip(rows, derived, strict=True) if name in r.times]
        heights = [r.times[name].median / d.unit for r, d in pairs]
        axis.bar(at, heights, width=bar * 0.94, color=colours[name], label=name, zorder=3)
        for x, height in zip(at, heights, strict=True):
            if height > TALLEST:
                value = f"{height:.1f}"
                axis.text(x, TALLEST, value, ha="center", va="bottom", color="white", fontsize=7, zorder=6)
        if name == "flux":
            for x, (row, _) in zip(at, pairs, strict=True):
                label = f" {row.times[name].median:.3g} ms"
                style = {"rotation": 90, "ha": "center", "va": "bottom", "color": "white", "fontsize": 6.5}
                axis.text(x, 0, label, zorder=4, **style)
    axis.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=5)
    axis.text(len(rows) - 0.45, 1.0, base, va="center", ha="left", fontsize=8)
    axis.set_ylabel(f"time / {base}  (lower is better)")
    axis.grid(axis="y", color=GRID, zorder=0)
    axis.set_title(title_of(record, rows[0]), loc="left", fontsize=12, fontweight="bold", pad=12)
    axis.legend(
        frameon=False, ncols=len(names), loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1
    )
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.set_xticks([])
    _dividers(axis, rows)


def _speedups(axis: Any, rows: list[Row], derived: list[Derived]) -> None:
    values = [d.speedup if d.speedup is not None else 1.0 for d in derived]
    colours = [FLUX if v >= 1.0 else LOSS for v in values]
    low = min(0.9, min(values) * 0.97)
    bars = axis.bar(
        range(len(rows)), [v - 1.0 for v in values], bottom=1.0, width=0.62, color=colours, zorder=3
    )
    axis.bar_label(bars, [f"{value:.2f}×" for value in values], fontsize=7.5)
    axis.axhline(1.0, color=INK, linewidth=1.0, zorder=5)
    axis.set_ylim(low - 0.12 * (max(values) - low), max(1.05, max(values)) + 0.14 * (max(values) - low))
    axis.set_ylabel("speed-up over\nbest peer")
    axis.grid(axis="y", color=GRID, zorder=0)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.set_xticks(range(len(rows)), [str(r.m) for r in rows], fontsize=8)
    below = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
    axis.annotate("M", (-0.6, 0), xytext=(-6, -5), ha="right", **below)
    axis.tick_params(axis="x", length=0)
    _dividers(axis, rows)
    for start, end in pairwise([*_starts(rows), len(rows)]):
        middle = ((start + end - 1) / 2, 0)
        bold = {"ha": "center", "fontsize": 9, "fontweight": "bold"}
        axis.annotate(_group(rows[start]), middle, xytext=(0, -20), **bold, **below)
    axis.set_xlabel(" ", labelpad=14)


def _group(row: Row) -> str:
    """Rows that belong together under one name."""
    second = f"({row.pattern})" if row.op == "gemm" and row.pattern != "local" else row.variant
    return f"{row.model}\n{second}".strip()


def _starts(rows: list[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if i == 0 or _group(row) != _group(rows[i - 1])]


def _dividers(axis: Any, rows: list[Row]) -> None:
    for start in _starts(rows)[1:]:
        axis.axvline(start - 0.5, color="#d5dae0", linewidth=0.8, zorder=1)
