"""GEMM+AllReduce with residual and RMSNorm, as a decoder layer has them, from CUDA graphs.

One call of flux, against flux.gemm_ar and then torch's norm, and against the peers of gemm_ar, behind which
torch adds and normalises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import (
    CALLS,
    Candidate,
    Context,
    Prepared,
    agree,
    compare,
    explained,
    random_operands,
)
from flux.bench.cases.gemm import library
from flux.bench.cases.gemm_ar import unfused
from flux.bench.cases.graphs import Step, graphed
from flux.bench.model import passed
from flux.bench.suites import Problem
from flux.ops.gemm_ar import rms_norm
from flux.testing import GemmRsCase

_EPS = 1e-6


def check(problem: Problem, context: Context) -> str:
    """flux.gemm_ar on integers that carry each rank's mark: sums must be exact, norms agree with torch's."""
    m, n, k = problem.local(context.tp)
    return check_sums(flux.gemm_ar, m, n, k, context)


def check_sums(call: Callable[..., tuple[Tensor, Tensor]], m: int, n: int, k: int, context: Context) -> str:
    """Compares the norm and the sum that `call` returns for x [m, k] and a weight [n, k] of each rank."""
    norm_weight = torch.linspace(0.5, 1.5, n, device=context.device).to(context.dtype)
    said = "exact"
    for seed in range(CALLS):
        case = GemmRsCase(m, n, k, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        residual = case.residual(context.device)
        norm, total = call(
            x, weight, group=context.group, residual=residual, norm_weight=norm_weight, eps=_EPS
        )
        expected = case.expected_sum(context.device) + residual
        said = compare(total, expected)
        if said == "exact":
            said = agree({"norm": norm}, {"norm": rms_norm(expected, norm_weight, _EPS)})
        if not passed(said):
            break
    flux.check(context.group)
    return said


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    group = context.group
    assert group is not None
    x, weights = random_operands(m, n, k, context)
    product = torch.empty(m, n, dtype=context.dtype, device=context.device)
    residual = torch.zeros_like(product)
    norm_weight = torch.ones(n, dtype=context.dtype, device=context.device)

    def candidate(name: str, role: str, step: Step) -> Candidate:
        return graphed(name, role, step, weights, context)

    def normalised(total: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(total, (n,), norm_weight, _EPS)

    def added_and_normalised(total: torch.Tensor) -> torch.Tensor:
        return normalised(total + residual)

    candidates = [
        candidate(
            "flux",
            "flux",
            lambda w: flux.gemm_ar(x, w, group=group, residual=residual, norm_weight=norm_weight, eps=_EPS),
        ),
        candidate(library(context), "gemm", lambda w: torch.mm(x, w.t(), out=product)),
        candidate(
            "flux.gemm_ar+norm",
            "peer",
            lambda w: normalised(flux.gemm_ar(x, w, group=group, residual=residual)),
        ),
    ]
    others, notes = unfused(x, weights, product, context, added_and_normalised)
    return Prepared(candidates + others, explained("gemm_ar", m, n, k, context), notes)
