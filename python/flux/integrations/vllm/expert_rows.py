"""Experts between the sharded residuals of rows.py: flux computes them of each rank's own rows. Needs nothing
of vLLM but its operators torch.ops.vllm.moe_forward and all_reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

from flux.integrations.vllm.op import all_reduce_below
from flux.integrations.vllm.rows import own_rows, share_of
from flux.ops.gemm_ar import row_norm

Tensor = torch.Tensor
_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "FRAGMENT")
# Where norm_experts_scatter has its arguments: before those of vLLM, and behind them.
OURS_BEFORE, OURS_BEHIND = 5, 4
# So many arguments of moe_forward are made here: hidden states and router logits.
MADE = 2
_calls_with_own_rows: list[bool] = []


def define(moe_forward: Callable[..., Tensor]) -> None:
    """Defines the operator, once.

    Args:
        moe_forward: the function behind vLLM's operator. One of its arguments has a type of vLLM's own.
    """
    if hasattr(torch.ops.flux_vllm, "norm_experts_scatter"):
        return
    schema: str = _torch_library.infer_schema(moe_forward, mutates_args=())
    vllms = ", ".join(schema[1 : schema.index(")")].split(", ")[MADE:])
    before = "Tensor residual, Tensor norm_weight, float eps, Tensor? gate, Tensor? gate_bias"
    behind = "int min_tokens, int from_tokens, str group_name, str vllm_group"
    _library.define(
        f"norm_experts_scatter({before}, {vllms}, {behind}) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.impl("norm_experts_scatter", norm_experts_scatter, "CompositeExplicitAutograd")
    _torch_library.register_fake(
        "flux_vllm::norm_experts_scatter", lambda residual, *more: torch.empty_like(residual), lib=_library
    )


def norm_experts_scatter(*arguments: Any) -> Tensor:
    """RMSNorm of own rows, their experts, summed over ranks, plus the residual: own rows.

    Args:
        residual: [M, N], sharded.
        norm_weight: [N].
        eps: of the norm.
        gate: [experts, N], or None if vLLM's runner has the gate itself.
        gate_bias: [experts].
        ...: arguments of vLLM's moe_forward behind hidden states and router logits.
        min_tokens, from_tokens, group_name, vllm_group: of rows.sum_scatter.

    Returns:
        [M, N], the next residual: a fresh tensor.
    """
    residual, norm_weight, eps, gate, gate_bias = arguments[:OURS_BEFORE]
    rest = arguments[OURS_BEFORE:-OURS_BEHIND]
    min_tokens, from_tokens, group_name, vllm_group = arguments[-OURS_BEHIND:]

    def experts(residual: Tensor) -> Tensor:
        hidden = row_norm(residual, norm_weight, eps)
        logits = hidden if gate is None else linear(hidden, gate, gate_bias)
        result: Tensor = torch.ops.vllm.moe_forward(hidden, logits, *rest)
        return result

    if len(residual) < from_tokens:
        below = all_reduce_below(experts(residual), min_tokens, vllm_group)
        return torch.add(below, residual)
    total = torch.empty_like(residual)
    own = own_rows(residual, False, group_name)
    with _with_own_rows():
        torch.add(experts(own), own, out=total[: share_of(residual, group_name)])
    return total


def rows_are_own() -> bool:
    """Whether vLLM's runner is called with this rank's rows, and not with those of all."""
    return bool(_calls_with_own_rows)


@contextmanager
def _with_own_rows() -> Iterator[None]:
    _calls_with_own_rows.append(True)
    try:
        yield
    finally:
        _calls_with_own_rows.pop()
