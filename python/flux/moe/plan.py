"""What the ranks of a group must agree on before a mixture-of-experts call, and the room it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flux import _native
from flux.comm.workspace import Workspace, round_up
from flux.ops.plan import can_run_fused

# Tiles of the CPU path. On GPUs the kernel's.
BLOCK_M: int = _native.core.tile_configs()[0].block_m
BLOCK_N = 256


@dataclass(frozen=True)
class MoePlan:
    """How one layer runs: the facts that a workspace needs of a call (flux.comm.workspace.Call), and more.

    m counts the tokens of all ranks, n the rows of each expert's weight and k its columns, as on one rank.

    Attributes:
        chunks: first tile and number of tiles of each chunk of columns (layer 1).
        tile: id of the tile shape whose columns chunks are counted in.
        communication_ctas: how many CTAs of a GPU begin with communication (layer 1).
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    config: int  # ep_size, so that ranks compare it
    fused: bool
    reason: str
    signal_bytes: int = 0
    slot_bytes: int = 0
    exchange_bytes: int = 0
    transpose_weight: bool = False
    chunks: tuple[tuple[int, int], ...] = ()
    tile: int = 0
    communication_ctas: int = 0


def plan_layer(
    workspace: Workspace,
    op: str,
    max_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    top_k: int,
    ep_size: int,
    experts: int,
) -> MoePlan:
    """The plan of layer 0 or 1 on a workspace, made once for each problem."""
    key = (op, max_tokens, n, k, dtype, top_k, ep_size, experts)
    plan = workspace.plans.get(key)
    if plan is None:
        plan = workspace.plans[key] = _make_plan(workspace, *key)
    assert isinstance(plan, MoePlan)
    return plan


def _make_plan(
    workspace: Workspace,
    op: str,
    max_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    top_k: int,
    ep_size: int,
    experts: int,
) -> MoePlan:
    p = workspace.world_size
    m = p * max_tokens
    device = workspace.device.type
    fused, reason = can_run_fused(
        op, device_type=device, dtype=dtype, m=m, n=n, k=k, why_not=workspace.why_not
    )
    facts = (op, m, n, k, dtype, p, ep_size, fused, reason)
    if not fused:
        return MoePlan(*facts)
    core, tile, ctas = _native.core, 0, 0
    if op == "moe.ag_scatter_gemm":
        chunks: tuple[tuple[int, int], ...] = ((0, -(-n // BLOCK_N)),)
        columns = k  # of what travels
        layout = core.MoeLayout(p, 0, ep_size, experts * ep_size, top_k, max_tokens)
        signals = core.MoeSendOrder(layout).signals
    else:
        rows = m * top_k // ep_size  # that a rank expects if tokens choose evenly
        block_n = BLOCK_N
        ctas = core.moe_communication_ctas(rows, max_tokens, experts, n, k, p, workspace.num_sms)
        if device == "cuda":
            # Waves are those of the SMs that go on computing: one too many would cost a tile's time.
            tile = core.moe_tile(rows, experts, n, k, max(1, workspace.num_sms - ctas))
            block_n = core.tile_configs()[tile].block_n
        chunks = tuple(core.moe_column_chunks(n, block_n))
        columns = n
        blocks = core.MoeLayout.blocks_of(max_tokens, core.MoeLayout.block_rows(max_tokens))
        signals = blocks * len(chunks)
    slots = core.ag_gemm_layout(m, columns, p)
    return MoePlan(
        *facts,
        signal_bytes=round_up(4 * (p - 1) * signals),
        slot_bytes=round_up(slots.slot_bytes * dtype.itemsize // 2),  # it counts in 2-byte elements
        chunks=chunks,
        tile=tile,
        communication_ctas=ctas,
    )
