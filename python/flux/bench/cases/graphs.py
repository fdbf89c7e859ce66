"""Decoding: calls replayed from CUDA graphs, and PyTorch's peers of such calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flux.bench.cases.common import Candidate, Context, tried
from flux.bench.timing import Call

_CALLS = 12  # minimum in a graph, because the launch of a graph costs some microseconds
_symm_mem: Any = torch.ops.symm_mem

Step = Callable[[torch.Tensor], object]


def graphed(name: str, role: str, step: Step, weights: list[torch.Tensor], context: Context) -> Candidate:
    """A candidate that replays `step` with each of the weights in turn. On CPUs it just calls it."""
    repeats = -(-_CALLS // len(weights)) if context.cuda else 1
    calls = len(weights) * repeats

    def burst() -> None:
        for _ in range(repeats):
            for weight in weights:
                step(weight)

    return Candidate(name, role, _captured(burst, context), calls, lambda: step(weights[0]))


def _captured(burst: Call, context: Context) -> Call:
    if not context.cuda:
        return burst
    burst()  # allocations, module loading and rendezvous, which a graph cannot capture
    torch.cuda.synchronize(context.device)
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog thread queries events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        burst()
    return graph.replay


def symm_mem_all_reduce(
    m: int,
    n: int,
    prefix: str,
    produce: Callable[[torch.Tensor, torch.Tensor], object],
    weights: list[torch.Tensor],
    context: Context,
    use: Callable[[torch.Tensor], object] = lambda total: None,
) -> tuple[list[Candidate], list[str]]:
    """PyTorch's all-reduces of symmetric memory as peers, and notes on those that cannot run.

    Args:
        produce: ``produce(weight, partial)`` writes what is to be summed to `partial` [m, n].
        use: what is done with the sum.
    """
    name = context.ranks.group_name
    memory: dict[str, torch.Tensor] = {}

    def symmetric() -> torch.Tensor:
        if not memory:
            from torch.distributed import _symmetric_memory as symm_mem

            partial = symm_mem.empty(m, n, dtype=context.dtype, device=context.device)
            symm_mem.rendezvous(partial, name)
            memory.update(partial=partial.zero_(), total=torch.empty_like(partial))
        return memory["partial"]

    def one_shot(weight: torch.Tensor) -> None:
        partial = symmetric()
        produce(weight, partial)
        _symm_mem.one_shot_all_reduce_out(partial, "sum", name, memory["total"])
        use(memory["total"])

    def two_shot(weight: torch.Tensor) -> None:
        partial = symmetric()
        produce(weight, partial)
        _symm_mem.two_shot_all_reduce_(partial, "sum", name)
        use(partial)

    candidates, notes = [], []
    for label, step in (("one-shot", one_shot), ("two-shot", two_shot)):
        make = functools.partial(graphed, f"{prefix}{label}", "peer", step, weights, context)
        candidate, error = tried(make, context)
        if candidate is None:
            notes.append(f"symm_mem {label} could not run: {error}")
        else:
            candidates.append(candidate)
    return candidates, notes


def capturable(call: Call, context: Context) -> tuple[Call, str]:
    """The replay of a call from a CUDA graph, or the call itself and why it cannot be captured.

    All ranks agree on which.
    """
    replay, error = tried(lambda: _captured(call, context), context)
    return replay or call, error
