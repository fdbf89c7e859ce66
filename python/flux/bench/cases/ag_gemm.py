"""AllGather+GEMM: flux against NCCL then cuBLAS, and against PyTorch's async tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

import flux
from flux.bench.cases.common import (
    CALLS,
    Candidate,
    Context,
    Prepared,
    async_tp,
    collectives,
    compare,
    explained,
    first_wrong,
    kernel_plan,
    of_packages,
    packed_choices,
    plan_dict,
    random_operands,
    rotating,
)
from flux.bench.cases.gemm import library
from flux.bench.suites import Problem
from flux.ops import all_gather
from flux.testing import AgGemmCase

T = TypeVar("T")


def check(problem: Problem, context: Context) -> str:
    """flux.ag_gemm and flux.all_gather on integers that carry each rank's mark, several calls in a row."""
    m, n, k = problem.local(context.tp)
    product = _exact(lambda x, w: flux.ag_gemm(x, w, group=context.group), m, n, k, context)
    case = AgGemmCase(m, n, k, context.world_size, context.dtype, seed=CALLS)
    x = case.inputs(context.rank, context.device)[0]
    gathered = compare(flux.all_gather(x, group=context.group), case.gathered(context.device))
    flux.check(context.group)
    return first_wrong([product, gathered])


def _exact(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], m: int, n: int, k: int, context: Context
) -> str:
    results = []
    for seed in range(CALLS):
        case = AgGemmCase(m, n, k, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        results.append(compare(call(x, weight), case.expected(context.rank, context.device)))
    return first_wrong(results)


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    group = context.ranks
    full, weights = random_operands(m, n, k, context)
    x = full[: m // context.world_size]
    gathered, own_gathered = torch.empty_like(full), torch.empty_like(full)
    ours, theirs, own_gemm = (torch.empty(m, n, dtype=context.dtype, device=context.device) for _ in range(3))
    collect = all_gather.torch_all_gather()

    def serial(weight: torch.Tensor) -> None:
        collect(gathered, x, group=group)
        torch.mm(gathered, weight.t(), out=theirs)

    blas, comm = library(context), collectives(context)
    candidates = [
        *context.ours(
            "ag_gemm",
            lambda name, role, g: Candidate(
                name, role, rotating(weights, lambda w: flux.ag_gemm(x, w, group=g, out=ours))
            ),
        ),
        Candidate(blas, "gemm", rotating(weights, lambda w: torch.mm(full, w.t(), out=theirs))),
        Candidate(comm, "comm", lambda: collect(gathered, x, group=group)),
        Candidate(f"{comm}+{blas}", "serial", rotating(weights, serial)),
    ]
    notes: list[str] = []
    if context.cuda:
        alone = rotating(weights, lambda w: flux.gemm(full, w, out=own_gemm))
        candidates.append(Candidate("flux.gemm", "gemm", alone))
        gather = Candidate(
            "flux.all_gather", "comm", lambda: flux.all_gather(x, group=group, out=own_gathered)
        )
        candidates.append(gather)
        name, symm_mem = group.group_name, torch.ops.symm_mem
        peers, notes = async_tp(
            weights,
            lambda w: symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name, return_A=False),
            context,
        )
        candidates += peers
    packaged, failed = of_packages(
        "ag_gemm", (m, n, k), x, weights, lambda call: _exact(call, m, n, k, context), context
    )
    candidates, notes = candidates + packaged, notes + failed
    return Prepared(candidates, explained("ag_gemm", m, n, k, context), notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    full, weights = random_operands(m, n, k, context)
    x = full[: m // context.world_size]
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)

    def launch(weight: torch.Tensor, *arguments: object) -> None:
        torch.ops.flux._ag_gemm(x, weight, None, out, False, *arguments)

    return every_tile((m, n, k), context, weights, launch)


def every_tile(
    shape: tuple[int, int, int],
    context: Context,
    weights: Sequence[T],
    launch: Callable[..., object],
    scales: str = "",
) -> Prepared:
    """Candidates of a sweep. launch: enqueues the kernel, given a weight and what follows `transpose_weight`.
    scales: of fp8 operands.
    """
    workspace, plan = kernel_plan("ag_gemm", *shape, context, scales)

    def run(name: str, config: int, role: str) -> Candidate:
        # The same launch as in flux.ag_gemm, except for the tile shape.
        chosen = replace(plan, config=config & 0xFF)

        def enter(weight: T) -> None:
            with all_gather.enter(workspace, chosen) as (address, epoch):
                launch(weight, address, config, 0, epoch, all_gather.chunk_rows(chosen, epoch), False)

        return Candidate(name, role, rotating(weights, enter))

    shapes = [run(name, config, "config") for name, config in packed_choices(plan, 1 if scales else 2)]
    return Prepared([run("plan", plan.choice, "flux"), *shapes], plan_dict(plan))
