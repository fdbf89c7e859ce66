"""flux.gemm_rs, ag_gemm and gemm_ar with scales, against scaled products before or behind collectives,
PyTorch's fused operators, and bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux.bench.cases import ag_gemm, gemm_ar, gemm_rs
from flux.bench.cases.common import Candidate, Context, Prepared, async_tp, collectives, explained
from flux.bench.cases.fp8.data import (
    Caller,
    Operands,
    Scaled,
    exact_case,
    first_wrong,
    judge,
    of_rank,
    random_operands,
)
from flux.bench.cases.fp8.gemm import by_library, canonical
from flux.bench.cases.fp8.libraries import OURS, Library, opened
from flux.bench.cases.graphs import other_all_reduces
from flux.bench.model import IN_16_BITS
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.ops._scales import Scales
from flux.ops.all_gather import torch_all_gather


@dataclass(frozen=True)
class Job:
    """What an operator does, cut into a product and a collective.

    x, wide_x: of this rank, in fp8 and in 16 bits. whole: x of the product. out: the operator's result.
    product: memory of the product. alone: the collective. before: gathers, and returns x of the product.
    behind: given the product.
    """

    x: Scaled
    wide_x: Tensor
    whole: Scaled
    out: Tensor
    product: Tensor
    alone: Callable[[], object]
    before: Callable[[], Scaled] | None = None
    behind: Callable[[Tensor], object] = lambda product: None


def _scattered(given: Operands, product: Tensor, context: Context) -> Job:
    scatter, group = reduce_scatter(), context.group
    shard, ours = (product[: len(product) // context.world_size].clone() for _ in range(2))

    def behind(full: Tensor) -> None:
        scatter(shard, full, group=group)

    return Job(given.x, given.wide_x, given.x, ours, product, lambda: behind(product), behind=behind)


def _gathered(given: Operands, product: Tensor, context: Context) -> Job:
    """Peers have it easier than flux: all ranks know the scale of a tensor, so they gather none."""
    collect, group, x = torch_all_gather(), context.group, given.x
    rows, shared = len(product) // context.world_size, x.scale.dim() == 1
    own = Scaled(x.q[:rows], x.scale if shared else x.scale[:rows].contiguous())
    everybody = torch.empty_like(x.q.view(torch.uint8))
    scales = x.scale if shared else torch.empty_like(x.scale, memory_format=torch.contiguous_format)

    def gather() -> Scaled:
        collect(everybody, own.q.view(torch.uint8), group=group)
        if not shared:
            collect(scales, own.scale, group=group)
        return Scaled(everybody.view(x.q.dtype), scales)

    return Job(own, given.wide_x[:rows], x, torch.empty_like(product), product, gather, before=gather)


def _reduced(given: Operands, product: Tensor, context: Context) -> Job:
    # Summed in place again and again: anything but zeros would soon overflow.
    out, zeros = torch.empty_like(product), torch.zeros_like(product)

    def behind(full: Tensor) -> None:
        dist.all_reduce(full, group=context.group)

    return Job(given.x, given.wide_x, given.x, out, product, lambda: behind(zeros), behind=behind)


_JOBS = {"gemm_rs": _scattered, "ag_gemm": _gathered, "gemm_ar": _reduced}


def _call(op: str, x: Scaled, weight: Scaled, **options: Any) -> Tensor:
    result: Tensor = getattr(flux, op)(x.q, weight.q, scale_x=x.scale, scale_w=weight.scale, **options)
    return result


def check(problem: Problem, context: Context) -> str:
    """Small integers with powers of two as scales, other ones on each rank, several calls in a row."""
    op, (m, n, k) = problem.op, problem.local(context.tp)
    rows = m // context.world_size
    own = slice(context.rank * rows, (context.rank + 1) * rows)
    sums = op != "ag_gemm"

    def one(seed: int) -> str:
        case = exact_case(problem, m if sums else rows, n, k, context, sums=sums, seed=seed)
        x, weight = of_rank(case, context.rank, context)
        want = case.total(context.device) if sums else case.gathered(context.rank, context.device)
        want = want[own] if op == "gemm_rs" else want
        return judge(
            case, context, lambda dtype: _call(op, x, weight, group=context.group, out_dtype=dtype), want
        )

    said = first_wrong(one)
    flux.check(context.group)
    return said


def prepare(problem: Problem, context: Context) -> Prepared:
    op, (m, n, k) = problem.op, problem.local(context.tp)
    comm, group = collectives(context), context.ranks
    given = random_operands(problem, m, n, k, context)
    job = _JOBS[op](given, torch.empty(m, n, dtype=context.dtype, device=context.device), context)
    caller = Caller(problem, context, graphs=op == "gemm_ar")
    by_flux, in_16_bits = getattr(flux, op), job.wide_x

    def fused(name: str, role: str, group: dist.ProcessGroup, **options: Any) -> Candidate:
        return caller(
            name,
            role,
            given.weights,
            lambda w: _call(op, job.x, w, group=group, out=job.out, **options),
        )

    candidates = [
        *context.ours(op, fused),
        caller(
            IN_16_BITS,
            "peer",
            given.wide_weights,
            lambda w: by_flux(in_16_bits, w, group=group, out=job.out),
        ),
        caller(comm, "comm", [None], lambda _: job.alone()),
    ]
    if problem.scales != "block":
        candidates.append(fused("flux, fast", "fast", group, accumulate="fast"))
    found, notes = opened(problem, m, n, k, context)
    for each in (OURS, *(library for library in found if library.role == "peer")):
        candidates.append(by_library(each, "gemm", job.whole, given.weights, job.product, caller))
        more, said = _unfused(each, job, given, caller, comm)
        candidates, notes = candidates + more, notes + said
    if context.cuda and problem.scales != "block" and op in _ASYNC_TP:
        name, scale = group.group_name, _scale(job.x.scale, -1, 1)
        peers, said = async_tp(
            given.weights, lambda w: _ASYNC_TP[op](job.x.q, scale, w, name, context.dtype), context
        )
        candidates, notes = candidates + peers, notes + said
    return Prepared(candidates, explained(op, m, n, k, context, problem.scales), notes)


def _unfused(
    each: Library, job: Job, given: Operands, caller: Caller, comm: str
) -> tuple[list[Candidate], list[str]]:
    """A library's product and the collective one after the other; all-reduces also of others than NCCL."""
    laid_out = each.x(job.whole)
    weights = [each.weight(weight) for weight in given.weights]

    def serial(weight: Any) -> None:
        x = each.x(job.before()) if job.before else laid_out
        job.behind(each.product(x, weight, job.product))

    def produce(weight: Any, partial: Tensor) -> None:
        result = each.product(laid_out, weight, partial)
        if result.data_ptr() != partial.data_ptr():
            partial.copy_(result)

    name = f"{comm}+{each.name}" if job.before else f"{each.name}+{comm}"
    candidates = [caller(name, "serial", weights, serial)]
    if caller.problem.op != "gemm_ar":
        return candidates, []
    m, n = job.product.shape
    peers, notes = other_all_reduces(m, n, f"{each.name}+", produce, weights, caller.context)
    return candidates + peers, notes


