"""Plans of ag_gemm and all_gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flux import _native
from flux.comm.workspace import round_up
from flux.fp8.scales import Scaling
from flux.plan.choose import PLANNERS, Plan, PlanInput, chosen, select_tile, why_not_fused

_BLOCK_M: int = _native.core.tile_configs()[0].block_m
# Number of blocks of rows for which a launch has counters while it pushes (csrc/runtime/symm_buffer.h).
_MAX_PUSH_BLOCKS: int = _native.core.MAX_PUSH_BLOCKS

# Gathered shards of at least this size are sent by copy engines. Starting one takes some microseconds, which
# must be small against the transfer; for larger shards, SMs are better used for the GEMM.
COPY_FROM_BYTES = 8 << 20
# Parts of a shard that all_gather's copy engines signal separately.
_GATHERED_PARTS = 4


def plan_ag_gemm(problem: PlanInput) -> Plan:
    if (why_not := _why_not_gathered("ag_gemm", problem)) is not None:
        return problem.unfused("ag_gemm", why_not)
    tile = chosen(select_tile("ag_gemm", problem), problem.why_fused)
    return problem.plan("ag_gemm", True, **(tile | _gathering(problem)))


def plan_all_gather(problem: PlanInput) -> Plan:
    """The plan of an AllGather of rows of k elements; m counts those of all ranks. n does not matter."""
    problem = replace(problem, n=0, transpose_weight=False)
    if (why_not := _why_not_gathered("all_gather", replace(problem, n=1))) is not None:
        return problem.unfused("all_gather", why_not)
    gathering = _gathering(problem)
    if gathering.get("copied"):
        # Rows are copied to the result while later rows arrive, so the last part should be small.
        rows = problem.m // problem.world_size
        gathering["chunk_rows"] = round_up(-(-rows // _GATHERED_PARTS), _BLOCK_M)
    # There is no tile shape; any number that is equal on all ranks.
    return problem.plan("all_gather", True, problem.why_fused, config=0, **gathering)


def _why_not_gathered(op: str, problem: PlanInput) -> str | None:
    why_not, rows = why_not_fused(op, problem), problem.m // problem.world_size
    too_many = (problem.world_size - 1) * -(-rows // _BLOCK_M) > _MAX_PUSH_BLOCKS
    if why_not is None and problem.on_gpu and too_many:
        return f"{rows} rows of one rank are more than a launch can push"
    return why_not


def _gathering(problem: PlanInput) -> dict[str, Any]:
    """How rows are sent, and the workspace sizes that they need."""
    m, k, p, dtype = problem.m, problem.k, problem.world_size, problem.dtype
    rows = m // p
    signal_bytes, slot_bytes = ag_gemm_room(m, k, p, dtype, problem.scaling, problem.on_gpu)
    room: dict[str, Any] = {"signal_bytes": signal_bytes, "slot_bytes": slot_bytes}
    if not problem.on_gpu or rows * k * dtype.itemsize < COPY_FROM_BYTES:
        return room
    transport = f"copy engines; in CUDA graphs {problem.transport}"
    return {**room, "transport": transport, "copied": True, "chunk_rows": copy_chunk_rows(rows)}


def copy_chunk_rows(rows: int) -> int:
    """Rows for each signal of a copy engine: the whole shard, rounded up to tiles. Halves or quarters gained
    up to 9 % on two of nine shapes of TP 4, and lost up to 13 % on others: a signal costs microseconds.
    """
    return round_up(rows, _BLOCK_M)


def ag_gemm_room(
    m: int, k: int, world_size: int, dtype: torch.dtype, scaling: Scaling | None = None, on_gpu: bool = True
) -> tuple[int, int]:
    """The signal_bytes and slot_bytes that a gather of m rows of k elements, and their scales, needs."""
    if scaling is not None and on_gpu:
        layout = _native.core.ag_gemm_layout(m, k, world_size, scale_columns=scaling.columns(k))
        return round_up(4 * layout.num_signals), round_up(layout.slot_bytes)
    if scaling is not None:
        k = scaling.records(k, dtype).row_bytes
    layout = _native.core.ag_gemm_layout(m, k, world_size)
    # The layout counts in 2-byte elements.
    return round_up(4 * layout.num_signals), round_up(layout.slot_bytes * dtype.itemsize // 2)


PLANNERS |= {"ag_gemm": plan_ag_gemm, "all_gather": plan_all_gather}
