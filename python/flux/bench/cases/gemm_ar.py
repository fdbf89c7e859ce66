"""GEMM+AllReduce from CUDA graphs: flux against cuBLAS then NCCL, and then PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

import flux
from flux import _native
from flux import peers as packages
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    collectives,
    explained,
    kernel_plan,
    marked,
    packed_choices,
    plan_dict,
    random_operands,
)
from flux.bench.cases.gemm import library
from flux.bench.cases.graphs import Step, graphed, other_all_reduces
from flux.bench.suites import Problem

T = TypeVar("T")


def check(problem: Problem, context: Context) -> str:
    """flux.gemm_ar on integers that carry each rank's mark, several calls in a row."""
    return marked(problem, context, lambda x, w: flux.gemm_ar(x, w, group=context.group), True)


def unfused(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    product: torch.Tensor,
    context: Context,
    norm: packages.Norm | None = None,
) -> tuple[list[Candidate], list[str]]:
    """The library's GEMM and then an all-reduce: NCCL's, to `product`, packages', those of symmetric memory.

    With notes on those that cannot run. `norm`: as of other_all_reduces.
    """
    m, n = product.shape

    def serial(weight: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=product)
        dist.all_reduce(product, group=context.group)
        if norm:
            norm.behind(product)

    blas = library(context)
    candidates = [graphed(f"{blas}+{collectives(context)}", "serial", serial, weights, context)]
    peers, notes = other_all_reduces(
        m, n, f"{blas}+", lambda w, partial: torch.mm(x, w.t(), out=partial), weights, context, norm
    )
    return candidates + peers, notes


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    group = context.ranks
    x, weights = random_operands(m, n, k, context)
    ours, theirs, own_gemm = (torch.empty(m, n, dtype=context.dtype, device=context.device) for _ in range(3))
    # Summed in place repeatedly: anything but zeros would soon overflow.
    summed = torch.zeros_like(ours)

    def candidate(name: str, role: str, step: Step) -> Candidate:
        return graphed(name, role, step, weights, context)

    candidates = [
        *context.ours(
            "gemm_ar",
            lambda name, role, g: candidate(name, role, lambda w: flux.gemm_ar(x, w, group=g, out=ours)),
        ),
        candidate(library(context), "gemm", lambda w: torch.mm(x, w.t(), out=theirs)),
        candidate(collectives(context), "comm", lambda _: dist.all_reduce(summed, group=group)),
        candidate("flux.all_reduce", "comm", lambda _: flux.all_reduce(summed, group=group, out=ours)),
    ]
    if context.cuda:
        candidates.append(candidate("flux.gemm", "gemm", lambda w: flux.gemm(x, w, out=own_gemm)))
    others, notes = unfused(x, weights, theirs, context)
    return Prepared(candidates + others, explained("gemm_ar", m, n, k, context), notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and with the other way to sum, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    x, weights = random_operands(m, n, k, context)
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)

    def launch(weight: torch.Tensor, *arguments: object) -> None:
        torch.ops.flux._gemm_ar(x, weight, None, out, False, *arguments)

    return every_tile((m, n, k), context, weights, launch)


def every_tile(
    shape: tuple[int, int, int],
    context: Context,
    weights: Sequence[T],
    launch: Callable[..., object],
    scales: str = "",
) -> Prepared:
    """Candidates of a sweep, in one workspace with room for both ways to sum: none pays for growing it.

    launch: enqueues the kernel, given a weight and what follows `transpose_weight`. scales: of fp8 operands.
    """
    m, n, _ = shape
    workspace, plan = kernel_plan("gemm_ar", *shape, context, scales)
    core = _native.core
    modes = (core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT)
    room = max(core.exchange(m, n, context.world_size, mode).bytes for mode in modes)
    chosen = replace(plan, exchange_bytes=room)

    def run(name: str, role: str, config: int, mode: int) -> Candidate:
        def enter(weight: T) -> None:
            # The same launch as in flux.gemm_ar, except for config and mode.
            with workspace.enter(chosen) as (address, _):
                launch(weight, address, config, 0, mode, None, None, 0.0, None)

        return graphed(name, role, enter, weights, context)

    other = run(f"plan {'two-shot' if plan.mode == 0 else 'one-shot'}", "config", plan.choice, 1 - plan.mode)
    choices = packed_choices(plan, 1 if scales else 2)
    shapes = [run(name, "config", config, plan.mode) for name, config in choices]
    return Prepared([run("plan", "flux", plan.choice, plan.mode), *shapes, other], plan_dict(plan))
