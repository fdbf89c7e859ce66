"""Plain GEMM on the local shapes of the collective ops: flux.gemm against torch's library, with fp8 operands
also against other packages and against bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import Context, Lineup, library
from flux.bench.cases.libraries import opened
from flux.bench.cases.operands import DECODE_M, Operands, check_op, random_operands, step_of
from flux.bench.cases.plans import explained, plan_dict
from flux.bench.model import IN_16_BITS
from flux.bench.suites import Problem


def check(problem: Problem, context: Context) -> str:
    """flux.gemm on integers, in fp8 with powers of two as scales."""
    return check_op(problem, context, flux.gemm)


def _begun(problem: Problem, context: Context) -> tuple[Operands, Lineup]:
    """With graphs for few rows of fp8: a GEMM may take less time than its launch costs the host."""
    given = random_operands(problem, context)
    return given, Lineup(context, given.weights, graphs=bool(problem.scales) and problem.m <= DECODE_M)


def _add_others(problem: Problem, given: Operands, lineup: Lineup) -> None:
    """The libraries, and with fp8 operands also products in 16 bits."""
    context, (m, n, _) = lineup.context, problem.local(lineup.context.tp)
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)
    for each in opened(problem, lineup):
        each.alone(lineup, each.role, given.x, out)
    if isinstance(given.x, Tensor):
        return
    wide, weights = given.wide_x, given.wide_weights
    lineup.add(f"{library(context)}, bf16", "peer", lambda w: torch.mm(wide, w.t(), out=out), weights)
    lineup.add(IN_16_BITS, "peer", step_of(flux.gemm, wide, out=out), weights)


def prepare(problem: Problem, context: Context) -> Lineup:
    m, n, k = problem.local(context.tp)
    given, lineup = _begun(problem, context)
    ours = torch.empty(m, n, dtype=context.dtype, device=context.device)
    lineup.add("flux", "flux", step_of(flux.gemm, given.x, out=ours))
    _add_others(problem, given, lineup)
    if isinstance(given.x, Tensor):
        if context.cuda:
            lineup.plan = plan_dict(flux.explain("gemm", m, n, k, dtype=context.dtype))
        return lineup
    if problem.scales != "block":
        lineup.add("flux, fast", "fast", step_of(flux.gemm, given.x, out=ours, accumulate="fast"))
    lineup.plan = explained("gemm", m, n, k, context, problem.scales)
    return lineup
