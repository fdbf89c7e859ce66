"""Plans of mixture-of-experts calls: the facts on which ranks must agree, and the workspace sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flux import _native
from flux.comm.workspace import Workspace, round_up
from flux.fp8.scales import Scaling
from flux.measured.times import Tuning, choose
from flux.plan.choose import Plan, problem_of, why_not_fused

# Rows of a tile, the same as in the kernel; also for the CPU path.
BLOCK_M: int = _native.core.tile_configs()[0].block_m
BLOCK_N = 256


def facts_op(op: str, experts: int, top_k: int, ep_size: int) -> str:
    """The name under which measurements of a layer are found."""
    return f"{op} {experts} experts, {top_k} chosen, EP {ep_size}"


def choose_parts(tuning: Tuning, op: str, ranks: int, dtype: int, m: int, n: int, k: int) -> str | None:
    """Why a layer runs as a collective, a grouped GEMM and sums one after the other, or None."""
    if tuning.forced is not None:
        return "to be measured" if tuning.forced == "parts" else None
    found = choose(tuning.estimates(op, ranks, dtype, m, n, k), "kernel", ("kernel", "parts"))
    return found and f"in parts {found[0].us:.1f} us, by kernel {found[1].us:.1f} us ({found[0].source})"


@dataclass(frozen=True)
class MoePlan(Plan):
    """How one layer runs. m: tokens of all ranks. n, k: of each expert's weight on one rank. config: ep_size,
    which ranks compare. columns: first tile and tiles of each chunk (layer 1). tile: id of the tile shape.
    communication_ctas: CTAs of a GPU that start with communication (layer 1).
    """

    columns: tuple[tuple[int, int], ...] = ()
    tile: int = 0
    communication_ctas: int = 0


class LayerProblem(NamedTuple):
    """What the plan of a layer depends on, besides the workspace; experts: of one rank."""

    op: str
    max_tokens: int
    n: int
    k: int
    dtype: torch.dtype
    top_k: int
    ep_size: int
    experts: int
    scaling: Scaling | None = None


def plan_layer(workspace: Workspace, layer: LayerProblem) -> MoePlan:
    """The plan of layer 0 or 1 on a workspace, made once for each problem."""
    plan: MoePlan | None = workspace.plans.get(layer)
    if plan is None:
        plan = workspace.plans[layer] = _make_plan(workspace, layer)
    return plan


def _make_plan(workspace: Workspace, layer: LayerProblem) -> MoePlan:
    op, max_tokens, n, k, dtype, top_k, ep_size, experts, scaling = layer
    p = workspace.world_size
    m = p * max_tokens
    problem = problem_of(workspace, m, n, k, dtype, False, scaling)
    why_not = why_not_fused(op, problem)
    if why_not is None and workspace.topology is not None:
        why_not = "slices of experts span nodes: ep_size is no multiple of their number"
    named = facts_op(op, experts * ep_size, top_k, ep_size)
    if scaling is not None:
        named += f", {scaling.kind} scales"
    if why_not is None:
        why_not = choose_parts(workspace.tuning, named, p, dtype.itemsize, m, n, k)
    plan = MoePlan(**vars(problem.plan(op, why_not is None, why_not or problem.why_fused, config=ep_size)))
    if why_not is not None:
        return plan
    core, tile, ctas, itemsize = _native.core, 0, 0, problem.result_dtype.itemsize
    if op == "moe.ag_scatter_gemm":
        chunks: tuple[tuple[int, int], ...] = ((0, -(-n // BLOCK_N)),)
        columns = k  # columns of the rows that ranks exchange
        if scaling is not None:
            columns, itemsize = scaling.records(k, dtype).row_bytes, 1
        layout = core.MoeLayout(p, 0, ep_size, experts * ep_size, top_k, max_tokens)
        signals = core.MoeSendOrder(layout).signals
    else:
        rows = m * top_k // ep_size  # expected rows of a rank
        columns, block_n, operand_bytes = n, BLOCK_N, 2 if scaling is None else 1
        sizes = (max_tokens, experts, n, k, p)
        ctas = core.moe_communication_ctas(rows, *sizes, workspace.num_sms, operand_bytes)
        if workspace.device.type == "cuda":
            # Count waves on the SMs without communication: an additional wave costs the time of a tile.
            tile = core.moe_tile(rows, experts, n, k, max(1, workspace.num_sms - ctas), operand_bytes)
            block_n = core.tile_config(tile).block_n
        chunks = tuple(core.moe_column_chunks(n, block_n))
        blocks = core.MoeLayout.blocks_of(max_tokens, core.MoeLayout.block_rows(max_tokens))
        signals = blocks * len(chunks)
    slot_bytes = core.ag_gemm_layout(m, columns, p).slot_bytes * itemsize // 2  # it counts in 2-byte elements
    signal_bytes, slot_bytes = round_up(4 * (p - 1) * signals), round_up(slot_bytes)
    how: dict[str, Any] = {"columns": chunks, "tile": tile, "communication_ctas": ctas}
    return replace(plan, signal_bytes=signal_bytes, slot_bytes=slot_bytes, **how)
