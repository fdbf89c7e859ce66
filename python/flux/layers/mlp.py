"""The feed-forward block of a transformer, split over the ranks of a group."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from flux.layers.functional import column_linear
from flux.layers.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))): two column-parallel layers and a row-parallel one.

    Gate and up share one gather of x, and their gradients one scatter.

    Args:
        hidden_size: features of x and of the result.
        ffn_size: features between the layers, over all ranks; divisible by the ranks of the group.
        activation: "swiglu", with a gate, or "gelu", without.
        bias: whether the layers have biases.
        save_gathered: as in column_linear.
        options: group, sequence_parallel, gradient_accumulation_fusion, init, device and dtype of the layers.

    x and the result are [M/p, ..., hidden_size] with `sequence_parallel` (the default), else [M, ...,
    hidden_size]. State dict: "gate_proj.", "up_proj." and "down_proj." with weight and bias.

    Raises:
        ValueError: unknown activation, or ffn_size is not divisible by p.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        save_gathered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if activation not in ("swiglu", "gelu"):
            raise ValueError(f"ParallelMLP: activation: expected 'swiglu' or 'gelu', got {activation!r}")

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden_size, ffn_size, bias, save_gathered=save_gathered, **options)

        self.gate_proj = column() if activation == "swiglu" else None
        self.up_proj = column()
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, bias, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        if gate is None:
            return self.down_proj(nn.functional.gelu(up(x)))  # type: ignore[no-any-return]
        gated, result = column_linear(
            x,
            [gate.weight, up.weight],
            [gate.bias, up.bias],
            group=up.group_name,
            sequence_parallel=up.sequence_parallel,
            save_gathered=up.save_gathered,
            gradient_accumulation_fusion=up.gradient_accumulation_fusion,
        )
        return self.down_proj(nn.functional.silu(gated) * result)  # type: ignore[no-any-return]
