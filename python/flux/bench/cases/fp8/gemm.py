"""flux.gemm with scales, against torch's scaled product and other packages', and against bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flux
from flux.bench.cases.common import (
    DECODE_M,
    Candidate,
    Context,
    Prepared,
    explained,
    packed_choices,
    plan_dict,
)
from flux.bench.cases.fp8.data import (
    Caller,
    Scaled,
    exact_case,
    flux_product,
    judge,
    of_rank,
    random_operands,
)
from flux.bench.cases.fp8.libraries import Library, opened
from flux.bench.cases.gemm import library
from flux.bench.model import FP8, IN_16_BITS
from flux.bench.suites import Problem
from flux.ops._scales import Scales


def check(problem: Problem, context: Context) -> str:
    """Small integers with powers of two as scales."""
    case = exact_case(problem, *problem.local(context.tp), context)
    x, weight = of_rank(case, context.rank, context)
    want = case.product(context.rank, context.rank, context.device)
    return judge(case, context, lambda dtype: flux_product(x, weight, out_dtype=dtype), want)


def _caller(problem: Problem, context: Context) -> Caller:
    """With graphs where there are few rows: a GEMM may take less time than its launch costs the host."""
    return Caller(problem, context, graphs=problem.m <= DECODE_M)


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    given, caller = random_operands(problem, m, n, k, context), _caller(problem, context)
    ours, theirs = (torch.empty(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    x, wide = given.x, given.wide_x
    candidates = [
        caller("flux", "flux", given.weights, lambda w: flux_product(x, w, out=ours)),
        caller(
            f"{library(context)}, bf16",
            "peer",
            given.wide_weights,
            lambda w: torch.mm(wide, w.t(), out=theirs),
        ),
    ]
    if problem.scales != "block":
        fast = {"out": ours, "accumulate": "fast"}
        candidates.append(caller("flux, fast", "fast", given.weights, lambda w: flux_product(x, w, **fast)))
    found, notes = opened(problem, m, n, k, context)
    candidates += [by_library(each, each.role, x, given.weights, theirs, caller) for each in found]
    candidates.append(
        caller(IN_16_BITS, "peer", given.wide_weights, lambda w: flux.gemm(wide, w, out=theirs))
    )
    return Prepared(candidates, explained("gemm", m, n, k, context, problem.scales), notes)


def by_library(
    each: Library, role: str, x: Scaled, weights: Sequence[Scaled], out: torch.Tensor, caller: Caller
) -> Candidate:
    """A library's product of operands that it has laid out."""
    laid_out = each.x(x)
    return caller(
        each.name, role, [each.weight(weight) for weight in weights], lambda w: each.product(laid_out, w, out)
    )


def canonical(x: Scaled, weight: Scaled) -> Scales:
    """Scales as the low-level operators take them."""
    return Scales(x.scale, weight.scale, torch.bfloat16, "promoted").canonical(*weight.q.shape)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    given, caller = random_operands(problem, m, n, k, context), _caller(problem, context)
    x = given.x.q
    weights = [(weight.q, canonical(given.x, weight)) for weight in given.weights]
    out = torch.empty(m, n, dtype=context.dtype, device=context.device)
    # A plan that may leave sums in the tensor cores considers tiles that promote them, too.
    how = "promoted" if problem.scales == "block" else "fast"
    of_all = {"dtype": getattr(torch, FP8), "scales": problem.scales}
    plan = flux.explain("gemm", m, n, k, accumulate=how, **of_all)

    def run(name: str, config: int, role: str) -> Candidate:
        def launch(weight: tuple[torch.Tensor, Scales]) -> None:
            w, scales = weight
            of_call = {"scale_x": scales.x, "scale_w": scales.w, "fast": " fast" in name}
            torch.ops.flux._gemm(x, w, None, out, False, config, 0, **of_call)

        return caller(name, role, weights, launch)

    configs = [run(name, config, "config") for name, config in packed_choices(plan, operand_bytes=1)]
    chosen = plan_dict(flux.explain("gemm", m, n, k, **of_all))
    chosen["candidates"] = plan_dict(plan)["candidates"]
    return Prepared([run("plan", -1, "flux"), *configs], chosen)
