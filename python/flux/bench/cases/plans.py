"""flux's plans as results tell them."""

from __future__ import annotations

from typing import Any

import torch

import flux
from flux.bench.cases.common import Context
from flux.bench.model import FP8


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
    """A flux.Plan as JSON: what was chosen, and why."""
    # Candidates are sorted, and the plan is the model's best.
    chosen = f"{plan.candidates[0][0]} g{plan.group_m}" if plan.candidates else ""
    if plan.by_flux and plan.op in ("gemm_ar", "all_reduce"):
        ways = {"parts": "gemm + all_reduce", "composed": "gemm_rs + all_gather"}
        mode = {0: "one-shot", 1: "two-shot"}.get(plan.mode, plan.way)
        chosen = ways.get(plan.way, f"{plan.config_name} {mode}").strip()
    if plan.levels is not None:
        chosen = plan.levels.reason
    return {
        "fused": bool(plan.by_flux),
        "way": plan.way,
        "transport": str(plan.transport),
        "config": chosen,
        "time_us": plan.time_us,
        "reason": str(plan.reason),
    }
