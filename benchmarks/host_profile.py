"""Where the host spends its time: the frames of this process's main thread, looked at by a timer.

A function of C++ counts for the line of Python that calls it: the handler of a signal runs when it returns.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

PERIOD_S = 0.5e-3
MOST = 40  # lines that a summary names, and functions

_lines: Counter[tuple[CodeType, int]] = Counter()
_functions: Counter[CodeType] = Counter()


def start() -> None:
    """Begins to look. Only for the main thread, which must use no timer of its own (signal.setitimer)."""
    _lines.clear()
    _functions.clear()
    signal.signal(signal.SIGALRM, lambda _, frame: _look(frame))
    signal.setitimer(signal.ITIMER_REAL, PERIOD_S)


def summary() -> dict[str, object]:
    """Ends it. `looks`: how often it looked; [share, where] of the lines that it found running, and of the
    functions that it found running, or waiting for others that they called.
    """
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    looks = sum(_lines.values())
    lines = [(count, f"{_name(code)}:{line}") for (code, line), count in _lines.most_common(MOST)]
    functions = [(count, _name(code)) for code, count in _functions.most_common(MOST)]

    def shares(found: list[tuple[int, str]]) -> list[tuple[float, str]]:
        return [(round(count / max(1, looks), 4), where) for count, where in found]

    return {"looks": looks, "lines": shares(lines), "functions": shares(functions)}


def _look(frame: FrameType | None) -> None:
    if frame is not None:
        _lines[frame.f_code, frame.f_lineno] += 1
    seen = set()
    while frame is not None:
        seen.add(frame.f_code)
        frame = frame.f_back
    _functions.update(seen)
    signal.setitimer(signal.ITIMER_REAL, PERIOD_S)  # not before: a look must not interrupt another


def _name(code: CodeType) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-2:])} {code.co_qualname}"
