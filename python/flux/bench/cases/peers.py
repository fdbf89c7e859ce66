"""Peers of flux's operators: torch's fused ones, all-reduces of symmetric memory, and those of packages."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flux import peers as packages
from flux.bench.cases.common import Candidate, Context, Lineup, Step, rotating
from flux.ops.gemm_ar import rms_norm
from flux.testing.compare import agree, compare, require

_symm_mem: Any = torch.ops.symm_mem


def async_tp(lineup: Lineup, fused: Step) -> None:
    group, call = lineup.context.ranks, rotating(lineup.weights, fused)

    def enabled() -> Candidate:
        from torch.distributed import _symmetric_memory as symm_mem

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch enables every group automatically
            symm_mem.enable_symm_mem_for_group(group.group_name)
        call()
        torch.cuda.synchronize(lineup.context.device)
        return Candidate("async-TP", "peer", call)

    lineup.attempt("async-TP", enabled)


def _opened(
    name: str, context: Context, m: int, n: int, norm: packages.Norm | None
) -> tuple[packages.Reduce, packages.Inside]:
    """A package's all-reduce that has given the right result. Raises RuntimeError if it has not."""
    reduce, inside = packages.PEERS[name][1](context, m, n, norm)
    marks = (torch.arange(m * n, device=context.device).view(m, n) % 5 - 2).to(context.dtype)
    p = context.world_size
    got, total = reduce(marks * (context.rank + 1), marks.clone())
    want = marks * (p * (p + 1) // 2) + (marks if norm else 0)
    require(compare(got if total is None else total, want))
    if norm is not None:
        require(agree({"norm": got}, {"norm": rms_norm(want, norm.weight, norm.eps)}))
    return reduce, inside


def other_all_reduces(
    lineup: Lineup,
    m: int,
    n: int,
    prefix: str = "",
    produce: Callable[[Any, Tensor], object] = lambda weight, partial: None,
    norm: packages.Norm | None = None,
) -> None:
    """All-reduces of installed packages, and on GPUs PyTorch's of symmetric memory.

    Args:
        produce: ``produce(weight, partial)`` writes what is to be summed to `partial` [m, n].
        norm: what is done with the sum.
    """
    context = lineup.context

    def of_package(peer: str) -> Candidate:
        reduce, inside = _opened(peer, context, m, n, norm)
        partial = torch.zeros(m, n, dtype=context.dtype, device=context.device)
        residual = torch.zeros_like(partial)

        def step(weight: Any) -> None:
            produce(weight, partial)
            reduce(partial, residual)

        return lineup.made(f"{prefix}{peer}", "peer", step, inside=inside)

    for peer in packages.here():
        lineup.attempt(peer, functools.partial(of_package, peer))
    if not context.cuda:
        return
    name = context.ranks.group_name
    memory: dict[str, Tensor] = {}

    def symmetric() -> Tensor:
        if not memory:
            from torch.distributed import _symmetric_memory as symm_mem

            partial = symm_mem.empty(m, n, dtype=context.dtype, device=context.device)
            symm_mem.rendezvous(partial, name)
            memory.update(partial=partial.zero_(), total=torch.empty_like(partial))
        return memory["partial"]

    def step(one_shot: bool, weight: Any) -> None:
        partial = total = symmetric()
        produce(weight, partial)
        if one_shot:
            total = memory["total"]
            _symm_mem.one_shot_all_reduce_out(partial, "sum", name, total)
        else:
            _symm_mem.two_shot_all_reduce_(partial, "sum", name)
        _ = norm and norm.behind(total)

    for label in ("one-shot", "two-shot"):
        call = functools.partial(step, label == "one-shot")
        make = functools.partial(lineup.made, f"{prefix}{label}", "peer", call)
        lineup.attempt(f"symm_mem {label}", make)
