"""AllReduce alone, from CUDA graphs: flux against NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux import _native
from flux.bench.cases.common import Context, Lineup, collectives, marked
from flux.bench.cases.peers import other_all_reduces
from flux.bench.cases.plans import explained, kernel_plan, plan_dict
from flux.bench.suites import Problem
from flux.ops import gemm

K = 32  # of the products that are summed in checks


def check(problem: Problem, context: Context) -> str:
    """flux.all_reduce of integers that carry each rank's mark, several calls in a row."""

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return flux.all_reduce(gemm.reference(x, weight), group=context.group)

    return marked(problem, context, call, K)


def prepare(problem: Problem, context: Context) -> Lineup:
    m, n, _ = problem.local(context.tp)
    # Some are summed in place repeatedly: anything but zeros would soon overflow.
    x, summed = (torch.zeros(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    out, group = torch.empty_like(x), context.ranks
    lineup = Lineup(context, [x], graphs=True, plan=explained("all_reduce", m, n, 0, context))
    lineup.ours("all_reduce", lambda g: lambda x: flux.all_reduce(x, group=g, out=out))
    lineup.add_call(collectives(context), "peer", lambda: dist.all_reduce(summed, group=group))
    other_all_reduces(lineup, m, n)
    return lineup


def sweep(problem: Problem, context: Context) -> Lineup:
    """Both ways to sum, against what the plan chose."""
    m, n, _ = problem.local(context.tp)
    x = torch.zeros(1, m * n, dtype=context.dtype, device=context.device)
    out = torch.empty_like(x)
    workspace, plan = kernel_plan("all_reduce", 1, m * n, 0, context)
    core = _native.core
    modes = {"one-shot": core.ExchangeMode.ONE_SHOT, "two-shot": core.ExchangeMode.TWO_SHOT}
    room = max(core.exchange(1, m * n, context.world_size, mode).bytes for mode in modes.values())
    chosen = replace(plan, exchange_bytes=room)
    lineup = Lineup(context, [x], graphs=True, plan=plan_dict(plan))

    def run(name: str, role: str, mode: int) -> None:
        def launch(x: Tensor) -> None:
            with workspace.enter(chosen) as (address, _):
                torch.ops.flux._all_reduce(x, out, address, 0, mode)

        lineup.add(name, role, launch)

    run("plan", "flux", plan.mode)
    for name, mode in modes.items():
        run(name, "config", int(mode))
    return lineup
