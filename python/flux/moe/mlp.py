"""A whole expert layer: routing, both GEMMs, and the communication of both."""

from __future__ import annotations

import torch
from torch import nn

from flux._sharded import Init, ShardedModule, fill
from flux.calls import argument_types, checks
from flux.comm.group import GroupLike
from flux.moe.ag_scatter_gemm import ag_scatter_gemm
from flux.moe.gemm_gather_rs import gemm_gather_rs
from flux.moe.routing import route
from flux.ops.grouped_gemm import ACTIVATIONS


class MoEMLP(ShardedModule):
    """The experts of a mixture-of-experts layer, distributed over a group.

    The router is yours, and so is a shared expert. flux.moe.reference.moe_mlp is the same on one rank.

    Args:
        hidden: H, of the tokens.
        intermediate: I, of each expert.
        num_experts: E, of the whole layer.
        group: all ranks over which tokens are distributed: ProcessGroup, one-dimensional DeviceMesh, group
            name, or None for the default group.
        ep_size: as in flux.moe.route. With p ranks, tp = p / ep_size of them share the columns of each
            expert.
        activation: "swiglu", "silu", "gelu" or None.
        max_tokens, max_node_tokens: as in flux.moe.route.
        init: fills the whole weight of one expert, [N, H] or [H, I], in place. Default: normal, with the
            standard deviation 1 / sqrt(H) or 1 / sqrt(I).
        dtype, device: of the parameters.

    Attributes:
        w1: [E / ep_size, N, H]; N is I / tp, for "swiglu" twice that: first the gates, then the ups.
        w2: [E / ep_size, H, I / tp].

    Raises:
        ValueError: ep_size does not divide the ranks, num_experts is not a multiple of ep_size, intermediate
            not one of tp, or another argument does not fit.
        TypeError: an argument is of another type.

    With equal seeds on all ranks the layer is the same for every world size and ep_size: every rank draws all
    experts, one after the other, and keeps its slices.

    State dict: "w1" and "w2" of this rank. Loading also takes those of the whole layer, w1 [E, N, H] with N =
    I, for "swiglu" 2 * I (all gates, then all ups), and w2 [E, H, I], and keeps the rank's part.

    Example::

        from flux.moe import MoEMLP

        experts = MoEMLP(64, 32 * p, num_experts=4, dtype=torch.float32)
        scores = torch.randn(3, 4).softmax(-1)  # of your router, for 3 tokens
        topk_weights, topk_ids = scores.topk(2)
        assert experts(torch.randn(3, 64), topk_ids, topk_weights).shape == (3, 64)
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
        max_node_tokens: int | None = None,
        init: Init | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        op = type(self).__name__
        hidden = argument_types.size(op, "hidden", hidden)
        intermediate = argument_types.size(op, "intermediate", intermediate)
        num_experts = argument_types.size(op, "num_experts", num_experts, 1)
        ep_size = argument_types.size(op, "ep_size", ep_size, 1)
        if activation is not None and activation not in ACTIVATIONS:
            checks.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
        if max_tokens is not None:
            max_tokens = argument_types.size(op, "max_tokens", max_tokens)
        if max_node_tokens is not None:
            max_node_tokens = argument_types.size(op, "max_node_tokens", max_node_tokens)
        argument_types.optional_function(op, "init", init)
        argument_types.floating_dtype(op, "dtype", dtype)
        argument_types.device(op, "device", device)
        super().__init__(group)
        p = self.world_size
        if p % ep_size:
            checks.fail(op, "ep_size", f"a divisor of the {p} ranks of the group", ep_size)
        if num_experts % ep_size:
            checks.fail(op, "num_experts", f"a positive multiple of ep_size = {ep_size}", num_experts)
        tp = p // ep_size
        if intermediate % tp:
            checks.fail(op, "intermediate", f"a multiple of the {tp} ranks of a slice", intermediate)
        self.hidden, self.intermediate, self.num_experts = hidden, intermediate, num_experts
        self.ep_size, self.activation, self.max_tokens, self.init = ep_size, activation, max_tokens, init
        self.max_node_tokens = max_node_tokens
        self._parts = 2 if activation == "swiglu" else 1  # parts of w1: gates and ups
        self._columns, self._first_column = intermediate // tp, self.rank % tp * (intermediate // tp)
        self._experts, self._first_expert = num_experts // ep_size, self.rank // tp * (num_experts // ep_size)
        w1 = torch.empty(self._experts, self._parts * self._columns, hidden, dtype=dtype, device=device)
        w2 = torch.empty(self._experts, hidden, self._columns, dtype=dtype, device=device)
        self.w1, self.w2 = nn.Parameter(w1), nn.Parameter(w2)
        self.reset_parameters()

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter "w1" or "w2" of all experts, before it is cut."""
        if name == "w1":
            return self.num_experts, self._parts * self.intermediate, self.hidden
        return self.num_experts, self.hidden, self.intermediate

    def own_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole parameter "w1" or "w2"."""
        return self._own_columns(name, whole.narrow(0, self._first_expert, self._experts))

    def _own_columns(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of some experts' weights [..., N, H] or [..., H, I]."""
        if name == "w2":
            return whole.narrow(-1, self._first_column, self._columns)
        parts = whole.view(*whole.shape[:-2], self._parts, self.intermediate, self.hidden)
        return parts.narrow(-2, self._first_column, self._columns).flatten(-3, -2)

    def _draw(self, name: str, parameter: torch.Tensor) -> None:
        """Initialises expert by expert, because the whole parameter may not fit on one rank."""
        shape = self.whole_shape(name)[1:]
        for expert in range(self.num_experts):
            whole = parameter.new_empty(shape)
            if self.init is None:
                whole.normal_(std=max(shape[-1], 1) ** -0.5)
            else:
                fill(type(self).__name__, self.init, whole)
            own = expert - self._first_expert
            if 0 <= own < self._experts:
                parameter[own].copy_(self._own_columns(name, whole))

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, num_experts={self.num_experts}, "
            f"ep_size={self.ep_size}, activation={self.activation!r}, max_tokens={self.max_tokens}, "
            f"rank={self.rank} of {self.world_size}"
        )

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The experts' results for this rank's tokens. A collective.

        Args:
            x: [..., H], dtype and device of the weights.
            topk_ids: int32 or int64 [..., k], as in flux.moe.route.
            topk_weights: floating [..., k].

        Returns:
            [..., H] in x's dtype.

        Raises:
            ValueError, TypeError: an argument does not fit; before anything is exchanged.
            CommTimeoutError, RuntimeError: as flux.ag_gemm.
        """
        op = type(self).__name__
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            argument_types.tensor(op, name, tensor)
            if tensor.dim() < 2:
                checks.fail(op, name, "at least 2 dimensions", f"{tensor.dim()}")
        if x.shape[-1] != self.hidden:
            checks.fail(op, "x", f"[..., {self.hidden}]", f"shape {list(x.shape)}")
        if x.dtype != self.w1.dtype:
            checks.fail(op, "x", f"dtype {self.w1.dtype}, that of the weights", x.dtype)
        tokens = x.reshape(-1, self.hidden)
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor.numel() != tokens.shape[0] * tensor.shape[-1]:
                expected = f"[..., k] for {tokens.shape[0]} tokens, those of x"
                checks.fail(op, name, expected, f"shape {list(tensor.shape)}")
        routing = route(
            topk_ids.reshape(-1, topk_ids.shape[-1]),
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            self.num_experts,
            group=self.group_name,
            ep_size=self.ep_size,
            max_tokens=self.max_tokens,
            max_node_tokens=self.max_node_tokens,
        )
        hidden = ag_scatter_gemm(tokens, self.w1, routing, activation=self.activation)
        return gemm_gather_rs(hidden, self.w2, routing).view(x.shape)
