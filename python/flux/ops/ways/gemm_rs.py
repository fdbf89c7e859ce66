"""The ways of running flux.gemm_rs, of matrices with canonical scales."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from flux import _native
from flux._memory import aligned, readable_if_any, wide_type, writable
from flux.calls import checks, front
from flux.calls.checks import Product
from flux.comm import repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.fp8 import scales as fp8
from flux.fp8.products import WideWeight, product
from flux.ops import gemm as plain
from flux.ops.ways import reduce_scatter, two_level
from flux.ops.ways.reduce_scatter import REDUCE_SCATTER
from flux.plan.choose import Plan

Tensor = torch.Tensor


def parts(workspace: Workspace, plan: Plan, call: Product, recipe: repeat.Recipe) -> Any:
    x, bias, out = call.x, call.bias, call.out
    partial = x.new_empty(plan.m, plan.n, dtype=out.dtype)
    recipe.returns(recipe.out, "out")
    recipe.allocates(partial)
    plain.run(call._replace(bias=None, out=partial), recipe)
    front.below(REDUCE_SCATTER, reduce_scatter.Call(partial, out), workspace.group, recipe.same, recipe)
    if bias is not None:
        out += bias
        recipe.add_step(torch.Tensor.add_, out, bias)
    if isinstance(workspace, CudaWorkspace):
        workspace.remember_parts(recipe, 2 + (bias is not None))
    return recipe.out


def by_torch(workspace: Workspace, plan: Plan, call: Product, *_: Any) -> None:
    x, weight, bias, transpose_weight, out, scales = call
    if x.is_cuda:
        partial = x.new_empty(x.shape[0], out.shape[1], dtype=out.dtype)
        plain.unfused(call._replace(bias=None, out=partial))
    else:
        partial = product(x, weight, transpose_weight, scales)
    reduce_scatter.unfused(partial, workspace.group, out, () if bias is None else (bias,))


def kernel(workspace: CudaWorkspace, plan: Plan, call: Product, recipe: repeat.Recipe | None = None) -> None:
    """One launch. recipe: of the call, if it is to be known (flux.comm.repeat)."""
    x, weight, bias, _, out, scales = call
    # Allocations may run out of memory, so they come before the call is opened.
    target = writable(out)
    tensors = (aligned(x), aligned(weight), readable_if_any(bias), target)
    staging = None
    if plan.copied_now():
        staging = torch.empty(plan.slot_bytes, dtype=torch.uint8, device=x.device)
    with workspace.enter(plan) as (address, epoch):
        options = (plan.transpose_weight, address, plan.choice, plan.num_sms, epoch, plan.chunks, staging)
        scaled = {} if scales is None else scales.for_kernel(x)
        enqueue = functools.partial(_kernel, *tensors, *options, plan.batch_invariant, **scaled)
        enqueue()
    front.remember("_gemm_rs", recipe, enqueue, workspace, by_copy_engine=staging is not None)
    if target is not out:
        out.copy_(target)


def nodes(
    workspace: NodesWorkspace, plan: Plan, call: Product, recipe: Any, addends: Sequence[Tensor] = ()
) -> None:
    """addends: [n] or [m/p, n], instead of a bias."""
    x, scales = call.x, call.scales

    def inside(some: two_level.Select, node_sum: Tensor) -> None:
        theirs = None if scales is None else scales.of_rows(x.shape[0], some)
        part = call._replace(x=some(x), bias=None, out=node_sum, scales=theirs)
        front.below(GEMM_RS, part, workspace.node_group)

    added = addends if call.bias is None else (call.bias,)
    two_level.scatter(workspace, plan, x.shape[0], inside, call.out, added)


def protocol(workspace: CpuWorkspace, plan: Plan, call: Product, recipe: repeat.Recipe) -> None:
    """The kernel's work on the CPU, tile by tile: remote tiles to their owners' slots, the own shard last."""
    core, (x, weight, bias, _, out, scales) = _native.core, call
    rank, p, rows = workspace.rank, workspace.world_size, out.shape[0]
    wide, dtype = wide_type(x.dtype), plan.result_dtype
    wide_x, of_rows = x.to(wide), None if scales is None else fp8.of_elements(scales.x, plan.m)
    wide_w = WideWeight(weight, plan.transpose_weight, None if scales is None else scales.w)
    wide_bias = None if bias is None else bias.to(wide)
    config = core.tile_config(plan.config)
    block_m, block_n = config.block_m, config.block_n
    layout = core.gemm_rs_layout(plan.m, plan.n, p, plan.config)

    def slot_tile(owner: int, source: int, m_tile: int, n_tile: int, shape: torch.Size) -> Tensor:
        offset = layout.tile_offset(layout.slot_index(source, owner), m_tile, n_tile)
        return workspace.slot(owner, offset, (block_m, block_n), dtype)[: shape[0], : shape[1]]

    order = core.gemm_rs_tiles(plan.m, plan.n, p, rank, plan.config, plan.cluster, plan.group_m)
    for owner, m_tile, n_tile in order:
        first_row, first_column = m_tile * block_m, n_tile * block_n
        row_range = slice(owner * rows + first_row, owner * rows + min(first_row + block_m, rows))
        columns = slice(first_column, first_column + block_n)
        scale = None if of_rows is None else of_rows[row_range]
        partial = wide_w.times(wide_x[row_range], columns, scale)
        tile = n_tile * layout.m_tiles + m_tile
        # Indices of signal words in a slot: one for each half tile (the rows of one math warpgroup).
        signals = [layout.signal_index(m_tile, n_tile, half) for half in (0, 1)]
        if owner != rank:
            there = slot_tile(owner, rank, m_tile, n_tile, partial.shape)
            for half, signal in enumerate(signals):
                part = slice(half * block_m // 2, (half + 1) * block_m // 2)
                there[part] = partial[part]
                workspace.signal(owner, signal)
            continue
        if plan.batch_invariant:  # as the products of peers, which are sent in the result's dtype
            partial = partial.to(dtype).to(wide)
        total = torch.zeros_like(partial)
        for source in range(p):
            for signal in signals:
                workspace.wait(source, signal, tile)
            total += partial if source == rank else slot_tile(rank, source, m_tile, n_tile, partial.shape)
        if wide_bias is not None:
            total += wide_bias[columns]
        out[first_row : first_row + block_m, columns] = total


GEMM_RS = front.Collective(
    name="gemm_rs",
    call=Product,
    sizes=functools.partial(checks.gemm_args, "gemm_rs"),
    matrices=Product.matrices,
    plan=functools.partial(front.plan, "gemm_rs"),
    same=lambda call: {"bias": call.bias},
    alone=plain.launch,
    ways={"torch": by_torch, "parts": parts, "kernel": kernel, "protocol": protocol, "nodes": nodes},
)
_kernel: Any = torch.ops.flux._gemm_rs.default
