"""Outcomes of `flux verify`, and the file in which its processes tell them, and what they have begun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

RUNNING = "running"
_announced = ""


@dataclass(frozen=True)
class Outcome:
    """One line of the table. state: "exact", "wrong" (then detail says where), "timed out" (how long it was
    waited for) or "skipped" (why).
    """

    op: str
    case: str
    where: str
    state: Annotated[str, Literal["exact", "wrong", "timed out", "skipped", "running"]]
    detail: str = ""
    seconds: float = 0.0


def announce(op: str, where: str) -> None:
    """A line on standard error where another operator, or the same elsewhere, begins."""
    global _announced
    text = f"verifying {op}, {where}"
    if text != _announced:
        _announced = text
        print(text, file=sys.stderr, flush=True)


@contextmanager
def writer(path: str | None) -> Iterator[Callable[[Outcome], None]]:
    """Yields a function that appends an outcome to the file and announces what runs, or does nothing without
    a file.
    """
    if path is None:
        yield lambda outcome: None
        return
    with open(path, "a") as file:

        def write(outcome: Outcome) -> None:
            if outcome.state == RUNNING:
                announce(outcome.op, outcome.where)
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()

        yield write


def read(path: Path) -> tuple[list[Outcome], Outcome | None]:
    """What has ended, and the case that has begun and not ended. A process that was killed may have written
    only a part of the last line.
    """
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    told = [Outcome(**json.loads(line)) for line in lines]
    running = told[-1] if told and told[-1].state == RUNNING else None
    return [outcome for outcome in told if outcome.state != RUNNING], running
