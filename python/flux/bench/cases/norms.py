"""gemm_ar and all_reduce with residual and RMSNorm, as a decoder layer has them, from CUDA graphs.

One call of flux, against flux's operator and then torch's norm, and against the peers of the operator, behind
which torch adds and normalises. all_reduce: as behind a GEMM that is not flux's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux import peers as packages
from flux.bench.cases.all_reduce import K
from flux.bench.cases.common import CALLS, Context, Lineup, agree, collectives, compare
from flux.bench.cases.libraries import opened
from flux.bench.cases.operands import random_operands
from flux.bench.cases.peers import other_all_reduces
from flux.bench.cases.plans import explained
from flux.bench.cases.ranks import job_of, unfused
from flux.bench.model import passed
from flux.bench.suites import Problem
from flux.ops import gemm
from flux.ops.gemm_ar import rms_norm
from flux.testing import GemmRsCase

_EPS = 1e-6


def _call(op: str, x: Tensor, weight: Tensor, **options: Any) -> Any:
    return flux.all_reduce(x, **options) if op == "all_reduce" else flux.gemm_ar(x, weight, **options)


def check(problem: Problem, context: Context) -> str:
    """Integers that carry each rank's mark: sums must be exact, norms agree with torch's."""
    m, n, k = problem.local(context.tp)
    op = problem.op.removesuffix("_norm")
    norm_weight = torch.linspace(0.5, 1.5, n, device=context.device).to(context.dtype)
    rest = {"group": context.group, "norm_weight": norm_weight, "eps": _EPS}
    said = "exact"
    for seed in range(CALLS):
        size = K if op == "all_reduce" else k
        case = GemmRsCase(m, n, size, context.world_size, context.dtype, seed=seed)
        x, weight, _ = case.inputs(context.rank, context.device)
        residual = case.residual(context.device)
        given = gemm.reference(x, weight) if op == "all_reduce" else x
        norm, total = _call(op, given, weight, residual=residual, **rest)
        expected = case.expected_sum(context.device) + residual
        said = compare(total, expected)
        if said == "exact":
            said = agree({"norm": norm}, {"norm": rms_norm(expected, norm_weight, _EPS)})
        if not passed(said):
            break
    flux.check(context.group)
    return said


def prepare(problem: Problem, context: Context) -> Lineup:
    m, n, k = problem.local(context.tp)
    group, op = context.ranks, problem.op.removesuffix("_norm")
    planned = problem.op if op == "gemm_ar" else op
    # Some are summed in place repeatedly: anything but zeros would soon overflow.
    product, residual = (torch.zeros(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    norm_weight = torch.ones(n, dtype=context.dtype, device=context.device)
    norm = packages.Norm(residual, norm_weight, _EPS)
    rest = {"residual": residual, "norm_weight": norm_weight, "eps": _EPS}
    given = random_operands(problem, context) if op == "gemm_ar" else None
    x = given.wide_x if given else product.clone()
    lineup = Lineup(context, given.weights if given else [x], graphs=True)
    lineup.plan = explained(planned, m, n, k if given else 0, context)
    lineup.ours(planned, lambda g: lambda w: _call(op, x, w, group=g, **rest))
    lineup.add(f"flux.{op}+norm", "peer", lambda w: norm.of(_call(op, x, w, group=group, residual=residual)))
    if given:
        job = job_of(op, given, problem, context)
        for each in opened(problem, lineup):
            each.alone(lineup, "gemm", x, job.product)
            unfused(lineup, each, job, norm)
        return lineup

    def by_torch() -> None:
        dist.all_reduce(product, group=group)
        norm.behind(product)

    lineup.add_call(collectives(context), "peer", by_torch)
    other_all_reduces(lineup, m, n, norm=norm)
    return lineup
