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
    exact,
    explained,
    plan_dict,
)
from flux.bench.cases.graphs import Step, graphed, symm_mem_all_reduce
from flux.bench.suites import Problem
from flux.comm import registry
from flux.comm.cuda import CudaWorkspace
from flux.ops import gemm
from flux.ops.plan import workspace_plan
from flux.testing import GemmRsCase

_K = 32  # of the products that are summed there


def check(problem: Problem, context: Context) -> str:
    """flux.all_reduce of integers that carry each rank's mark, several calls in a row."""
    m, n, _ = problem.local(context.tp)

    def call(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        case = GemmRsCase(m, n, _K, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        total = flux.all_reduce(gemm.reference(x, weight), group=context.group)
        return total, case.expected_sum(context.device)

    return exact(call, context)


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
    notes: list[str] = []
    if context.cuda:
        peers, notes = symm_mem_all_reduce(m, n, "", lambda x, partial: None, [x], context)
        candidates += peers
    return Prepared(candidates, explained("all_reduce", m, n, 0, context), notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """Both ways to sum, against what the plan chose."""
    m, n, _ = problem.local(context.tp)
    group = context.ranks
    x = torch.zeros(1, m * n, dtype=context.dtype, device=context.device)
    out = torch.empty_like(x)
    workspace = registry.get(group, context.device, "all_reduce")
    plan = workspace_plan(workspace, "all_reduce", 1, m * n, 0, context.dtype, False)
    if plan.mode < 0 or not isinstance(workspace, CudaWorkspace):
        raise RuntimeError(f"bench --all-configs needs the fused kernel: {plan.reason}")
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
