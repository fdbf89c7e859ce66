"""What operators do differently in calls that must be batch invariant (flux.batch_invariant)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flux import _native
from flux._invariance import demanded
from flux.comm.workspace import NotInvariant

if TYPE_CHECKING:
    from flux.ops.plan import Plan, PlanInput

# The tile shape that serves any number of rows is the one that the cost model prefers for this number. It is
# between decoding, for which narrower tiles would use more SMs, and prefill, for which wider ones are faster.
_TYPICAL_ROWS = 512
_TYPICAL_RANKS = 2
_NO_CLUSTER = 1 << 8  # in a packed choice (csrc/gemm/select.h); K is not split


def select(op: str, problem: PlanInput) -> Any:
    """The tile shape and raster of a GEMM: the cost model's choice, or one tile shape for any m."""
    core, config = _native.core, -1
    shape, transposed, sms = (problem.m, problem.n, problem.k), problem.transpose_weight, problem.sms
    how: dict[str, Any] = {"world_size": problem.world_size} if op in ("gemm_rs", "ag_gemm") else {}
    how |= problem.operands
    if demanded():
        typical = core.select_gemm_rs if op == "gemm_rs" else core.select_ag_gemm
        tile = typical(_TYPICAL_ROWS, *shape[1:], transposed, _TYPICAL_RANKS, sms, **problem.operands).config
        config = tile | _NO_CLUSTER
    choose = getattr(core, f"select_{op}")
    return choose(*shape, transposed, num_sms=sms, config=config, **how)


def require(plan: Plan) -> None:
    """Raises NotInvariant if a call must be batch invariant, and its plan is not.

    Ranks have equal plans, so all raise. Called before anything is exchanged.
    """
    if plan.batch_invariant and not plan.fused and plan.m * plan.n > 0:
        raise NotInvariant(
            f"{plan.op}: batch_invariant: expected a call that runs fused, got an unfused one: {plan.reason}"
        )


def refuse(op: str) -> None:
    """Raises ValueError in calls that must be batch invariant: `op` never is."""
    if demanded():
        raise ValueError(f"{op}: batch_invariant: expected an operator that is batch invariant, got {op}")


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), of x [m, ...] on a CPU; if calls must be batch invariant, computed row by row.

    torch's functions for CPUs add in an order that may depend on the number of rows, and on alignment.
    """
    if not demanded() or x.shape[0] <= 1:
        return function(x)
    return torch.cat([function(x[i : i + 1].clone()) for i in range(x.shape[0])])


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [m, k] · w [k, n] on a CPU."""
    return by_rows(lambda rows: torch.mm(rows, w), x)
