"""Outcomes of `flux verify`, and the file through which its processes report their progress."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

Say = Callable[[str], None]
RUNNING = "running"
_POLL_S = 0.1


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

    @property
    def label(self) -> str:
        return f"{self.op}, {self.where}: {self.case}"


@contextmanager
def writer(path: str | None) -> Iterator[Callable[[Outcome], None]]:
    """Yields a function that appends an outcome to the file, or does nothing without a file."""
    if path is None:
        yield lambda outcome: None
        return
    with open(path, "a") as file:

        def write(outcome: Outcome) -> None:
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()

        yield write


def _read(path: Path) -> list[Outcome]:
    """The complete lines: a process that was killed may have written only a part of the last one."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def finished(path: Path) -> list[Outcome]:
    return [outcome for outcome in _read(path) if outcome.state != RUNNING]


def running(path: Path) -> Outcome | None:
    """The case that has begun and not ended."""
    last = _read(path)[-1:]
    return last[0] if last and last[0].state == RUNNING else None


@contextmanager
def followed(say: Say) -> Iterator[Path]:
    """Yields the path of a file for `writer`; reports the progress in it until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="flux-verify-") as folder:
        path, done = Path(folder) / "log", threading.Event()

        def follow() -> None:
            said = None
            while not done.wait(_POLL_S):
                now = running(path)
                if now is not None and now != said:
                    said = now
                    say(now.label)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            done.set()
            thread.join()
