"""``flux bench --show``: results of bench, verify and doctor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flux._files import read_json
from flux.bench import plot as plots
from flux.bench import record as records
from flux.bench.report import TABLE_WIDTH, make_console, render
from flux.cli import doctor, verify

Data = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of file. is_one: whether a file is of this kind; show: prints it."""

    name: str
    is_one: Callable[[Data], bool]
    show: Callable[[Data, Console], None]


_RESULT = Kind(
    "a result of bench",
    lambda data: "rows" in data and "suite" in data,
    lambda data, console: console.print(render(records.from_json(data, ""), console.width)),
)
KINDS = (
    _RESULT,
    Kind("outcomes of verify", lambda data: "outcomes" in data, verify.show),
    Kind("findings of doctor", lambda data: "findings" in data, doctor.show),
)


def show_file(path: Path, picture: Path | None) -> None:
    """Prints a file; where it is a result of bench, draws it.

    Raises ValueError if it cannot be read, is not one of flux's files, or not whole.
    """
    data = read_json(path)
    kind = next((kind for kind in KINDS if isinstance(data, dict) and data and kind.is_one(data)), None)
    if kind is None:
        known = ", ".join(kind.name for kind in KINDS)
        raise ValueError(f"bench: --show expected {known}; {path} is none of these")
    if picture is not None and kind is not _RESULT:
        raise ValueError(f"bench: --plot draws results of bench, {path} has {kind.name}")
    console = make_console(least=TABLE_WIDTH)
    try:
        with console.capture() as text:  # print nothing if the file turns out to be truncated
            kind.show(data, console)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"file {path}: expected {kind.name}, but not whole: {why}") from error
    sys.stdout.write(text.get())
    sys.stdout.flush()
    if picture is not None:
        drawn = plots.plot(records.from_json(data), picture)
        console.print(f"picture: {drawn}", highlight=False, soft_wrap=True)
