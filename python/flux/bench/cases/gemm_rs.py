"""GEMM+ReduceScatter: flux against cuBLAS then NCCL, and against PyTorch's async tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

import flux
from flux import _native
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    async_tp,
    collectives,
    explained,
    kernel_plan,
    marked,
    of_packages,
    packed_choices,
    plan_dict,
    random_operands,
    rotating,
)
from flux.bench.cases.gemm import library
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.ops.plan_gemm import gemm_rs_room

T = TypeVar("T")


def check(problem: Problem, context: Context) -> str:
    """flux.gemm_rs on integers that carry each rank's mark, several calls in a row."""
    return marked(problem, context, lambda x, w: flux.gemm_rs(x, w, group=context.group), False)


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    group = context.ranks
    x, weights = random_operands(m, n, k, context)
    rows = m // context.world_size
    full = torch.empty(m, n, dtype=context.dtype, device=context.device)
    shard, ours = (torch.empty(rows, n, dtype=context.dtype, device=context.device) for _ in range(2))
    own_gemm = torch.empty_like(full)
    scatter = reduce_scatter()

    def serial(weight: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=full)
        scatter(shard, full, group=group)

    blas, comm = library(context), collectives(context)
    candidates = [
        *context.ours(
            "gemm_rs",
            lambda name, role, g: Candidate(
                name, role, rotating(weights, lambda w: flux.gemm_rs(x, w, group=g, out=ours))
            ),
        ),
        Candidate(blas, "gemm", rotating(weights, lambda w: torch.mm(x, w.t(), out=full))),
        Candidate(comm, "comm", lambda: scatter(shard, full, group=group)),
        Candidate(f"{blas}+{comm}", "serial", rotating(weights, serial)),
    ]
    notes: list[str] = []
    if context.cuda:
        call = rotating(weights, lambda w: flux.gemm(x, w, out=own_gemm))
        candidates.append(Candidate("flux.gemm", "gemm", call))
        name, symm_mem = group.group_name, torch.ops.symm_mem
        peers, notes = async_tp(
            weights, lambda w: symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name), context
        )
        candidates += peers
    packaged, failed = of_packages(
        "gemm_rs", (m, n, k), x, weights, lambda call: marked(problem, context, call, False), context
    )
    candidates, notes = candidates + packaged, notes + failed
    return Prepared(candidates, explained("gemm_rs", m, n, k, context), notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    x, weights = random_operands(m, n, k, context)
    out = torch.empty(m // context.world_size, n, dtype=context.dtype, device=context.device)

    def launch(weight: torch.Tensor, *arguments: object) -> None:
        torch.ops.flux._gemm_rs(x, weight, None, out, False, *arguments)

    return every_tile((m, n, k), context, weights, launch)


def every_tile(
    shape: tuple[int, int, int],
    context: Context,
    weights: Sequence[T],
    launch: Callable[..., object],
    scales: str = "",
) -> Prepared:
    """Candidates of a sweep, in one workspace with room for the largest, so that none pays for growing it.

    launch: enqueues the kernel, given a weight and what follows `transpose_weight`. scales: of fp8 operands.
    """
    m, n, k = shape
    workspace, plan = kernel_plan("gemm_rs", m, n, k, context, scales)
    operand_bytes = 1 if scales else 2
    configs = _native.core.tile_configs(operand_bytes)
    rooms = [gemm_rs_room(m, n, context.world_size, c.id, context.dtype) for c in configs]
    signal_bytes, slot_bytes = max(r[0] for r in rooms), max(r[1] for r in rooms)

    def run(name: str, config: int, role: str) -> Candidate:
        # The same launch as in flux.gemm_rs, except for the tile shape.
        chosen = replace(plan, config=config, signal_bytes=signal_bytes, slot_bytes=slot_bytes)

        def enter(weight: T) -> None:
            with workspace.enter(chosen) as (address, _):
                launch(weight, address, config, 0, 0, 0, None)

        return Candidate(name, role, rotating(weights, enter))

    shapes = [run(name, config, "config") for name, config in packed_choices(plan, operand_bytes)]
    return Prepared([run("plan", plan.config, "flux"), *shapes], plan_dict(plan))
