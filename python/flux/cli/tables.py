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
    """One table; or, where it is wider than the console, a paragraph for each row."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    widths = (max(map(cell_len, (column, *(row.get(column, "") for row in rows)))) for column in columns)
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(Text(column), no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row.get(column, "")) for column in columns))
    if sum(width + 3 for width in widths) < console.width:  # the box's spaces
        console.print(table)
        return
    console.print(Text(f"\n{title}", style="italic"))
    for row in rows:
        console.print(Text(" · ".join(f"{column} {cell}" for column, cell in row.items())))
