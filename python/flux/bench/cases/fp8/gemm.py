"""flux.gemm with scales, against torch's scaled product and other packages', and against bf16."""

from __future__ import annotations

import torch

import flux
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    explained,
    packed_choices,
    plan_dict,
)
from flux.bench.cases.fp8.data import (
    Caller,
    Operands,
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


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    given, caller = random_operands(problem, m, n, k, context), Caller(problem, context, few=True)
    ours, theirs = (torch.empty(m, n, dtype=context.dtype, device=context.device) for _ in range(2))
    x, wide = given.x, given.wide_x
    candidates = [
        caller("flux", "flux", given.weights, lambda w: flux_product(x, w, out=ours)),
        *in_16_bits(given, theirs, "peer", caller, context),
        *fast(given, ours, caller),
    ]
    found, notes = opened(problem, m, n, k, context)
    candidates += [by_library(each, each.role, given, theirs, caller) for each in found]
    candidates.append(
        caller(IN_16_BITS, "peer", given.wide_weights, lambda w: flux.gemm(wide, w, out=theirs))
    )
    return Prepared(candidates, explained("gemm", m, n, k, context, problem.scales), notes)


def in_16_bits(
    given: Operands, out: torch.Tensor, role: str, caller: Caller, context: Context
) -> list[Candidate]:
    """The library's product of the same values in 16 bits."""
    x, name = given.wide_x, f"{library(context)}, bf16"
    return [caller(name, role, given.wide_weights, lambda w: torch.mm(x, w.t(), out=out))]


def fast(given: Operands, out: torch.Tensor, caller: Caller) -> list[Candidate]:
    """flux.gemm with sums that stay in the tensor cores, for scales that allow it."""
    if caller.problem.scales == "block":
        return []
    x = given.x
    return [
        caller("flux, fast", "fast", given.weights, lambda w: flux_product(x, w, out=out, accumulate="fast"))
    ]


def by_library(
    each: Library, role: str, given: Operands, out: torch.Tensor, caller: Caller, name: str = ""
) -> Candidate:
    """A library's product of operands that it has laid out."""
    x, weights = each.x(given.x), [each.weight(weight) for weight in given.weights]
    return caller(name or each.name, role, weights, lambda w: each.product(x, w, out))


def canonical(x: Scaled, weight: Scaled) -> Scales:
    """Scales as the low-level operators take them."""
    return Scales(x.scale, weight.scale, torch.bfloat16, "promoted").canonical(*weight.q.shape)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose."""
    m, n, k = problem.local(context.tp)
    given, caller = random_operands(problem, m, n, k, context), Caller(problem, context, few=True)
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
