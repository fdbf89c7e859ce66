"""AllReduce alone, from CUDA graphs: flux against NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import flux
from flux import _native
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    collectives,
    explained,
    kernel_plan,
    marked,
    plan_dict,
)
from flux.bench.cases.graphs import Step, graphed, other_all_reduces
from flux.bench.suites import Problem
from flux.ops import gemm

_K = 32  # of the products that are summed there


def check(problem: Problem, context: Context) -> str:
    """flux.all_reduce of integers that carry each rank's mark, several calls in a row."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return flux.all_reduce(gemm.reference(x, weight), group=context.group)

    return marked(problem, context, call, True, _K)


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, _ = problem.local(context.tp)
    group = context.ranks
    # Some are summed in place repeatedly: anything but zeros would soon overflow.
    x, summed = (torch.zeros(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    out = torch.empty_like(x)

    def candidate(name: str, role: str, step: Step) -> Candidate:
        return graphed(name, role, step, [x], context)

    candidates = [
        *context.ours(
            "all_reduce",
            lambda name, role, g: candidate(name, role, lambda x: flux.all_reduce(x, group=g, out=out)),
        ),
        candidate(collectives(context), "peer", lambda _: dist.all_reduce(summed, group=group)),
    ]
    peers, notes = other_all_reduces(m, n, "", lambda x, partial: None, [x], context)
    candidates += peers
    return Prepared(candidates, explained("all_reduce", m, n, 0, context), notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """Both ways to sum, against what the plan chose."""
    m, n, _ = problem.local(context.tp)
    x = torch.zeros(1, m * n, dtype=context.dtype, device=context.device)
    out = torch.empty_like(x)
    workspace, plan = kernel_plan("all_reduce", 1, m * n, 0, context)
    core = _native.core
    modes = {"one-shot": core.ExchangeMode.ONE_SHOT, "two-shot": core.ExchangeMode.TWO_SHOT}
    room = max(core.exchange(1, m * n, context.world_size, mode).bytes for mode in modes.values())
    chosen = replace(plan, exchange_bytes=room)

    def run(name: str, role: str, mode: int) -> Candidate:
        def launch(x: torch.Tensor) -> None:
            with workspace.enter(chosen) as (address, _):
                torch.ops.flux._all_reduce(x, out, address, 0, mode)

        return graphed(name, role, launch, [x], context)

    ways = [run(name, "config", int(mode)) for name, mode in modes.items()]
    return Prepared([run("plan", "flux", plan.mode), *ways], plan_dict(plan))
