"""A result as one HTML file, which needs nothing else: tables, and bars that show their samples on hover."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.text import Text

from flux import _files
from flux.bench.model import Derived, Row
from flux.bench.plot import TALLEST, base_of, colours_of
from flux.bench.plot_ctas import EDGE, FAINT, FLUX, GRID, INK, LOSS
from flux.bench.record import Record
from flux.bench.report import filled, footer, heading, notes, table_title

# Pixels: a plot's height, a bar's width, the scale beside it; and what a letter of a slanting label needs.
_HEIGHT, _BAR, _LEFT, _LETTER = 190, 10, 44, 4.6
_STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --faint: {FAINT}; --grid: {GRID}; --edge: {EDGE};
  --paper: #fff; --hover: #f6f8fa; --good: #1a7f37; --bad: #c0392b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e3e8ef; --faint: #9aa5b5; --grid: #2c3542; --edge: #566273;
    --paper: #12171f; --hover: #1b222d; --good: #4cc26b; --bad: #ff8373; }}
  rect, .key {{ filter: brightness(1.25); }} }}
body {{ font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1400px; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }} h2 {{ font-size: 1.1rem; margin: 2.2rem 0 .4rem; }}
.faint, .dim {{ color: var(--faint); }} .wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }}
th, td {{ padding: .22rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }}
th {{ border-bottom: 1px solid var(--edge); }} .left {{ text-align: left; }}
th:first-child, td:first-child {{ position: sticky; left: 0; background: var(--paper); }}
tr:hover td {{ background: var(--hover); }}
.green {{ color: var(--good); }} .red, .yellow {{ color: var(--bad); font-weight: 600; }}
svg text {{ font-size: 10px; fill: var(--ink); }} svg rect:hover {{ opacity: .7; }}
line {{ stroke: var(--grid); }} line.one {{ stroke: var(--ink); }}
.named {{ white-space: nowrap; }}
.key {{ display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }}
"""


def write(record: Record, path: str | Path) -> Path:
    """Writes the page of a result, and returns its path. Raises ValueError if the result has no rows."""
    if not record.rows:
        raise ValueError("bench: this result has no row to report")
    _files.write(path, page(record))
    return Path(path)


def page(record: Record) -> str:
    peers = ", ".join(f"{name} {version}" for name, version in record.machine.get("peers", {}).items())
    body = [
        "<h1>flux bench</h1>",
        f'<p class="faint">{escape(heading(record).plain)}<br>Packages: {escape(peers or "none")}</p>',
        *(part for op in record.ops() for part in _section(record, op)),
    ]
    if said := notes(record):
        body.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>")
    if not record.complete:
        body.append("<p>This run was cut off: the rows above are what it finished.</p>")
    head = (
        f'<meta charset="utf-8"><title>flux bench {escape(record.date[:10])}</title><style>{_STYLE}</style>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(record: Record, op: str) -> Iterator[str]:
    rows, derived, columns = filled(record, op)
    yield f"<h2>{escape(table_title(record, op))}</h2>"
    yield f'<p class="faint">{escape(footer(record, op)[0].plain).replace(chr(10), "<br>")}</p>'
    drawn = [(row, d) for row, d in zip(rows, derived, strict=True) if "flux" in row.times]
    if drawn:
        yield from _plots(drawn)
    head = "".join(_cell("th", column.title, column.justify) for column, _ in columns)
    lines = (
        f'<tr title="{escape(_samples(row))}">'
        + "".join(_cell("td", cells[i], column.justify) for column, cells in columns)
        + "</tr>"
        for i, row in enumerate(rows)
    )
    yield f'<div class="wide"><table><tr>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _cell(tag: str, content: str | Text, justify: str) -> str:
    styles = str(content.style).split() if isinstance(content, Text) else []
    classes = [name for name in styles if name in ("green", "red", "yellow", "dim")]
    classes += ["left"] if justify == "left" else []
    told = f' class="{" ".join(classes)}"' if classes else ""
    return f"<{tag}{told}>{escape(str(content))}</{tag}>"


def _samples(row: Row) -> str:
    """All times of a row, as measured."""
    lines = [f"{row.op} {row.name}, M = {row.m}: {row.check}"]
    for name, timing in row.times.items():
        lines.append(f"{name} ({timing.role}): {', '.join(f'{sample:.5g}' for sample in timing.samples)} ms")
    for condition, times in row.conditions.items():
        lines += [f"{name}, {condition}: {ms:.5g} ms" for name, ms in times.items()]
    return "\n".join(lines)


def _plots(drawn: list[tuple[Row, Derived]]) -> Iterator[str]:
    """Each candidate's time over the floor, without one over the best peer, and flux's speed-up."""
    colours = colours_of([row for row, _ in drawn])
    keys = "".join(
        f'<span class="named"><span class="key" style="background:{c}"></span>{escape(name)}</span> '
        for name, c in colours.items()
    )
    yield f"<p>Time over {base_of([d for _, d in drawn])}, lower is better: {keys}</p>"
    times, speeds = [], []
    for row, d in drawn:
        had = [name for name in colours if name in row.times]
        times.append([(row.times[n].median / d.unit, colours[n], f"{n}: {_samples(row)}") for n in had])
        speed = 1.0 if d.speedup is None else d.speedup
        said = f"{speed:.3f} times as fast as {d.peer_name}\n{_samples(row)}"
        speeds.append([(speed, FLUX if speed >= 1 else LOSS, said)])
    labels = [f"{row.name}, {row.m}" for row, _ in drawn]
    yield _bars(times, labels, len(colours))
    yield "<p>Speed-up over the best peer, higher is better</p>"
    yield _bars(speeds, labels, 2)


def _bars(groups: list[list[tuple[float, str, str]]], labels: list[str], most: int) -> str:
    """Bars of (height, colour, text on hover) in groups, their slanting labels, and a line at 1."""
    top = min(max(value for group in groups for value, _, _ in group), TALLEST) * 1.08
    step = _BAR * most + 14
    width, parts = _LEFT + step * len(groups), []
    for tick in (0.5 * i for i in range(int(2 * top) + 1)):
        y = _HEIGHT * (1 - tick / top)
        kind = ' class="one"' if tick == 1 else ""
        parts.append(f'<line x1="{_LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"{kind}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick:g}</text>')
    for i, (group, label) in enumerate(zip(groups, labels, strict=True)):
        left = _LEFT + i * step + 7
        for j, (value, colour, said) in enumerate(group):
            height = _HEIGHT * min(value, top) / top
            at = f'x="{left + j * _BAR}" y="{_HEIGHT - height:.1f}" width="{_BAR - 1}" height="{height:.1f}"'
            parts.append(f'<rect {at} fill="{colour}"><title>{escape(said)}</title></rect>')
        parts.append(f'<text transform="translate({left} {_HEIGHT + 12}) rotate(45)">{escape(label)}</text>')
    reach = _LETTER * max(map(len, labels))
    size = f'width="{width + reach:.0f}" height="{_HEIGHT + 20 + reach:.0f}"'
    return f'<div class="wide"><svg {size} role="img">{"".join(parts)}</svg></div>'
