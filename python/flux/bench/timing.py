"""How candidates are timed. One class for GPUs, one for CPUs; the same three methods.

The rules, each of which has spoiled somebody's published result:

* ranks start together: they meet on the host, then a GPU-side collective lines their streams up;
* a delay kernel goes first, so that a burst is enqueued before it starts and host launch cost stays out.
  If the host was still enqueueing when the burst began, the sample is thrown away and the delay doubled,
  but for calls that wait for the GPU, as replays of a graph of NCCL calls do: no delay helps them;
* no delay helps a burst that does not fit the GPU's queue of about a thousand launches: a host that has
  filled it waits for the GPU. Calls of whole models are therefore tried first, in ever shorter bursts;
* a sample is a burst of back-to-back calls between two events, and the slowest rank counts;
* candidates take turns in one process, because clocks drift with heat and power, in an order that is
  drawn anew in each round, because whoever comes after a light candidate finds a rested GPU;
* the delay is the same for all. A GPU at its power limit computes up to 9 % faster in the burst after a rest:
  otherwise the candidate whose calls take the host longest would win by that;
* host cost is measured separately, behind a long delay, so that the GPU never makes the host wait.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Call = Callable[[], object]
T = TypeVar("T")

_EXTRA_ROUNDS = 3
# The longest delay that all candidates share because of one candidate with high host cost.
_MAX_SHARED_DELAY_MS = 50.0
# A host needs some microseconds for each launch, so a burst enqueued in less than this fits the GPU's queue.
_SURELY_FITS_MS = 3.0
# Delay to detect calls that wait for the GPU: behind it they take many times as long on the host.
_GUESS_DELAY_MS = 5.0
_WAITS_FACTOR = 4.0
_MAX_DELAY_MS = 500.0
_cuda: Any = torch.cuda  # events and the delay kernel are not typed


class Timer(Protocol):
    """What the runner needs from a timer. Every method is collective: all ranks call it in the same order.

    host_bound: candidates of the last row whose samples contain host time, because the host never got ahead.
    """

    host_bound: list[str]

    def warm(self, call: Call) -> None: ...

    def interleaved(self, calls: Mapping[str, Call], iters: int, rounds: int) -> dict[str, list[float]]: ...

    def host_us(self, call: Call) -> float: ...


def all_max(values: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Element-wise maximum over ranks."""
    if group is None or dist.get_world_size(group) == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(v) for v in tensor.tolist()]


def drawn(names: list[str], number: int) -> list[str]:
    """The order of a round: all begin equally often, the rest is drawn anew. Equal on all ranks."""
    first = number % len(names)
    others = names[:first] + names[first + 1 :]
    return [names[first], *random.Random(f"round {number}").sample(others, len(others))]


