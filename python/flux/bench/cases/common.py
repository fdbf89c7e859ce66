"""Common parts of all benchmarked ops: ranks, and the candidates of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flux import peers as packages
from flux.bench.model import in_way
from flux.bench.timing import Call, all_max, captured
from flux.comm import registry
from flux.measured.times import Tuning
from flux.plan.choose import ways_of

T = TypeVar("T")
Step = Callable[[Any], Any]  # one call, of a weight

_CALLS_OF_GRAPH = 12  # at least, because the launch of a graph costs some microseconds


@dataclass(frozen=True)
class Context:
    """One rank of a benchmark. ``group`` is None for a single rank."""

    rank: int
    world_size: int
    tp: int
    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    say: Callable[[str], None] = lambda text: None  # reports the progress of a long preparation
    twins: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group of an operator whose ranks talk to each other."""
        assert self.group is not None
        return self.group

    def with_twins(self, ways: Sequence[str]) -> Context:
        """With a group of the same ranks for each of these ways, whose calls all run so. A collective."""
        twins = {}
        for way in ways if self.group is not None else ():
            group = twins[way] = dist.new_group(list(range(self.world_size)))
            registry.get(group, self.device, "bench").tuning = Tuning(forced=way)
        return replace(self, twins=twins)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    role: "flux", "gemm" and "comm" (each alone), "serial", "peer", "parts" (flux in another way), "fast"
    (with less accurate sums of fp8 products), or "int8" (whose contributions travel so).
    calls: how often `call` does the work: a CUDA graph holds several.
    eager: what its host cost is measured of, where that is not `call`.
    """

    name: str
    role: str
    call: Call
    calls: int = 1
    eager: Call | None = None


@dataclass
class Lineup:
    """The candidates of one row in the order in which they take turns, flux's plan, and notes.

    weights: of which each call takes the next. graphs: whether calls are replayed from CUDA graphs.
    """

    context: Context
    weights: Sequence[Any] = (None,)
    graphs: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def made(
        self,
        name: str,
        role: str,
        step: Step,
        weights: Sequence[Any] = (),
        inside: packages.Inside = nullcontext,
    ) -> Candidate:
        """A candidate whose calls are those of `step`. inside: a context manager for the capture."""
        weights = weights or self.weights
        if not self.graphs:
            return Candidate(name, role, rotating(weights, step))
        repeats = -(-_CALLS_OF_GRAPH // len(weights)) if self.context.cuda else 1

        def burst() -> None:
            for _ in range(repeats):
                for weight in weights:
                    step(weight)

        replay: Call = burst
        if self.context.cuda:
            replay, _ = captured(burst, self.context.device, inside)
        return Candidate(name, role, replay, len(weights) * repeats, lambda: step(weights[0]))

    def add(self, name: str, role: str, step: Step, weights: Sequence[Any] = ()) -> None:
        """weights: other ones than most candidates take."""
        self.candidates.append(self.made(name, role, step, weights))

    def add_call(self, name: str, role: str, call: Call) -> None:
        """Of something without a weight."""
        if self.graphs:
            self.add(name, role, lambda _: call(), (None,))
        else:
            self.candidates.append(Candidate(name, role, call))

    def ours(self, op: str, step: Callable[[dist.ProcessGroup], Step]) -> None:
        """flux's `op` as planned, and in each way that the context's twins say. step: of their groups."""
        self.add("flux", "flux", step(self.context.ranks))
        for way, group in self.context.twins.items():
            if way in ways_of(op):
                self.add(in_way(way), "parts", step(group))

    def attempt(self, name: str, make: Callable[[], Candidate]) -> None:
        """A candidate, or a note on why it cannot run. A collective: all ranks agree on which."""
        candidate, error = tried(make, self.context)
        if candidate is None:
            self.notes.append(f"{name} could not run: {error}")
        else:
            self.candidates.append(candidate)


def rotating(weights: Sequence[T], call: Callable[[T], object]) -> Call:
    """Calls with the next weight each time."""
    if len(weights) == 1:
        only = weights[0]
        return lambda: call(only)
    position = 0

    def rotate() -> object:
        nonlocal position
        position = (position + 1) % len(weights)
        return call(weights[position])

    return rotate


def tried(make: Callable[[], T], context: Context) -> tuple[T | None, str]:
    """make(), or None and why it cannot run on some rank. A collective: all ranks agree on which."""
    error, made = "", None
    try:
        made = make()
    except (RuntimeError, AttributeError, ImportError, ValueError, TypeError, AssertionError) as failure:
        error = (str(failure).strip().splitlines() or [type(failure).__name__])[0][:200]
    if all_max([1.0 if error else 0.0], context.group, context.device)[0]:
        return None, error or "it failed on another rank"
    return made, ""


def collectives(context: Context) -> str:
    """The library of torch's collectives on this device."""
    return "NCCL" if context.cuda else "gloo"


def library(context: Context) -> str:
    """The library of torch's GEMMs on this device."""
    return "cuBLAS" if context.cuda else "torch"
