"""flux.gemm_rs, ag_gemm and gemm_ar, in 16 bits or more and in fp8: against products before or behind
collectives, PyTorch's fused operators, and those of packages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flux
from flux import _native
from flux import peers as packages
from flux.bench.cases.common import CALLS, Context, Lineup, collectives, compare, first_wrong, marked
from flux.bench.cases.libraries import OURS, Library, opened
from flux.bench.cases.operands import (
    Operand,
    Operands,
    Scaled,
    gathering,
    moved,
    random_operands,
    scaled_marked,
    step_of,
    values,
)
from flux.bench.cases.peers import async_tp, of_packages, other_all_reduces
from flux.bench.cases.plans import explained, kernel_plan, packed_choices, plan_dict
from flux.bench.model import IN_16_BITS
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.ops import all_gather
from flux.ops._scales import Scales
from flux.ops.plan_gemm import gemm_rs_room
from flux.testing import AgGemmCase


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
    scatter, group = reduce_scatter(), context.group
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


_JOBS = {"gemm_rs": _scattered, "ag_gemm": _gathered, "gemm_ar": _reduced}


def job_of(op: str, given: Operands, problem: Problem, context: Context) -> Job:
    m, n, _ = problem.local(context.tp)
    return _JOBS[op](given, torch.empty(m, n, dtype=context.dtype, device=context.device), context)


def check(problem: Problem, context: Context) -> str:
    """On integers that carry each rank's mark, several calls in a row; with ag_gemm all_gather, too."""
    op = getattr(flux, problem.op)
    if problem.scales:
        return scaled_marked(problem, context, op)
    said = marked(problem, context, lambda x, w: op(x, w, group=context.group))
    if problem.op != "ag_gemm":
        return said
    case = AgGemmCase(*problem.local(context.tp), context.world_size, context.dtype, seed=CALLS)
    x = case.inputs(context.rank, context.device)[0]
    gathered = compare(flux.all_gather(x, group=context.group), case.gathered(context.device))
    flux.check(context.group)
    return first_wrong([said, gathered])


def prepare(problem: Problem, context: Context) -> Lineup:
    op, (m, n, k), scales = problem.op, problem.local(context.tp), problem.scales
    given, group = random_operands(problem, context), context.ranks
    job, by_flux = job_of(op, given, problem, context), getattr(flux, op)
    lineup = Lineup(context, given.weights, graphs=op == "gemm_ar")
    lineup.plan = explained(op, m, n, k, context, scales or None)
    lineup.ours(op, lambda g: step_of(by_flux, job.x, group=g, out=job.out))
    if context.cuda and op == "gemm_rs":
        lineup.add("flux, int8", "int8", step_of(by_flux, job.x, group=group, out=job.out, wire="int8"))
    lineup.add_call(collectives(context), "comm", job.alone)
    for each in opened(problem, lineup):
        if each.role == "peer":
            each.alone(lineup, "gemm", job.whole, job.product)
            unfused(lineup, each, job)
    if not isinstance(job.x, Scaled):
        _own_parts(op, lineup, job)
        of_packages(lineup, op, (m, n, k), job.x, partial(marked, problem, context))
    else:
        wide = given.wide_x[: len(job.x.q)]
        in_16_bits = step_of(by_flux, wide, group=group, out=job.out)
        lineup.add(IN_16_BITS, "peer", in_16_bits, given.wide_weights)
        if scales != "block":
            fast = step_of(by_flux, job.x, group=group, out=job.out, accumulate="fast")
            lineup.add("flux, fast", "fast", fast)
        OURS.alone(lineup, "gemm", job.whole, job.product)
        unfused(lineup, OURS, job)
    if context.cuda and scales != "block" and op in ASYNC_TP:
        async_tp(lineup, partial(ASYNC_TP[op], job.x, group=group.group_name, dtype=context.dtype))
    return lineup


def _own_parts(op: str, lineup: Lineup, job: Job) -> None:
    """flux's GEMM and collectives alone."""
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
    """A library's product and the collective one after the other; all-reduces also of others than NCCL.

    norm: what is done with the sum.
    """
    laid_out, usual = each.x(job.whole), lineup.weights
    comm = collectives(lineup.context)

    def serial(weight: Any) -> None:
        x = each.x(job.before()) if job.before else laid_out
        job.behind(each.product(x, weight, job.product))
        _ = norm and norm.behind(job.product)

    def produce(weight: Any, partial: Tensor) -> None:
        result = each.product(laid_out, weight, partial)
        if result.data_ptr() != partial.data_ptr():
            partial.copy_(result)

    lineup = replace(lineup, weights=[each.weight(weight) for weight in usual])
    lineup.add(f"{comm}+{each.name}" if job.before else f"{each.name}+{comm}", "serial", serial)
    if lineup.graphs:  # it sums to all ranks
        m, n = job.product.shape
        other_all_reduces(lineup, m, n, f"{each.name}+", produce, norm)


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


