"""Plots a result: each candidate's time over the floor, and above flux's its speed-up over the best peer."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from flux.bench.model import OTHERS, Row
from flux.bench.record import Record
from flux.bench.report import heading, title_of

FLUX, INK, FAINT, LOSS, GRID, EDGE = "#e4572e", "#22303c", "#6b7785", "#9aa3ad", "#e7eaee", "#c9cfd6"
PEERS = ["#3d5a80", "#7a9cc6", "#98c1d9", "#b9c0c9", "#2a9d8f", "#8a6fb3", "#b08d57", "#6a994e", "#c77d9b"]
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
    width = max(min(max(7.0, 0.62 * len(rows) + 1.5), 26.0) for rows in strips)
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
        size = (width, 4.0 * len(strips) + 0.6)
        figure, axes = plt.subplots(len(strips), 1, figsize=size, layout="constrained", squeeze=False)
        for (axis,), rows in zip(axes, strips, strict=True):
            _draw(axis, record, rows)
        figure.supxlabel(heading(record).plain, fontsize=7.5, color=FAINT, wrap=True)
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


def _draw(axis: Any, record: Record, rows: list[Row]) -> None:
    """Grouped bars: each candidate's time over the floor, or where there is none over the best peer's."""
    derived = [record.derived(row) for row in rows]
    base = "floor" if any(d.floor for d in derived) else "best peer"
    others = {name for row in rows for name, timing in row.times.items() if timing.role in OTHERS}
    colours = {"flux": FLUX, **dict(zip(sorted(others), [*PEERS, *[LOSS] * len(others)], strict=False))}
    bar = 0.8 / len(colours)
    tallest = 0.0
    for j, (name, colour) in enumerate(colours.items()):
        found = [(i, r, d) for i, (r, d) in enumerate(zip(rows, derived, strict=True)) if name in r.times]
        at = [i + (j - (len(colours) - 1) / 2) * bar for i, _, _ in found]
        heights = [r.times[name].median / d.unit for _, r, d in found]
        tallest = max([tallest, *heights])
        axis.bar(at, heights, width=bar * 0.94, color=colour, label=name, zorder=3)
        for x, height, (_, row, d) in zip(at, heights, found, strict=True):
            if height > TALLEST:
                how = {"ha": "center", "va": "top", "color": "white", "fontsize": 7}
                axis.text(x, TALLEST, f"{height:.1f}", zorder=6, **how)
            if name == "flux":
                inside = {"rotation": 90, "ha": "center", "va": "bottom", "color": "white", "fontsize": 6.5}
                axis.text(x, 0, f" {row.times[name].median:.3g} ms", zorder=4, **inside)
                if d.speedup is not None:
                    above = {**inside, "color": FLUX if d.speedup >= 1.0 else FAINT, "fontsize": 7.5}
                    axis.text(x, min(height, TALLEST), f" {d.speedup:.2f}×", zorder=7, **above)
    axis.set_ylim(0, 1.15 * max(1.0, min(tallest, TALLEST)))
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=5)
    axis.text(len(rows) - 0.37, 1.0, base, va="center", ha="left", fontsize=8)
    axis.set_ylabel(f"time / {base}  (lower is better)\nspeed-up over best peer: ×")
    axis.grid(axis="y", color=GRID, zorder=0)
    # The legend is under the title, in as many lines as it needs.
    columns = max(3, min(len(colours), int(axis.figure.get_figwidth() / 1.5)))
    lines = -(-len(colours) // columns)
    axis.set_title(title_of(record, rows[0]), loc="left", fontsize=12, fontweight="bold", pad=10 + 15 * lines)
    axis.legend(frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1)
    axis.tick_params(axis="x", length=0)
    axis.set_xticks(range(len(rows)), [_label(rows, i) for i in range(len(rows))], fontsize=8)


def _group(row: Row) -> str:
    second = f"({row.pattern})" if row.op == "gemm" and row.pattern != "local" else row.variant
    return f"{row.model}\n{second}".strip()


def _label(rows: list[Row], i: int) -> str:
    """M, and below it in the first row of a group its name."""
    begins = i == 0 or _group(rows[i]) != _group(rows[i - 1])
    return f"M = {rows[i].m}\n\n{_group(rows[i])}" if begins else str(rows[i].m)
