"""AllGather+GEMM on CPUs: the kernel's work, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flux import _native
from flux.comm.cpu import CpuWorkspace
from flux.ops import _invariant
from flux.ops import all_gather as gather
from flux.ops._tensors import wide_type
from flux.ops.plan import Plan

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
    gathered: torch.Tensor | None,
) -> None:
    """Writes the products to `outs`, and the rows of all ranks to `gathered`."""
    arrivals = gather.Arrivals(workspace, call, epoch, x)
    for plan, weight, bias, out in zip(plans, weights, biases, outs, strict=True):
        _compute(arrivals, workspace.rank, plan, weight, bias, out)
    if gathered is not None:
        for source in range(call.world_size):
            arrivals.copy_to(gathered, source)


def _compute(
    arrivals: gather.Arrivals,
    rank: int,
    plan: Plan,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Tiles of own rows first, others as their rows arrive."""
    core = _native.core
    p, rows = plan.world_size, plan.m // plan.world_size
    wide = wide_type(plan.dtype)
    wide_w = (weight if plan.transpose_weight else weight.t()).to(wide)
    wide_bias = None if bias is None else bias.to(wide)
    config = core.tile_config(plan.config)
    block_m, block_n = config.block_m, config.block_n
    order = core.ag_gemm_tiles(plan.m, plan.n, p, rank, plan.config, plan.cluster, plan.group_m)
    for source, m_tile, n_tile in order:
        columns = slice(n_tile * block_n, (n_tile + 1) * block_n)
        tile = _invariant.product(arrivals.block(source, m_tile).to(wide), wide_w[:, columns])
        if wide_bias is not None:
            tile += wide_bias[columns]
        first_row = source * rows + m_tile * block_m
        out[first_row : first_row + tile.shape[0], columns] = tile
