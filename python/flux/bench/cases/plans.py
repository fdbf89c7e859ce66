"""flux's plans as results tell them, and the names of all choices of a GEMM."""

from __future__ import annotations

from typing import Any

import torch

import flux
from flux import _native
from flux.bench.cases.common import Context
from flux.bench.model import FP8

# Suffixes of the model's candidate names, and what they stand for in a packed choice (csrc/gemm/select.h).
_CLUSTERS = {"": 1, " pair-m": 2, " pair-n": 3, " split-2": 4, " split-3": 5}
# For swap-AB tiles: number of CTAs that split K, and that share the weight.
_SWAP_AB_CLUSTERS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2))


def packed_choices(plan: Any, operand_bytes: int = 2) -> list[tuple[str, int]]:
    """Every (tile shape, cluster) the cost model considered: its name, and the `config` of a low-level op."""
    core = _native.core
    known = {
        config.name + suffix: config.id | cluster << 8
        for config in core.tile_configs(operand_bytes)
        for suffix, cluster in _CLUSTERS.items()
    }
    first = core.NUM_SWAP_AB
    for tile in range(first) if operand_bytes == 2 else range(first, first + core.NUM_FP8_SWAP_AB):
        for split, sharers in _SWAP_AB_CLUSTERS:
            if sharers > 1 and not core.swap_ab_in_pairs(tile):
                continue
            choice = core.FIRST_SWAP_AB + tile | split << 8 | sharers << 16
            known[core.select_gemm(1, 8, 8, False, 1, choice).name] = choice
    return [(name, known[name]) for name, _ in plan.candidates if name in known]


def explained(
    op: str, m: int, n: int, k: int, context: Context, scales: str | None = None
) -> dict[str, Any] | None:
    """plan_dict of a call, or None if explain would plan for a GPU that the benchmark does not use. scales:
    of fp8 operands.
    """
    if not context.cuda and torch.cuda.is_available():
        return None
    dtype = getattr(torch, FP8) if scales else context.dtype
    op, norm = op.removesuffix("_norm"), op.endswith("_norm")
    return plan_dict(flux.explain(op, m, n, k, dtype=dtype, group=context.group, norm=norm, scales=scales))


def plan_dict(plan: Any) -> dict[str, Any]:
    """A flux.Plan as JSON: what was chosen, why, and what the model gave to the others."""
    # Candidates are sorted, and the plan is the model's best.
    chosen = f"{plan.candidates[0][0]} g{plan.group_m}" if plan.candidates else ""
    if plan.by_flux and plan.op in ("gemm_ar", "all_reduce"):
        way = {0: "one-shot", 1: "two-shot"}.get(plan.mode, "gemm_rs + all_gather")
        chosen = f"{plan.config_name} {way}".strip()
    if plan.levels is not None:
        chosen = plan.levels.reason
    return {
        "fused": bool(plan.by_flux),
        "way": plan.way,
        "transport": str(plan.transport),
        "config": chosen,
        "time_us": plan.time_us,
        "reason": str(plan.reason),
        "candidates": [[str(name), float(time)] for name, time in plan.candidates],
    }
