"""Where an engine or a model spends its time: the kernels of a rank, by torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

MOST = 30  # kernels that a summary names
MOST_IDLE = 10


def start(cuda: bool) -> Any:
    """A profiler that runs: of kernels, or on CPUs of torch's operators."""
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    found = torch.profiler.profile(activities=[activity])
    found.start()
    return found


def summary(profiler: Any, cuda: bool) -> dict[str, Any]:
    """Stops the profiler; `of_events` of what it has seen."""
    profiler.stop()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [each for each in profiler.events() if each.device_type == wanted]
    return of_events((each.name, each.time_range.start, each.time_range.end) for each in events)


def of_events(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Of (name, start, end) in microseconds: `span_ms` from the first start to the last end, `busy_ms` in
    which at least one of them ran, [name, calls, milliseconds] of the longest kernels, and [milliseconds,
    kernel before, kernel after] of the longest times without any.
    """
    calls: dict[str, int] = defaultdict(int)
    lasted: dict[str, float] = defaultdict(float)
    idle: list[tuple[float, str, str]] = []
    busy, first, reached, last = 0.0, 0.0, 0.0, ""
    for i, (name, begin, end) in enumerate(sorted(events, key=lambda event: event[1])):
        calls[name] += 1
        lasted[name] += end - begin
        if i == 0:
            first = reached = begin
        elif begin > reached:
            idle.append((begin - reached, last, name))
        busy += max(0.0, end - max(begin, reached))
        if end >= reached:
            reached, last = end, name
    names = sorted(lasted, key=lambda name: -lasted[name])[:MOST]
    return {
        "span_ms": (reached - first) / 1e3,
        "busy_ms": busy / 1e3,
        "kernels": [[_short(name), calls[name], round(lasted[name] / 1e3, 3)] for name in names],
        "idle": [
            [round(us / 1e3, 3), _short(before), _short(after)]
            for us, before, after in sorted(idle, key=lambda gap: -gap[0])[:MOST_IDLE]
        ],
    }


def _short(name: str) -> str:
    return name[:200]
