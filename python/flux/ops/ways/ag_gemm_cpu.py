"""AllGather+GEMM on CPUs: the kernel's work, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flux import _native
from flux._memory import wide_type
from flux.comm.cpu import CpuWorkspace
from flux.fp8.scales import Scales
from flux.fp8.wide_product import WideWeight
from flux.ops.ways import ag_gemm as ag_gemm_ways
from flux.ops.ways import all_gather as gather
from flux.plan.choose import Plan

Tensors = Sequence[torch.Tensor]
Biases = Sequence[torch.Tensor | None]


def run(
    workspace: CpuWorkspace,
    call: Plan,
    plans: tuple[Plan, ...],
    epoch: int,
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    outs: Tensors,
    gathered: Tensors,
    scales: Sequence[Scales],
) -> None:
    """Writes the products to `outs`, and the rows of all ranks, and their scales, to `gathered`."""
    rows = ag_gemm_ways.Rows(x, scales)
    arrivals = gather.Arrivals(workspace, call, epoch, rows.sent)
    of_weights = scales or (None,) * len(weights)
    for plan, weight, bias, out, scale in zip(plans, weights, biases, outs, of_weights, strict=True):
        _compute(arrivals, rows, workspace.rank, plan, weight, bias, out, scale)
    if gathered:
        everybody = gathered[0]
        if scales:
            everybody = rows.sent.new_empty(call.m, rows.sent.shape[1])
        for source in range(call.world_size):
            arrivals.copy_to(everybody, source)
        rows.copy(everybody, gathered)


def _compute(
    arrivals: gather.Arrivals,
    sent: ag_gemm_ways.Rows,
    rank: int,
    plan: Plan,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scale: Scales | None,
) -> None:
    """Tiles of own rows first, others as their rows arrive."""
    core = _native.core
    p, rows = plan.world_size, plan.m // plan.world_size
    wide_w = WideWeight(weight, plan.transpose_weight, None if scale is None else scale.w)
    wide_bias = None if bias is None else bias.to(wide_type(plan.dtype))
    config = core.tile_config(plan.config)
    block_m, block_n = config.block_m, config.block_n
    order = core.ag_gemm_tiles(plan.m, plan.n, p, rank, plan.config, plan.cluster, plan.group_m)
    for source, m_tile, n_tile in order:
        columns = slice(n_tile * block_n, (n_tile + 1) * block_n)
        block = arrivals.block(source, m_tile)
        tile = wide_w.times(sent.rows(block), columns, sent.scale(block))
        if wide_bias is not None:
            tile += wide_bias[columns]
        first_row = source * rows + m_tile * block_m
        out[first_row : first_row + tile.shape[0], columns] = tile