def _scale(scale: Tensor, *shape: int) -> Tensor:
    """As torch takes it: of all elements, or of rows or columns."""
    return scale[0] if scale.numel() == 1 else scale.reshape(shape)


def _torch_gemm_rs(x: Tensor, of_x: Tensor, w: Scaled, group: str, dtype: torch.dtype) -> object:
    fused, shape = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, [len(x), len(w.q)]
    return fused(
        x, w.q.t(), of_x, _scale(w.scale, 1, -1), "sum", 0, 0, group, shape, None, None, dtype, False
    )


def _torch_ag_gemm(x: Tensor, of_x: Tensor, w: Scaled, group: str, dtype: torch.dtype) -> object:
    fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
    of_w = _scale(w.scale, 1, -1)
    return fused(x, [w.q.t()], of_x, [of_w], 0, group, [None], [None], [dtype], [False])


_ASYNC_TP = {"gemm_rs": _torch_gemm_rs, "ag_gemm": _torch_ag_gemm}


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose; as in bf16."""
    op, shape = problem.op, problem.local(context.tp)
    given = random_operands(problem, *shape, context)
    job = _JOBS[op](given, torch.empty(*shape[:2], dtype=context.dtype, device=context.device), context)
    weights = [(weight.q, canonical(job.x, weight)) for weight in given.weights]
    kernel: Any = getattr(torch.ops.flux, f"_{op}")

    def launch(weight: tuple[Tensor, Scales], *arguments: Any) -> None:
        w, scales = weight
        of_call = {"scale_x": scales.x, "scale_w": scales.w, "fast": False}
        kernel(job.x.q, w, None, job.out, False, *arguments, **of_call)

    return _SWEEPS[op](shape, context, weights, launch, problem.scales)


_SWEEPS: dict[str, Callable[..., Prepared]] = {
    "gemm_rs": gemm_rs.every_tile,
    "ag_gemm": ag_gemm.every_tile,
    "gemm_ar": gemm_ar.every_tile,
}
