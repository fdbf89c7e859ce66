"""flux.gemm_rs, ag_gemm, gemm_ar and all_reduce, in 16 bits or more and in fp8: against products before or
behind collectives, PyTorch's fused operators, and those of packages.

Sums run from CUDA graphs, also with residual and RMSNorm, as a decoder layer has them: one call of flux,
against flux's operator and then torch's norm, and against the peers of the operator, behind which torch adds
and normalises. An all-reduce is one behind a GEMM that is not flux's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux import peers as packages
from flux.bench.cases.common import Context, Lineup, Step, collectives
from flux.bench.cases.libraries import NOTHING, OURS, Library, opened
from flux.bench.cases.operands import (
    Exact,
    Operand,
    Operands,
    Scaled,
    check_op,
    checked,
    gathering,
    moved,
    plain,
    random_operands,
    step_of,
    values,
)
from flux.bench.cases.peers import async_tp, other_all_reduces
from flux.bench.cases.plans import explained
from flux.bench.model import IN_16_BITS
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.ops.gemm_ar import rms_norm
from flux.testing import AgGemmCase, GemmRsCase
from flux.testing.compare import CALLS, agree, compare, first_wrong

_EPS = 1e-6


@dataclass(frozen=True)
class Job:
    """What an operator does, cut into a product and a collective.

    x: of this rank. whole: x of the product. out: the operator's result. product: memory of the product.
    alone: the collective. before: gathers, and returns x of the product. behind: given the product.
    """

    x: Operand
    whole: Operand
    out: Tensor
    product: Tensor
    alone: Callable[[], object]
    before: Callable[[], Operand] | None = None
    behind: Callable[[Tensor], object] = lambda product: None


def _scattered(given: Operands, product: Tensor, context: Context) -> Job:
    scatter, group = reduce_scatter, context.group
    shard, ours = (product[: len(product) // context.world_size].clone() for _ in range(2))

    def behind(full: Tensor) -> None:
        scatter(shard, full, group=group)

    return Job(given.x, given.x, ours, product, lambda: behind(product), behind=behind)


def _gathered(given: Operands, product: Tensor, context: Context) -> Job:
    """Peers have it easier than flux: all ranks know the scale of a tensor, so they gather none."""
    rows = len(product) // context.world_size
    own = moved(given.x, lambda every: every[:rows].contiguous())
    gather = gathering(own, context)
    return Job(own, given.x, torch.empty_like(product), product, gather, before=gather)


def _reduced(given: Operands, product: Tensor, context: Context) -> Job:
    # Summed in place again and again: anything but zeros would soon overflow.
    out, zeros = torch.empty_like(product), torch.zeros_like(product)

    def behind(full: Tensor) -> None:
        dist.all_reduce(full, group=context.group)

    return Job(given.x, given.x, out, product, lambda: behind(zeros), behind=behind)


_JOBS = {"gemm_rs": _scattered, "ag_gemm": _gathered, "gemm_ar": _reduced, "all_reduce": _reduced}
# Whose calls, of few rows, are replayed from CUDA graphs.
SUMS = ("gemm_ar", "all_reduce")


def job_of(problem: Problem, context: Context) -> tuple[Operands, Job]:
    """Random operands and the job with them. Those of a sum without a product are zeros, and its "weight" is
    what is summed.
    """
    m, n, _ = problem.local(context.tp)
    # Where it is summed in place again and again, anything but zeros would soon overflow.
    product = torch.zeros(m, n, dtype=context.dtype, device=context.device)
    if plain(problem.op) == "all_reduce":
        x = torch.zeros_like(product)
        given = Operands(x, [x], x, [x])
    else:
        given = random_operands(problem, context)
    return given, _JOBS[plain(problem.op)](given, product, context)


def by_flux(problem: Problem) -> Callable[..., Any]:
    if plain(problem.op) == "all_reduce":
        return lambda x, weight, **options: flux.all_reduce(x, **options)
    op: Callable[..., Any] = getattr(flux, plain(problem.op))
    return op


def check(problem: Problem, context: Context) -> str:
    """On integers that carry each rank's mark, several calls in a row; with ag_gemm all_gather, too. Sums
    before a norm must be exact, norms agree with torch's.
    """
    if problem.op.endswith("_norm"):
        return checked(problem, context, partial(_normalised, problem, context))
    said = check_op(problem, context, by_flux(problem), group=context.group)
    if problem.op != "ag_gemm" or problem.scales:
        return said
    case = AgGemmCase(*problem.local(context.tp), context.world_size, context.dtype, seed=CALLS)
    x = case.inputs(context.rank, context.device)[0]
    gathered = compare(flux.all_gather(x, group=context.group), case.gathered(context.device))
    flux.check(group=context.group)
    return first_wrong([said, gathered])


def _normalised(problem: Problem, context: Context, exact: Exact) -> str:
    want = exact.want
    weight = torch.linspace(0.5, 1.5, want.shape[1], device=context.device).to(context.dtype)
    residual = GemmRsCase(len(want), want.shape[1], 1, 1, context.dtype).residual(context.device)
    options = {"residual": residual, "norm_weight": weight, "eps": _EPS}
    norm, total = by_flux(problem)(exact.x, exact.weight, group=context.group, **options)
    want = want + residual
    said = compare(total, want)
    return said if said != "exact" else agree({"norm": norm}, {"norm": rms_norm(want, weight, _EPS)})


def prepare(problem: Problem, context: Context) -> Lineup:
    op, (m, n, k), group = plain(problem.op), problem.local(context.tp), context.ranks
    given, job = job_of(problem, context)
    multiplies, norm = op != "all_reduce", None
    options: dict[str, Any] = {"out": job.out}
    if problem.op != op:
        norm = packages.Norm(torch.zeros_like(job.out), torch.ones_like(job.out[0]), _EPS)
        options = {"residual": norm.residual, "norm_weight": norm.weight, "eps": norm.eps}
    lineup, planned = Lineup(context, given.weights, graphs=op in SUMS), problem.op if multiplies else op
    lineup.plan = explained(planned, m, n, k if multiplies else 0, context, problem.scales or None)
    ours = partial(step_of, by_flux(problem), job.x)
    lineup.ours(planned, lambda g: ours(group=g, **options))
    if norm is not None:
        summed, normalise = ours(group=group, residual=norm.residual), norm.of
        lineup.add(f"flux.{op}+norm", "peer", lambda weight: normalise(summed(weight)))
    elif multiplies:
        lineup.add_call(collectives(context), "comm", job.alone)
    for each in opened(problem, lineup) if multiplies else [NOTHING]:
        if each.role == "peer":
            unfused(lineup, each, job, norm)
    if multiplies and norm is None:
        _others(problem, lineup, given, job, ours)
    return lineup


def _others(problem: Problem, lineup: Lineup, given: Operands, job: Job, ours: Callable[..., Step]) -> None:
    """Fused operators of torch and of packages; flux's with other operands or sums, and its parts."""
    context, op, scales = lineup.context, problem.op, problem.scales
    options = {"group": context.ranks, "out": job.out}
    if context.cuda and op == "gemm_rs":
        lineup.add("flux, int8", "int8", ours(wire="int8", **options))
    if isinstance(job.x, Scaled):
        wide = given.wide_x[: len(job.x.q)]
        lineup.add(IN_16_BITS, "peer", step_of(by_flux(problem), wide, **options), given.wide_weights)
        if scales != "block":
            lineup.add("flux, fast", "fast", ours(accumulate="fast", **options))
        unfused(lineup, OURS, job)
    else:
        _own_parts(op, lineup, job)
    if context.cuda and scales != "block" and op in ASYNC_TP:
        name = context.ranks.group_name
        async_tp(lineup, partial(ASYNC_TP[op], job.x, group=name, dtype=context.dtype))


