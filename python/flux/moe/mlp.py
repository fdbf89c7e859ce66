"""A whole expert layer: routing, both GEMMs, and the communication of both."""

from __future__ import annotations

import math

import torch
from torch import nn

from flux import _deprecated
from flux._sharded import Init, ShardedModule, fill, hold, local_parts
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
        hidden_size: H, of the tokens.
        ffn_size: I, of each expert.
        num_experts: E, of the whole layer.
        group: all ranks over which tokens are distributed: ProcessGroup, one-dimensional DeviceMesh, group
            name, or None for the default group.
        ep_size: into how many slices experts are cut; 1: tensor, p: expert parallelism. Slice e is on
            the tp = p / ep_size ranks from e * tp on, each with a part of the columns.
        activation: "swiglu", "silu", "gelu" or None.
        max_tokens: what no rank exceeds; the same on all ranks. None: all ranks have as many tokens.
        max_node_tokens: how many tokens of a rank any other node needs at most. None: any number.
        init: fills the whole weight of one expert, [N, H] or [H, I], in place. Default: normal, with the
            standard deviation 1 / sqrt(H) or 1 / sqrt(I).
        dtype, device: of the parameters; default: torch's.

    Attributes:
        w1: a DTensor [E, I, H], for "swiglu" [E, 2, I, H]: gates and ups. Each rank has E / ep_size experts
            and I / tp of their columns.
        w2: a DTensor [E, H, I], cut in the same way.

    Raises:
        ValueError: ep_size does not divide the ranks, num_experts is not a multiple of ep_size, ffn_size
            not one of tp, or another argument does not fit.
        TypeError: an argument is of another type.

    With equal seeds on all ranks the layer is the same for every world size and ep_size: every rank draws all
    experts, one after the other, and keeps its slices.

    State dict: the DTensors "w1" and "w2". Loading also takes those of the whole layer as plain tensors, for
    "swiglu" w1 also as [E, 2 * I, H] (all gates, then all ups), and keeps the rank's part. A part of another
    rank, and a plain one, raise ValueError.

    With 1 < ep_size < p, the first layer makes a process group for each slice, and is a collective.

    Example::

        from flux.moe import MoEMLP

        experts = MoEMLP(64, 32 * p, num_experts=4, dtype=torch.float32)
        scores = torch.randn(3, 4).softmax(-1)  # of your router, for 3 tokens
        topk_weights, topk_ids = scores.topk(2)
        assert experts(torch.randn(3, 64), topk_ids, topk_weights).shape == (3, 64)
    """

    w1: nn.Parameter
    w2: nn.Parameter
    hidden = _deprecated.attribute("hidden", "hidden_size")
    intermediate = _deprecated.attribute("intermediate", "ffn_size")

    @_deprecated.arguments(hidden="hidden_size", intermediate="ffn_size")
    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        group: GroupLike = None,
        ep_size: int = 1,
        activation: str | None = "swiglu",
        max_tokens: int | None = None,
        max_node_tokens: int | None = None,
        init: Init | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        op = type(self).__name__
        hidden_size = argument_types.size(op, "hidden_size", hidden_size)
        ffn_size = argument_types.size(op, "ffn_size", ffn_size)
        num_experts = argument_types.size(op, "num_experts", num_experts, 1)
        ep_size = argument_types.size(op, "ep_size", ep_size, 1)
        if activation is not None and activation not in ACTIVATIONS:
            checks.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
        for name, most in (("max_tokens", max_tokens), ("max_node_tokens", max_node_tokens)):
            argument_types.size(op, name, 0 if most is None else most)
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
        if ffn_size % tp:
            checks.fail(op, "ffn_size", f"a multiple of the {tp} ranks of a slice", ffn_size)
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        self.ep_size, self.activation, self.max_tokens, self.init = ep_size, activation, max_tokens, init
        self.max_node_tokens = max_node_tokens
        self._gates = (2,) if activation == "swiglu" else ()  # gates and ups, which are cut alike
        shapes = (num_experts, *self._gates, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        for name, shape, columns in zip(("w1", "w2"), shapes, (len(self._gates) + 1, 2), strict=True):
            cuts = [0, columns] if 1 < ep_size < p else [0 if ep_size == p else columns]
            hold(self, name, shape, cuts, group, device, dtype, slices=ep_size)
        self.reset_parameters()

    def as_whole(self, name: str, given: torch.Tensor) -> torch.Tensor:
        """A tensor of a state dict, with gates and ups apart."""
        is_flat = name == "w1" and self._gates and given.dim() == 3 and given.shape[1] % 2 == 0
        return given.reshape(len(given), 2, -1, given.shape[2]) if is_flat else given

    def _draw(self, name: str, part: torch.Tensor, own: tuple[slice, ...], shape: torch.Size) -> None:
        """Initialises expert by expert, because the whole parameter may not fit on one rank."""
        for expert in range(self.num_experts):
            whole = part.new_empty((math.prod(shape[1:-1]), shape[-1]))
            if self.init is None:
                whole.normal_(std=max(shape[-1], 1) ** -0.5)
            else:
                fill(type(self).__name__, self.init, whole)
            if own[0].start <= expert < own[0].stop:
                part[expert - own[0].start].copy_(whole.view(shape[1:])[own[1:]])

    def extra_repr(self) -> str:
        names = ("hidden_size", "ffn_size", "num_experts", "ep_size", "activation", "max_tokens")
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{told}, rank={self.rank} of {self.world_size}"

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
        choices = {"topk_ids": topk_ids, "topk_weights": topk_weights}
        for name, tensor in {"x": x, **choices}.items():
            argument_types.tensor(op, name, tensor)
            if tensor.dim() < 2:
                checks.fail(op, name, "at least 2 dimensions", f"{tensor.dim()}")
        if x.shape[-1] != self.hidden_size:
            checks.fail(op, "x", f"[..., {self.hidden_size}]", f"shape {list(x.shape)}")
        w1, w2 = local_parts([self.w1, self.w2])
        if x.dtype != w1.dtype:
            checks.fail(op, "x", f"dtype {w1.dtype}, that of the weights", x.dtype)
        tokens = x.reshape(-1, self.hidden_size)
        for name, tensor in choices.items():
            if tensor.numel() != tokens.shape[0] * tensor.shape[-1]:
                expected = f"[..., k] for {tokens.shape[0]} tokens, those of x"
                checks.fail(op, name, expected, f"shape {list(tensor.shape)}")
        ids, scores = [each.reshape(-1, each.shape[-1]) for each in choices.values()]
        limits = {"max_tokens": self.max_tokens, "max_node_tokens": self.max_node_tokens}
        group, ep_size = self.group_name, self.ep_size
        routing = route(ids, scores, self.num_experts, group=group, ep_size=ep_size, **limits)
        hidden = ag_scatter_gemm(tokens, w1.flatten(1, -2), routing, activation=self.activation)
        return gemm_gather_rs(hidden, w2, routing).view(x.shape)