def recorded(call: Call, times: int = 1) -> tuple[Any, Any]:
    """Enqueues calls on the current stream. Returns the events before and behind them."""
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    return start, end


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds between two events, for the second of which it waits."""
    end.synchronize()
    return float(start.elapsed_time(end))


def captured(
    burst: Callable[[], T],
    device: torch.device,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Call, T]:
    """The replay of a burst from a CUDA graph, captured `inside`, and what the burst returned in it."""
    for _ in range(2):  # allocations, module loading and rendezvous, which a graph cannot capture
        burst()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog thread queries events during the capture.
    with inside(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = burst()
    return graph.replay, result


class CpuTimer:
    """Wall-clock bursts between processes that start from a barrier."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._device = torch.device("cpu")
        self.host_bound: list[str] = []

    def _burst(self, call: Call, iters: int) -> float:
        if self._group is not None:
            dist.barrier(self._group)
        start = time.perf_counter()
        for _ in range(iters):
            call()
        return (time.perf_counter() - start) * 1e3 / iters

    def warm(self, call: Call) -> None:
        self._burst(call, 2)

    def interleaved(self, calls: Mapping[str, Call], iters: int, rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            for name in drawn(list(calls), number):
                samples[name].append(self._burst(calls[name], iters))
        return {name: all_max(values, self._group, self._device) for name, values in samples.items()}

    def host_us(self, call: Call) -> float:
        return self._burst(call, 3) * 1e3


class GpuTimer:
    """Bursts on the current stream between two events, behind a delay kernel."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._mark = torch.zeros(1, device=device)
        self._cycles_per_ms = self._calibrate()
        self._enqueue_ms: dict[str, float] = {}
        self._waiting: set[str] = set()  # names of candidates whose calls wait for the GPU
        self.host_bound: list[str] = []

    def _calibrate(self) -> float:
        """Cycles of the delay kernel that make one millisecond, at the clock the GPU has under load."""
        cycles = 20_000_000
        _cuda._sleep(cycles)
        return cycles / elapsed_ms(*recorded(lambda: _cuda._sleep(cycles)))

    def _delay(self, milliseconds: float) -> None:
        # Add a third, because the clock may be higher now than during the calibration.
        _cuda._sleep(int(self._cycles_per_ms * milliseconds * 1.33) + 1)

    def _meet(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._group is not None:
            dist.all_reduce(self._mark, group=self._group)
            torch.cuda.synchronize(self._device)

    def _burst(self, name: str, call: Call, iters: int) -> tuple[float, bool]:
        """(ms per call on this rank, whether the host stayed ahead of the GPU)."""
        self._meet()
        shared = min(max(self._enqueue_ms.values()) * iters, _MAX_SHARED_DELAY_MS)
        self._delay(min(max(self._enqueue_ms[name] * iters, shared) + 0.3, _MAX_DELAY_MS))
        if self._group is not None:
            dist.all_reduce(self._mark, group=self._group)
        start, end = recorded(call, iters)
        ahead = not start.query()
        return elapsed_ms(start, end) / iters, ahead

    def warm(self, call: Call) -> None:
        """Three calls, waiting after each: first calls allocate, load modules and rendezvous."""
        for _ in range(3):
            call()
            torch.cuda.synchronize(self._device)

    def interleaved(self, calls: Mapping[str, Call], iters: int, rounds: int) -> dict[str, list[float]]:
        """Samples in ms per call, one per round, maximum over ranks.

        Rounds in which a host fell behind on any rank are repeated up to three times; a candidate that never
        stays ahead returns the samples it has, host cost included.
        """
        self._waiting = set()
        self._enqueue_ms = {name: self._first_guess(name, call) for name, call in calls.items()}
        iters = self._fitting(calls, iters)
        good: dict[str, list[float]] = {name: [] for name in calls}
        late: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + _EXTRA_ROUNDS):
            wanted = [name for name in drawn(list(calls), number) if len(good[name]) < rounds]
            if not wanted:
                break
            bursts = {name: self._burst(name, calls[name], iters) for name in wanted}
            flat = [x for t, ahead in bursts.values() for x in (t, 0.0 if ahead else 1.0)]
            worst = all_max(flat, self._group, self._device)
            for i, name in enumerate(wanted):
                (late if worst[2 * i + 1] else good)[name].append(worst[2 * i])
                if worst[2 * i + 1] and name not in self._waiting:
                    self._enqueue_ms[name] *= 2
        self.host_bound = [name for name in calls if not good[name]]
        return {name: good[name] or late[name] for name in calls}

    def _fitting(self, calls: Mapping[str, Call], iters: int) -> int:
        """How many calls of each candidate fit the GPU's queue, so that a burst of them is enqueued before it
        starts: at most `iters`, the same for all, and 1 if none does.
        """
        while iters > 1:
            slowest = all_max([max(self._enqueue_ms.values())], self._group, self._device)[0]
            if slowest * iters <= _SURELY_FITS_MS:
                break
            late = [0.0 if self._burst(name, call, iters)[1] else 1.0 for name, call in calls.items()]
            if not any(all_max(late, self._group, self._device)):
                break
            iters //= 2
        return iters

    def _enqueue_once(self, call: Call) -> float:
        """Milliseconds the host needs to enqueue one call while the GPU is busy; a generous first guess."""
        self._meet()
        self._delay(_GUESS_DELAY_MS)
        guess = self._host_ms(call)
        torch.cuda.synchronize(self._device)
        return 1.5 * guess

    @staticmethod
    def _host_ms(call: Call) -> float:
        """Milliseconds of a call on the host, the mean of three."""
        start = time.perf_counter()
        for _ in range(3):
            call()
        return (time.perf_counter() - start) * 1e3 / 3

    def _first_guess(self, name: str, call: Call) -> float:
        """How long a call takes the host, and whether it waits for the GPU: then as long as the delay."""
        busy = self._enqueue_once(call)
        if 2 * busy < _GUESS_DELAY_MS:  # all three calls: a guess is 1.5 times one call
            return busy
        self._meet()
        idle = 1.5 * self._host_ms(call)
        torch.cuda.synchronize(self._device)
        if busy < _WAITS_FACTOR * idle:
            return busy
        self._waiting.add(name)
        return idle

    def host_us(self, call: Call, calls: int = 20, repeats: int = 3) -> float:
        """Host microseconds per eager call: N enqueues behind a delay that outlasts them; slowest rank."""
        once = all_max([self._enqueue_once(call)], self._group, self._device)[0]
        calls = min(calls, max(1, int(_SURELY_FITS_MS / max(once, 1e-3))))
        times = []
        for _ in range(repeats):
            self._meet()
            self._delay(10.0)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) * 1e6 / calls)
            torch.cuda.synchronize(self._device)
        return all_max([statistics.median(times)], self._group, self._device)[0]


def make_timer(device: torch.device, group: dist.ProcessGroup | None) -> Timer:
    return GpuTimer(group, device) if device.type == "cuda" else CpuTimer(group)
