"""The ways of running flux.gemm_ar, of matrices with canonical scales."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from flux._memory import aligned, readable_if_any, writable
from flux.calls import checks, front
from flux.calls.checks import Product
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.repeat import Recipe
from flux.comm.workspace import Workspace
from flux.fp8.products import product as wide_product
from flux.fp8.scales import Scales
from flux.ops import gemm as plain
from flux.ops.norm_and_quant import NONE, End, Made
from flux.ops.ways import all_gather as gather
from flux.ops.ways import exchange, two_level
from flux.ops.ways.all_reduce import ALL_REDUCE, by_shares, sum_by_torch
from flux.ops.ways.gemm_rs import GEMM_RS
from flux.plan.choose import Plan

Tensor = torch.Tensor


class Call(NamedTuple):
    """The arguments of flux.gemm_ar, what follows the sum in one, and the scales."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transpose_weight: bool
    residual: Tensor | None = None
    end: End = NONE
    out: Any = None  # of ways: a tensor
    scales: Scales | None = None

    def rows(self, some: slice) -> Call:
        """The call of some rows of matrices, without what follows the sum."""
        residual = None if self.residual is None else self.residual[some]
        scales = self.scales and self.scales.of_rows(len(self.x), lambda scale: scale[some])
        return self._replace(x=self.x[some], residual=residual, end=NONE, out=self.out[some], scales=scales)

    def product(self, out: Tensor | None, bias: Tensor | None = None) -> Product:
        return Product(self.x, self.weight, bias, self.transpose_weight, out, self.scales)

    def addends(self, rows: slice = slice(None)) -> list[Tensor]:
        """What is added to rows of the sum over ranks, in this order: [n] and [rows, n]."""
        of_rows = None if self.residual is None else self.residual[rows]
        return [each for each in (self.bias, of_rows) if each is not None]


def _sizes(call: Call, p: int) -> front.Sizes:
    found = checks.gemm_args("gemm_ar", call.product(None, call.bias))
    if call.residual is not None:
        checks.like("gemm_ar", "residual", call.residual, found[0], call.x, call.scales)
    call.end.check("gemm_ar", found[2], call.x, call.scales)
    return found


def _matrices(call: Call, sizes: front.Sizes) -> Call:
    x, weight, bias, transpose_weight, out, scales = call.product(call.out, call.bias).matrices(sizes)
    residual = None if call.residual is None else call.residual.reshape(out.shape)
    return Call(x, weight, bias, transpose_weight, residual, call.end, out, scales)


def _alone(call: Call) -> None:
    product = call.out if call.residual is None else torch.empty_like(call.out)
    plain.run(call.product(product, call.bias))
    if call.residual is not None:
        torch.add(product, call.residual, out=call.out)


def by_torch(workspace: Workspace, plan: Plan, call: Call, recipe: Recipe) -> None:
    out, addends = call.out, call.addends()
    if out.numel() == 0:
        return
    if call.x.is_cuda:  # NCCL sums in the result's dtype
        product = torch.empty_like(out) if addends and addends[-1].data_ptr() == out.data_ptr() else out
        plain.unfused(call.product(product))
    else:
        product = wide_product(call.x, call.weight, call.transpose_weight, call.scales)
    sum_by_torch(product, workspace.group, out, addends)


def parts(workspace: Workspace, plan: Plan, call: Call, recipe: Recipe) -> Any:
    product, out = torch.empty_like(call.out), recipe.out
    once = call.bias if workspace.group.rank() == 0 else None  # the sum has it once
    plain.run(call.product(product, once), recipe)
    residual = None if call.residual is None else call.residual.view(out.shape)
    summed = exchange.Call(product.view(out.shape), residual, call.end, out)
    found = front.below(ALL_REDUCE, summed, workspace.group, recipe.same, recipe)
    if isinstance(workspace, CudaWorkspace):
        for each in found if isinstance(found, tuple) else (found,):
            recipe.returns(each, "out" if found is out else "")
        recipe.allocates(product)
        workspace.remember_parts(recipe, 2)
    return found


