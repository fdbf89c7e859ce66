"""Rough estimate of the time and memory of a benchmark on CPUs, from one timed matrix product."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flux.bench.cases import e2e, moe
from flux.bench.model import on_wire_bytes
from flux.bench.runner import Settings
from flux.bench.suites import Problem
from flux.testing.compare import CALLS

# A run needs confirmation if it takes longer, or more than this share of the free memory.
LONG_S = 300.0
LARGE_SHARE = 0.5
# Candidates that are timed for a row, on average.
_CANDIDATES = 3
_WARM_CALLS = 2
_PROBE = 512  # rows, columns and depth of the product that is timed
# Measured on two cores: random data, copies through shared memory and sockets, processes that meet.
_S_PER_ELEMENT = 2e-8
_S_PER_BYTE = 3e-9
_S_PER_CALL = 3e-3
_BYTES_PER_EXACT_WEIGHT = 20  # while integers become floating-point numbers
_BYTES_PER_RANDOM_WEIGHT = 8
_BYTES_PER_ACTIVATION = 30
_BYTES_PER_PROCESS = 100 << 20


@dataclass(frozen=True)
class Estimate:
    """seconds: of a whole run. memory: bytes of all processes at once. free: bytes that there are."""

    seconds: float
    memory: float
    free: float

    @property
    def is_much(self) -> bool:
        return self.seconds > LONG_S or self.memory > LARGE_SHARE * self.free

    def __str__(self) -> str:
        memory, free = (f"{size / 2**30:.3g} GiB" for size in (self.memory, self.free))
        return f"about {duration(self.seconds)} and {memory} of memory ({free} are free)"


def duration(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two."""
    units = {"years": 365 * 86400, "days": 86400, "hours": 3600, "minutes": 60}
    for name, unit in units.items():
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


def estimate(settings: Settings) -> Estimate:
    """The estimate of a run on the CPUs of this machine."""
    rate = flops_per_s(settings.result_dtype)
    crowded = max(1.0, settings.world / len(os.sched_getaffinity(0)))
    calls = _CANDIDATES * (_WARM_CALLS + settings.iters * settings.rounds) + 2 * CALLS
    seconds, memory = 0.0, 0.0
    for problem in settings.problems:
        weights, activations, flops, passes = work(problem, settings.world, settings.tp)
        on_wire = problem.on_wire(settings.tp, on_wire_bytes(problem.pattern, settings.dtype))
        call = flops / rate + on_wire * _S_PER_BYTE + _S_PER_CALL
        seconds += calls * call + passes * (weights + activations) * _S_PER_ELEMENT
        each = _BYTES_PER_RANDOM_WEIGHT if isinstance(problem, moe.MoeProblem) else _BYTES_PER_EXACT_WEIGHT
        memory = max(memory, weights * each + activations * _BYTES_PER_ACTIVATION)
    return Estimate(crowded * seconds, settings.world * (memory + _BYTES_PER_PROCESS), free_memory())


def work(problem: Problem, world: int, tp: int) -> tuple[float, float, float, int]:
    """Elements of a rank's weights, those of its operands and results, floating-point operations of a call,
    and how often data is made: exact data of a collective is made for all ranks by each.
    """
    m, n, k = map(float, problem.local(tp))
    weights, activations, passes = n * k, m * (n + k), CALLS * (world + 1) + 1
    flops = 2 * m * weights * (3 if problem.op == "layer_training" else 1)
    if isinstance(problem, moe.MoeProblem):
        passes = 1
        weights *= problem.experts // problem.ep_size
    if isinstance(problem, e2e.ModelProblem):
        weights, passes = e2e.weights(problem) / tp, 2 * tp
        flops = 2 * m * weights
    if problem.op in ("moe_route", "all_reduce", "all_reduce_norm"):
        weights = flops = 0.0
    return weights, activations, flops, passes


def flops_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations per second of one core, as a rank uses one."""
    x = torch.ones(_PROBE, _PROBE, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(x, x)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * _PROBE**3 / min(seconds)


def free_memory() -> float:
    """Bytes that processes can still get from this machine, or from the container."""
    free = float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024.0 * int(line.split()[1])
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    except (OSError, ValueError):
        pass  # no limit: the file contains "max", or does not exist
    return free