def _own_parts(op: str, lineup: Lineup, job: Job) -> None:
    x, whole, product, group = job.x, job.whole, job.product, lineup.context.ranks
    if op == "gemm_ar":
        summed = torch.zeros_like(product)
        lineup.add_call("flux.all_reduce", "comm", lambda: flux.all_reduce(summed, group=group, out=job.out))
    if lineup.context.cuda:
        lineup.add("flux.gemm", "gemm", step_of(flux.gemm, whole, out=product))
    if lineup.context.cuda and op == "ag_gemm":
        out = torch.empty_like(values(whole))
        lineup.add_call("flux.all_gather", "comm", lambda: flux.all_gather(values(x), group=group, out=out))


def unfused(lineup: Lineup, each: Library, job: Job, norm: packages.Norm | None = None) -> None:
    """A library's product, alone, and with the collective behind or before it; all-reduces also of others.

    norm: what is done with the sum.
    """
    laid_out, usual, product = each.x(job.whole), lineup.weights, job.product
    comm, multiplies = collectives(lineup.context), each is not NOTHING

    def serial(weight: Any) -> None:
        x = each.x(job.before()) if job.before else laid_out
        job.behind(each.product(x, weight, product))
        _ = norm and norm.behind(product)

    def produce(weight: Any, partial: Tensor) -> None:
        result = each.product(laid_out, weight, partial)
        if result.data_ptr() != partial.data_ptr():
            partial.copy_(result)

    if multiplies:
        each.alone(lineup, "gemm", job.whole, product)
    lineup = replace(lineup, weights=[each.weight(weight) for weight in usual])
    parts = [comm, each.name] if job.before else [each.name, comm]
    lineup.add("+".join(filter(None, parts)), "serial" if multiplies else "peer", serial)
    if lineup.graphs:  # it sums to all ranks
        other_all_reduces(
            lineup, len(product), product.shape[1], f"{each.name}+" if multiplies else "", produce, norm
        )


def _scale(scale: Tensor, *shape: int) -> Tensor:
    """As torch takes it: of all elements, or of rows or columns."""
    return scale[0] if scale.numel() == 1 else scale.reshape(shape)


def _torch_gemm_rs(x: Operand, w: Any, group: str, dtype: torch.dtype) -> Any:
    of = torch.ops.symm_mem
    if isinstance(x, Tensor):
        return of.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group)
    scales, shape = (_scale(x.scale, -1, 1), _scale(w.scale, 1, -1)), [len(x.q), len(w.q)]
    return of.fused_scaled_matmul_reduce_scatter(
        x.q, w.q.t(), *scales, "sum", 0, 0, group, shape, None, None, dtype, False
    )


def _torch_ag_gemm(x: Operand, w: Any, group: str, dtype: torch.dtype) -> Any:
    of = torch.ops.symm_mem
    if isinstance(x, Tensor):
        return of.fused_all_gather_matmul(x, [w.t()], 0, group, return_A=False)
    of_x, of_w = _scale(x.scale, -1, 1), _scale(w.scale, 1, -1)
    return of.fused_all_gather_scaled_matmul(
        x.q, [w.q.t()], of_x, [of_w], 0, group, [None], [None], [dtype], [False]
    )


ASYNC_TP = {"gemm_rs": _torch_gemm_rs, "ag_gemm": _torch_ag_gemm}
