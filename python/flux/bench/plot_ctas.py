"""The picture of moe_ctas: time over the number of communication CTAs, a panel for each row."""

from __future__ import annotations

from typing import Any

from flux.bench.model import Row, derive, forced_times, over_best

# The colours of all pictures of results.
FLUX = "#e4572e"
PEERS = ["#3d5a80", "#7a9cc6", "#98c1d9", "#b9c0c9", "#2a9d8f", "#8a6fb3", "#b08d57", "#6a994e", "#c77d9b"]
INK = "#22303c"
FAINT = "#6b7785"
LOSS = "#9aa3ad"
GRID = "#e7eaee"
EDGE = "#c9cfd6"

_IN_SIGHT = 1.3  # a line further above the others is not drawn: its value is written instead
_PANEL_WIDTH, _PANEL_HEIGHT = 4.2, 2.9


def size(rows: list[Row]) -> tuple[float, float]:
    """Width and height of the picture of these rows, in inches."""
    lines, columns = _grid(len(rows))
    return max(columns * _PANEL_WIDTH, 7.0), lines * _PANEL_HEIGHT + 0.7


def draw(figure: Any, rows: list[Row], title: str) -> None:
    """For each row: the line of the forced numbers, the plan's choice, and the unfused pipeline."""
    axes = figure.subplots(*_grid(len(rows)), squeeze=False).flatten()
    for axis, row in zip(axes, rows, strict=False):
        _panel(axis, row)
    for axis in axes[len(rows) :]:
        axis.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    handles = {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, ncols=4, loc="outside lower center")


def _grid(panels: int) -> tuple[int, int]:
    """Lines and columns."""
    columns = 2 if panels in (2, 4) else min(panels, 3)
    return -(-panels // columns), columns


def _panel(axis: Any, row: Row) -> None:
    forced = forced_times(row)
    numbers = list(forced)
    axis.fill_between(
        numbers,
        [1e3 * t.min for t in forced.values()],
        [1e3 * t.max for t in forced.values()],
        color=PEERS[2],
        alpha=0.4,
        linewidth=0,
        label="fastest to slowest round",
    )
    medians = [1e3 * t.median for t in forced.values()]
    axis.plot(numbers, medians, "o-", color=PEERS[0], markersize=4, linewidth=1.4, label="number forced")
    d = derive(row, with_floor=False)
    if d.peer is not None and d.peer > _IN_SIGHT * max(t.median for t in forced.values()):
        text = f"best unfused: {1e3 * d.peer:.0f} µs ↑"
        axis.text(0.5, 0.96, text, transform=axis.transAxes, ha="center", va="top", fontsize=8)
    elif d.peer is not None:
        axis.axhline(1e3 * d.peer, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="best unfused")
    found = over_best(row)
    if found is not None and row.plan and "communication_ctas" in row.plan:
        chosen, time = row.plan["communication_ctas"], 1e3 * row.times["flux"].median
        axis.plot([chosen], [time], "*", color=FLUX, markersize=13, zorder=5, label="the plan's choice")
        said = f"{chosen} CTAs, {time:.0f} µs: {found.ratio:.3f}× the best, that of {found.best_ctas}"
        style = {"ha": "left", "va": "bottom", "color": FLUX, "fontsize": 8}
        axis.text(0, 1.02, said, transform=axis.transAxes, **style)
    axis.set_title(f"{row.name}  M={row.m}", loc="left", fontsize=9, pad=16)
    axis.set_xticks(numbers, [str(n) for n in numbers], fontsize=7.5)
    axis.set_xlabel("communication CTAs", color=FAINT, fontsize=8)
    axis.set_ylabel("µs")
    axis.grid(color=GRID, zorder=0)
    axis.set_axisbelow(True)
