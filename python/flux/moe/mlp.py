"""A whole expert layer: routing, both GEMMs, and the communication of both."""

from __future__ import annotations

import torch

from flux.comm.group import GroupLike, resolve_group
from flux.moe.ag_scatter_gemm import ag_scatter_gemm
from flux.moe.gemm_gather_rs import gemm_gather_rs
from flux.moe.routing import route
from flux.ops import _check
from flux.ops.grouped_gemm import ACTIVATIONS


class MoEMLP(torch.nn.Module):
    """The experts of a mixture-of-experts layer, distributed over a group.

    The router is yours, and so is a shared expert. flux.moe.reference.moe_mlp is the same on one rank.

    Args:
        hidden: H, of the tokens.
        intermediate: I, of each expert.
        num_experts: E, of the whole layer.
        group: all ranks over which tokens are distributed.
        ep_size: as in flux.moe.route. With p ranks, p / ep_size of them share the columns of each expert.
        activation: "swiglu", "silu", "gelu" or None.
        max_tokens: as in flux.moe.route.

    Attributes:
        w1: [E / ep_size, N, H]; N is I / tp, for "swiglu" twice that: first the gates, then the ups.
        w2: [E / ep_size, H, I / tp].

    Raises:
        ValueError: an argument does not fit.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        group: GroupLike = None,
        ep_size: int = 1,
        activation: str | None = "swiglu",
        max_tokens: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        op = "MoEMLP"
        p = resolve_group(group, op).size()
        if ep_size < 1 or p % ep_size:
            _check.fail(op, "ep_size", f"a divisor of the {p} ranks of the group", ep_size)
        if num_experts < 1 or num_experts % ep_size:
            _check.fail(op, "num_experts", f"a positive multiple of ep_size = {ep_size}", num_experts)
        tp = p // ep_size
        if intermediate % tp:
            _check.fail(op, "intermediate", f"a multiple of the {tp} ranks of a slice", intermediate)
        if activation is not None and activation not in ACTIVATIONS:
            _check.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
        self.num_experts, self.ep_size, self.group = num_experts, ep_size, group
        self.activation, self.max_tokens = activation, max_tokens
        columns = intermediate // tp
        gates = 2 * columns if activation == "swiglu" else columns
        experts = num_experts // ep_size
        w1 = torch.empty(experts, gates, hidden, dtype=dtype, device=device)
        w2 = torch.empty(experts, hidden, columns, dtype=dtype, device=device)
        self.w1 = torch.nn.Parameter(w1)
        self.w2 = torch.nn.Parameter(w2)
        for weight, fan_in in ((self.w1, hidden), (self.w2, intermediate)):
            torch.nn.init.normal_(weight, std=fan_in**-0.5)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """x [..., H], topk_ids and topk_weights [..., k] -> [..., H]; a collective."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = route(
            topk_ids.reshape(-1, topk_ids.shape[-1]),
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            self.num_experts,
            group=self.group,
            ep_size=self.ep_size,
            max_tokens=self.max_tokens,
        )
        hidden = ag_scatter_gemm(tokens, self.w1, routing, activation=self.activation)
        return gemm_gather_rs(hidden, self.w2, routing).view(x.shape)
