"""Raw data as tables: files of measurements without a specific table, with any columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, str]

_LOSS_LINES = 20
_LONG = 40  # characters of a text that is more than a name
# Maximum number of columns that identify a row, which are repeated if a table is split into several.
_NAMES = 6
_GAP = 2


def show(data: dict[str, Any], console: Console) -> None:
    """Prints the head of a file of raw measurements, and a table for each part of its rows."""
    for key, value in data.items():
        if key == "what":
            console.print(Text(str(value)))
        elif isinstance(value, dict):
            for name, entry in value.items():
                console.print(Text(f"{key}, {name}: {_text(entry)}"))
        elif key != "rows":
            console.print(Text(f"{key}: {_text(value)}"))
    parts: dict[str, list[Row]] = {}
    for entry in data["rows"]:
        part = str(entry.get("part", "rows"))
        parts.setdefault(part, []).extend(_rows({k: v for k, v in entry.items() if k != "part"}))
    for part, rows in parts.items():
        _table(part, rows, console)


def show_losses(data: dict[str, list[float]], console: Console) -> None:
    """Prints curves of equal length at about twenty of their steps, and how far they are apart at most."""
    curves = list(data.values())
    last = len(curves[0]) - 1
    steps = sorted({round(i * last / _LOSS_LINES) for i in range(_LOSS_LINES + 1)})
    rows = [{"step": str(i)} | {name: f"{curve[i]:.4f}" for name, curve in data.items()} for i in steps]
    _table("losses", rows, console)
    if len(curves) > 1:
        apart, step = furthest_apart(curves)
        console.print(f"furthest apart: {apart:.2e}, at step {step} of {last + 1}", highlight=False)


def furthest_apart(curves: Iterable[list[float]]) -> tuple[float, int]:
    """The largest distance between curves of equal length, and its step."""
    return max((max(at) - min(at), i) for i, at in enumerate(zip(*curves, strict=True)))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.10g}" if isinstance(value, float) else "–" if value is None else str(value)


def _is_cell(value: Any) -> bool:
    return _is_scalar(value) or (isinstance(value, list) and all(map(_is_scalar, value)))


def _rows(entry: dict[str, Any], prefix: str = "") -> Iterator[Row]:
    """An entry as one row, what is nested as further columns; or a row for each entry of a list in it."""
    row: Row = {}
    lists: dict[str, list[Any]] = {}
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if _is_cell(value):
            row[name] = _text(value)
        elif isinstance(value, dict):
            inner = list(_rows(value, f"{name} / "))
            row |= inner[0] if inner else {}
        else:
            lists[name] = value
    if not lists:
        yield row
    for name, entries in lists.items():
        for inside in entries:
            for more in _rows(inside if isinstance(inside, dict) else {name: inside}):
                yield row | more


def _table(title: str, rows: list[Row], console: Console) -> None:
    """One table, or several below each other with as many columns as the console is wide.

    A row without a value in one of them is left out there. A column wider than the console is folded.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            rest = {name: cell for name, cell in row.items() if name != column}
            groups.setdefault(row.get(column, ""), []).append(rest)
        # A long text that is equal in many rows becomes a title.
        if max(map(len, groups)) > _LONG and 4 * len(groups) <= len(rows):
            for text, some in groups.items():
                _table(f"{title} · {column}: {text}", some, console)
            return
    count = _count_names(columns, rows)
    names, rest_of = columns[:count], set(columns[count:])
    width = {c: max(map(cell_len, (c, *(row.get(c, "") for row in rows)))) + _GAP for c in columns}
    room = console.width - 1 - sum(width[name] for name in names)
    for number, part in enumerate(_parts({c: width[c] for c in columns[count:]}, room)):
        table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
        table.padding = (0, 1, 0, 0)
        for column in (*names, *part):
            numbers = all(_is_number(row[column]) for row in rows if column in row)
            table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
        for row in rows:
            if row.keys() & part or (not number and not row.keys() & rest_of):
                table.add_row(*(Text(row.get(column, "")) for column in (*names, *part)))
        console.print(table)


def _parts(widths: dict[str, int], room: int) -> Iterator[list[str]]:
    """Splits columns into parts of at most this width, with at least one column each."""
    part: list[str] = []
    used = 0
    for column, width in widths.items():
        if part and used + width > room:
            yield part
            part, used = [], 0
        part.append(column)
        used += width
    yield part


def _is_number(text: str) -> bool:
    """Whether a cell is a number, or several."""
    for word in text.split(", "):
        try:
            float(word)
        except ValueError:
            if word not in ("", "–"):
                return False
    return True


def _count_names(columns: list[str], rows: list[Row]) -> int:
    """The number of leading columns that identify a row: those of all rows, up to the first measurement."""
    count = 0
    for column in columns[: min(_NAMES, len(columns) - 1)]:
        cells = [row.get(column, ".") for row in rows]
        if "." in cells or any("." in cell and _is_number(cell) for cell in cells):
            break
        count += 1
    return count
