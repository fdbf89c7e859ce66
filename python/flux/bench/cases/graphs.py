"""Decoding: calls replayed from CUDA graphs, and PyTorch's peers of such calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from flux import peers as packages
from flux.bench.cases.common import Candidate, Context, agree, compare, tried
from flux.bench.model import passed
from flux.bench.timing import Call
from flux.ops.gemm_ar import rms_norm

_CALLS = 12  # minimum in a graph, because the launch of a graph costs some microseconds
_symm_mem: Any = torch.ops.symm_mem

T = TypeVar("T")
Step = Callable[[torch.Tensor], object]


def graphed(
    name: str,
    role: str,
    step: Callable[[T], object],
    weights: Sequence[T],
    context: Context,
    inside: packages.Inside = nullcontext,
) -> Candidate:
    """A candidate that replays `step` with each of the weights in turn. On CPUs it just calls it. `inside`: a
    context manager for the capture.
    """
    repeats = -(-_CALLS // len(weights)) if context.cuda else 1
    calls = len(weights) * repeats

    def burst() -> None:
        for _ in range(repeats):
            for weight in weights:
                step(weight)

    return Candidate(name, role, _captured(burst, context, inside), calls, lambda: step(weights[0]))


def _captured(burst: Call, context: Context, inside: packages.Inside = nullcontext) -> Call:
    if not context.cuda:
        return burst
    burst()  # allocations, module loading and rendezvous, which a graph cannot capture
    torch.cuda.synchronize(context.device)
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog thread queries events during the capture.
    with inside(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        burst()
    return graph.replay


def _opened(
    name: str, context: Context, m: int, n: int, norm: packages.Norm | None
) -> tuple[packages.Reduce, packages.Inside]:
    """A peer that has given the right result. Raises RuntimeError if it has not."""
    reduce, inside = packages.PEERS[name][1](context, m, n, norm)
    marks = (torch.arange(m * n, device=context.device).view(m, n) % 5 - 2).to(context.dtype)
    p = context.world_size
    got, total = reduce(marks * (context.rank + 1), marks.clone())
    want = marks * (p * (p + 1) // 2) + (marks if norm else 0)
    said = compare(got if total is None else total, want)
    if norm is not None and passed(said):
        said = agree({"norm": got}, {"norm": rms_norm(want, norm.weight, norm.eps)})
    if not passed(said):
        raise RuntimeError(f"wrong: {said}")
    return reduce, inside


def other_all_reduces(
    m: int,
    n: int,
    prefix: str,
    produce: Callable[[T, torch.Tensor], object],
    weights: Sequence[T],
    context: Context,
    norm: packages.Norm | None = None,
) -> tuple[list[Candidate], list[str]]:
    """All-reduces of installed packages, and on GPUs PyTorch's of symmetric memory, as peers, and notes on
    those that cannot run.

    Args:
        produce: ``produce(weight, partial)`` writes what is to be summed to `partial` [m, n].
        norm: what is done with the sum.
    """
    candidates, notes = [], []

    def add(label: str, make: Callable[[], Candidate]) -> None:
        candidate, error = tried(make, context)
        if candidate is None:
            notes.append(f"{label} could not run: {error}")
        else:
            candidates.append(candidate)

    def of_package(peer: str) -> Candidate:
        reduce, inside = _opened(peer, context, m, n, norm)
        partial = torch.zeros(m, n, dtype=context.dtype, device=context.device)
        residual = torch.zeros_like(partial)

        def step(weight: T) -> None:
            produce(weight, partial)
            reduce(partial, residual)

        return graphed(f"{prefix}{peer}", "peer", step, weights, context, inside)

    for peer in packages.here():
        add(peer, functools.partial(of_package, peer))
    if not context.cuda:
        return candidates, notes
    name = context.ranks.group_name
    memory: dict[str, torch.Tensor] = {}

    def symmetric() -> torch.Tensor:
        if not memory:
            from torch.distributed import _symmetric_memory as symm_mem

            partial = symm_mem.empty(m, n, dtype=context.dtype, device=context.device)
            symm_mem.rendezvous(partial, name)
            memory.update(partial=partial.zero_(), total=torch.empty_like(partial))
        return memory["partial"]

    def one_shot(weight: T) -> None:
        partial = symmetric()
        produce(weight, partial)
        _symm_mem.one_shot_all_reduce_out(partial, "sum", name, memory["total"])
        _ = norm and norm.behind(memory["total"])

    def two_shot(weight: T) -> None:
        partial = symmetric()
        produce(weight, partial)
        _symm_mem.two_shot_all_reduce_(partial, "sum", name)
        _ = norm and norm.behind(partial)

    for label, step in (("one-shot", one_shot), ("two-shot", two_shot)):
        make = functools.partial(graphed, f"{prefix}{label}", "peer", step, weights, context)
        add(f"symm_mem {label}", make)
    return candidates, notes


def capturable(call: Call, context: Context) -> tuple[Call, str]:
    """The replay of a call from a CUDA graph, or the call itself and why it cannot be captured.

    All ranks agree on which.
    """
    replay, error = tried(lambda: _captured(call, context), context)
    return replay or call, error