class Turn(NamedTuple):
    """A launch as the operator makes it, but for what a sweep chooses.

    enter: the workspace. arguments: of its address and epoch, those of the kernel behind `transpose_weight`.
    """

    enter: Callable[[], AbstractContextManager[tuple[int, int]]]
    arguments: Callable[[int, int], tuple[Any, ...]]


def _gemm_rs_turn(workspace: Any, plan: Any, choice: int, mode: int, context: Context) -> Turn:
    """With room for the largest tile, so that none pays for growing it."""
    configs = _native.core.tile_configs(plan.dtype.itemsize)
    rooms = [gemm_rs_room(plan.m, plan.n, context.world_size, c.id, context.dtype) for c in configs]
    signals, slots = (max(sizes) for sizes in zip(*rooms, strict=True))
    chosen = replace(plan, config=choice, signal_bytes=signals, slot_bytes=slots)
    return Turn(lambda: workspace.enter(chosen), lambda address, _: (address, choice, 0, 0, 0, None))


def _ag_gemm_turn(workspace: Any, plan: Any, choice: int, mode: int, context: Context) -> Turn:
    chosen = replace(plan, config=choice & 0xFF)
    return Turn(
        lambda: all_gather.enter(workspace, chosen),
        lambda address, epoch: (address, choice, 0, epoch, all_gather.chunk_rows(chosen, epoch), False),
    )


def _gemm_ar_turn(workspace: Any, plan: Any, choice: int, mode: int, context: Context) -> Turn:
    """With room for both ways to sum."""
    core = _native.core
    modes = (core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT)
    room = max(core.exchange(plan.m, plan.n, context.world_size, each).bytes for each in modes)
    chosen = replace(plan, exchange_bytes=room)
    rest = (None, None, 0.0, None)
    return Turn(lambda: workspace.enter(chosen), lambda address, _: (address, choice, 0, mode, *rest))


_TURNS = {"gemm_rs": _gemm_rs_turn, "ag_gemm": _ag_gemm_turn, "gemm_ar": _gemm_ar_turn}


def canonical(x: Operand, weight: Operand) -> tuple[Tensor, dict[str, Any]]:
    """A weight, and scales as the low-level operators take them."""
    if isinstance(x, Tensor) or isinstance(weight, Tensor):
        assert isinstance(weight, Tensor)
        return weight, {}
    scales = Scales(x.scale, weight.scale, torch.bfloat16, "promoted").canonical(*weight.q.shape)
    return weight.q, {"scale_x": scales.x, "scale_w": scales.w, "fast": False}


def sweep(problem: Problem, context: Context) -> Lineup:
    """The kernel with every tile shape and cluster, and with the other way to sum, against what the plan
    chose.
    """
    op = problem.op
    given = random_operands(problem, context)
    job, kernel = job_of(op, given, problem, context), getattr(torch.ops.flux, f"_{op}")
    x = values(job.x)
    weights = [canonical(job.x, weight) for weight in given.weights]
    lineup = Lineup(context, weights, graphs=op == "gemm_ar")
    workspace, plan = kernel_plan(op, *problem.local(context.tp), context, problem.scales)
    lineup.plan = plan_dict(plan)

    def run(name: str, role: str, choice: int, mode: int) -> None:
        turn = _TURNS[op](workspace, plan, choice, mode, context)

        def launch(weight: tuple[Tensor, dict[str, Any]]) -> None:
            w, scales = weight
            with turn.enter() as at:
                kernel(x, w, None, job.out, False, *turn.arguments(*at), **scales)

        lineup.add(name, role, launch)

    run("plan", "flux", plan.choice, plan.mode)
    for name, choice in packed_choices(plan, x.itemsize):
        run(name, "config", choice, plan.mode)
    if op == "gemm_ar":
        other = "two-shot" if plan.mode == 0 else "one-shot"
        run(f"plan {other}", "config", plan.choice, 1 - plan.mode)
    return lineup
