"""Plain GEMM on the local shapes of the collective ops: flux.gemm against cuBLAS (CPU: against torch.mm)."""

from __future__ import annotations

from collections.abc import Callable

import torch

import flux
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    compare,
    of_packages,
    packed_choices,
    plan_dict,
    random_operands,
    rotating,
)
from flux.bench.suites import Problem
from flux.testing import GemmRsCase


def library(context: Context) -> str:
    """The library of torch's GEMMs on this device."""
    return "cuBLAS" if context.cuda else "torch"


def check(problem: Problem, context: Context) -> str:
    """flux.gemm on marked integers; a GEMM is a GEMM+ReduceScatter of one rank."""
    m, n, k = problem.local(context.tp)
    return _exact(flux.gemm, m, n, k, context)


def _exact(gemm: Callable[..., torch.Tensor], m: int, n: int, k: int, context: Context) -> str:
    case = GemmRsCase(m, n, k, 1, context.dtype, seed=context.rank)
    x, weight, _ = case.inputs(0, context.device)
    return compare(gemm(x, weight), case.expected(0, context.device))


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    x, weights = random_operands(m, n, k, context)
    ours, theirs = (torch.empty(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    candidates = [
        Candidate("flux", "flux", rotating(weights, lambda w: flux.gemm(x, w, out=ours))),
        Candidate(library(context), "peer", rotating(weights, lambda w: torch.mm(x, w.t(), out=theirs))),
    ]
    peers, notes = of_packages(
        "gemm", (m, n, k), x, weights, lambda gemm: _exact(gemm, m, n, k, context), context
    )
    plan = plan_dict(flux.explain("gemm", m, n, k, dtype=context.dtype)) if context.cuda else None
    return Prepared(candidates + peers, plan, notes)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    x, weights = random_operands(m, n, k, context)
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)
    plan = flux.explain("gemm", m, n, k, dtype=context.dtype)

    def run(name: str, config: int, role: str) -> Candidate:
        call = rotating(weights, lambda w: torch.ops.flux._gemm(x, w, None, out, False, config, 0))
        return Candidate(name, role, call)

    configs = [run(name, config, "config") for name, config in packed_choices(plan)]
    return Prepared([run("plan", -1, "flux"), *configs], plan_dict(plan))
