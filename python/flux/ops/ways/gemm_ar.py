"""The ways of running flux.gemm_ar: with torch, as gemm_rs and all_gather, in a kernel, on CPUs. Operands are
matrices, and scales canonical.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flux._memory import aligned, readable_if_any, writable
from flux.calls import front
from flux.comm import repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import Same
from flux.fp8.scales import Scales
from flux.fp8.wide_product import product as of_wide
from flux.ops import gemm as plain
from flux.ops.norm_and_quant import End, Made
from flux.ops.ways import all_gather as gather
from flux.ops.ways import gemm_rs as scatter
from flux.ops.ways.exchange import sum_over_ranks
from flux.plan.choose import Plan

Tensor = torch.Tensor


class Operands(NamedTuple):
    """A call whose x, residual and sum are matrices. scales: canonical."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transpose_weight: bool
    residual: Tensor | None
    total: Tensor
    scales: Scales | None


def addends(bias: Tensor | None, residual: Tensor | None, n: int) -> list[Tensor]:
    """The tensors to add to the sum over ranks, in this order: [n] and [m, n]."""
    found = [] if bias is None else [bias]
    return found if residual is None else [*found, residual.reshape(residual.shape[:-1].numel(), n)]


def plus(total: Tensor, addends: list[Tensor]) -> Tensor:
    for addend in addends:
        total += addend
    return total


def rows(residual: Tensor | None, m: int, n: int) -> Tensor | None:
    return None if residual is None else residual.reshape(m, n)


def unfused(operands: Operands, group: ProcessGroup) -> None:
    x, weight, bias, transpose_weight, residual, total, scales = operands
    if total.numel() == 0:
        return
    product = total
    if residual is not None and residual.data_ptr() == total.data_ptr():
        product = torch.empty_like(total)
    if x.shape[1] == 0:
        product.zero_()
    elif x.is_cuda:
        plain.unfused(plain.Call(x, weight, None, transpose_weight, product, scales))
        dist.all_reduce(product, group=group)
    else:  # gloo is slow in any dtype, so it sums in the wide type; NCCL sums in the result's
        product = of_wide(x, weight, transpose_weight, scales)
        dist.all_reduce(product, group=group)
    plus(product, addends(bias, residual, total.shape[1]))
    if product is not total:
        total.copy_(product)


def composed(operands: Operands, group: ProcessGroup, same: Same, recipe: repeat.Recipe | None) -> None:
    """total = gemm_rs, then all_gather. recipe: of the call if it has no other launches."""
    x, weight, bias, transpose_weight, residual, total, scales = operands
    part = scatter.Call(x, weight, bias, transpose_weight, scales=scales)
    shard = front.below(scatter.GEMM_RS, part, group, same, recipe)
    if residual is not None:
        count, m, n = shard.shape[0], x.shape[0], shard.shape[-1]
        mine = slice(group.rank() * count, (group.rank() + 1) * count)

        def add_own_rows(shard: Tensor, residual: Tensor) -> None:
            shard.add_(residual.reshape(m, n)[mine])

        add_own_rows(shard, residual)
        if recipe is not None:
            recipe.add_step(add_own_rows, shard, recipe.given[recipe.number("residual")])
    gather.call(shard, group, total, within=recipe)


def fused_cuda(
    workspace: CudaWorkspace,
    plan: Plan,
    call: Operands,
    end: End,
    repeated: tuple[repeat.Recipe, Tensor] | None = None,
) -> Made | None:
    """Launches the kernel, which takes 16-bit operands. repeated: recipe (flux.comm.repeat) and result of a
    call that is to be known.
    """
    x, weight, bias, _, residual, total, _ = call
    # Allocations may run out of memory, so they come before the call is opened.
    target = writable(total)
    made = end.in_kernel("gemm_ar", total)
    first, second = (target, None) if made is None else (made.normalised, target)
    operands = {"x": aligned(x), "weight": aligned(weight), "bias": readable_if_any(bias)}
    extras = {"residual": readable_if_any(residual), "norm_weight": readable_if_any(end.norm_weight)}
    with workspace.enter(plan) as (symm_buffer, _):
        # num_sms, equal on all ranks: CTAs wait for the CTAs of peers that have the same share.
        options = (plan.transpose_weight, symm_buffer, plan.choice, workspace.num_sms, plan.mode)
        tensors = (*operands.values(), first, *options, *extras.values())
        enqueue = functools.partial(_kernel, *tensors, end.eps, second, **end.for_kernel(made))
        enqueue()
    quantised = made is not None and len(made.quantised) > 0
    repeats = quantised == (end.quant is not None) and target is total
    if repeated is not None and repeats and repeated[0].in_place(**operands, **extras):
        recipe, out = repeated
        wrote, wrote_sum, by_quant = end.remembered(recipe, out, made)
        used = [*recipe.numbers(*operands), wrote, *recipe.numbers(*extras), wrote_sum, *by_quant]
        workspace.remember(recipe, enqueue, [used])
    if target is not total:
        total.copy_(target)
    return made


def fused_cpu(workspace: CpuWorkspace, plan: Plan, epoch: int, operands: Operands) -> None:
    x, weight, bias, _, residual, total, scales = operands
    partial = plain.reference(x, weight, None, plan.transpose_weight, *(scales or ()))
    sum_over_ranks(workspace, plan, epoch, partial, total, addends(bias, residual, plan.n))


_kernel: Any = torch.ops.flux._gemm_ar.default