def composed(workspace: Workspace, plan: Plan, call: Call, recipe: Recipe) -> Any:
    """As gemm_rs and all_gather, of the rows that ranks can share."""
    group, dealt = workspace.group, plan.m - plan.m % workspace.world_size
    whole = recipe if dealt == plan.m and isinstance(workspace, CudaWorkspace) else None
    head = call.rows(slice(dealt))
    shard = front.below(GEMM_RS, head.product(None, head.bias), group, recipe.same, whole)
    if head.residual is not None:
        mine = slice(workspace.rank * len(shard), (workspace.rank + 1) * len(shard))

        def add_own_rows(shard: Tensor, residual: Tensor) -> None:
            shard.add_(residual.reshape(-1, plan.n)[mine])

        add_own_rows(shard, head.residual)
        if whole is not None:
            recipe.add_step(add_own_rows, shard, recipe.given[recipe.number("residual")])
    gather.call(shard, group, head.out, within=whole)
    if dealt < plan.m:
        front.run(GEMM_AR, call.rows(slice(dealt, plan.m)), group)
    found = call.end.of(recipe.out)
    if whole is not None and isinstance(workspace, CudaWorkspace):
        call.end.follows(recipe, recipe.out, found)
        workspace.remember_parts(recipe, 2 + (call.residual is not None))
    return found


def kernel(workspace: CudaWorkspace, plan: Plan, call: Call, recipe: Recipe | None = None) -> Made | None:
    """One launch, of 16-bit operands. Returns what that makes of the sum besides."""
    x, weight, bias, _, residual, end, out, _ = call
    # Allocations may run out of memory, so they come before the call is opened.
    target = writable(out)
    made = end.in_kernel("gemm_ar", out)
    first, second = (target, None) if made is None else (made.normalised, target)
    operands = (aligned(x), aligned(weight), readable_if_any(bias), first)
    extras = (readable_if_any(residual), readable_if_any(end.norm_weight), end.eps, second)
    quantised = end.for_kernel(made)
    with workspace.enter(plan) as (symm_buffer, _):
        # num_sms, equal on all ranks: CTAs wait for the CTAs of peers that have the same share.
        options = (plan.transpose_weight, symm_buffer, plan.choice, workspace.num_sms, plan.mode)
        enqueue = functools.partial(_kernel, *operands, *options, *extras, **quantised)
        enqueue()
    if recipe is not None and (end.quant is None or quantised):
        front.remember("_gemm_ar", recipe, enqueue, workspace, end.by_kernel_name(recipe.out, made))
    if target is not out:
        out.copy_(target)
    return made


def protocol(workspace: CpuWorkspace, plan: Plan, call: Call, recipe: Recipe) -> None:
    partial = torch.empty_like(call.out)
    plain.run(call.product(partial))
    exchange.sum_over_ranks(workspace, plan, partial, call.out, call.addends())


def nodes(workspace: NodesWorkspace, plan: Plan, call: Call, recipe: Recipe) -> None:
    """Ranks share as many whole rows as they can; sums of nodes are exchanged of the others."""
    levels, topology, total = plan.levels, workspace.topology, call.out
    assert levels is not None
    composed = levels.schedule == "composed"
    p, rank = (topology.world_size, workspace.rank) if composed else (topology.ranks, workspace.local)
    dealt = 0 if levels.schedule == "node sums" else plan.m - plan.m % p
    if dealt:
        share = total.new_empty(dealt // p, plan.n)
        own = call.addends(slice(rank * len(share), (rank + 1) * len(share)))
        part = call.rows(slice(dealt)).product(share)
        problem = (dealt, plan.n, plan.k, call.x.dtype, plan.transpose_weight, plan.scaling)
        by_shares(workspace, composed, GEMM_RS, part, own, total[:dealt], problem)
    if dealt < plan.m:
        rest = slice(dealt, plan.m)
        alone = call.rows(rest)._replace(bias=None, residual=None)
        two_level.sum_whole(workspace, GEMM_AR, alone, total[rest], call.addends(rest))


GEMM_AR = front.Collective(
    name="gemm_ar",
    call=Call,
    end=End,
    sizes=_sizes,
    matrices=_matrices,
    plan=lambda workspace, call, sizes: front.plan(
        "gemm_ar" if call.end.norm_weight is None else "gemm_ar_norm", workspace, call, sizes
    ),
    may_be=("residual",),
    same=lambda call: {"bias": call.bias, "residual": call.residual, **call.end.same()},
    alone=_alone,
    ways={
        "torch": by_torch,
        "parts": parts,
        "composed": composed,
        "kernel": kernel,
        "protocol": protocol,
        "nodes": nodes,
    },
    answer=lambda call, made: call.end.of(call.out, made),
    differentiable=False,
)
_kernel: Any = torch.ops.flux._gemm_ar.default
