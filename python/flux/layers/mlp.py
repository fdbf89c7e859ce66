"""The feed-forward block of a transformer, split over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from flux._sharded import Init, is_placed, local
from flux.calls import argument_types
from flux.comm.group import GroupLike, world_size
from flux.layers.fp8 import Fp8
from flux.layers.functional import SaveGathered, column_linear
from flux.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divides, check_options
from flux.ops.autograd import concatenated
from flux.ops.grouped_gemm import silu_slope


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))): two column-parallel layers and a row-parallel one.

    Gate and up share one gather of x, and their gradients one scatter. Their weights lie next to each other
    in memory, so that this takes one product of both.

    Args:
        hidden_size: features of x and of the result.
        ffn_size: features between the layers, over all ranks; divisible by the ranks of the group.
        activation: "swiglu", with a gate, or "gelu", without.
        bias: whether the layers have biases.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel: x and the result are the rank's rows. Else all rows, on all ranks.
        save_gathered: keep the gathered x for the backward pass, True, False or "auto".
        gradient_accumulation_fusion: add a weight's gradient to its attribute `main_grad`, where it has one.
        fp8: multiply in fp8, from operands and gradients that are quantised in each call.
        init: fills a whole weight [out_features, in_features] in place; default: as nn.Linear.
        device, dtype: of the parameters; default: torch's.

    x and the result are [M/p, ..., hidden_size] with `sequence_parallel` (the default), else [M, ...,
    hidden_size]. State dict: "gate_proj.", "up_proj." and "down_proj." with weight and bias.

    Raises:
        ValueError: unknown activation, ffn_size is not divisible by p, or as the layers.
        TypeError: an argument is of another type.

    Example::

        from flux.layers import ParallelMLP

        mlp = ParallelMLP(64, 24 * p)
        x = torch.randn(8, 64)  # the rank's rows
        assert mlp(x).shape == (8, 64)
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        group: GroupLike = None,
        sequence_parallel: bool = True,
        save_gathered: SaveGathered = False,
        gradient_accumulation_fusion: bool = False,
        fp8: Fp8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        op = type(self).__name__
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "fp8": fp8, "device": device}
        how |= {"gradient_accumulation_fusion": gradient_accumulation_fusion, "init": init, "dtype": dtype}
        check_options(op, bias, how)
        argument_types.flag_or_auto(op, "save_gathered", save_gathered)
        hidden_size = argument_types.size(op, "hidden_size", hidden_size)
        ffn_size = argument_types.size(op, "ffn_size", ffn_size)
        check_divides(op, "ffn_size", ffn_size, world_size(group, op))
        if activation not in ("swiglu", "gelu"):
            raise ValueError(f"{op}: activation: expected 'swiglu' or 'gelu', got {activation!r}")
        super().__init__()
        how |= {"group": group}
        column = partial(
            ColumnParallelLinear, hidden_size, ffn_size, bias, save_gathered=save_gathered, **how
        )
        self.gate_proj = column() if activation == "swiglu" else None
        self.up_proj = column()
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, bias, **how)
        self._put_side_by_side()
        self.register_load_state_dict_post_hook(ParallelMLP._put_side_by_side)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelMLP:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._put_side_by_side()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._put_side_by_side()

    def _put_side_by_side(self, *_: object) -> None:
        """Gives gate and up one storage. Moving, copying or loading the module separates their weights."""
        if self.gate_proj is None:
            return
        weights: list[Any] = [self.gate_proj.weight, self.up_proj.weight]
        # FSDP2 cuts weights further, and keeps the parts where it wants them.
        if any(not is_placed(weight) or len(weight.placements) > 1 for weight in weights):
            return
        parts = [local(weight) for weight in weights]
        if any(type(part) is not torch.Tensor or part.is_meta for part in parts):
            return
        with torch.no_grad():
            first, second = concatenated(parts, 0).chunk(2)
            # A storage object of its own: torch.compile refuses DTensors that share one.
            weights[0]._local_tensor, weights[1]._local_tensor = first, torch.utils.dlpack.from_dlpack(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj, self.up_proj
        if gate is None:
            return self.down_proj(nn.functional.gelu(up(x)))  # type: ignore[no-any-return]
        given = x, [gate.weight, up.weight], [gate.bias, up.bias]
        gated, result = column_linear(*given, **up._options())
        return self.down_proj(_swiglu(gated, result))  # type: ignore[no-any-return]


class _Swiglu(torch.autograd.Function):
    """silu(gate) * up, whose two gradients lie side by side for the product that sums over them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_silu = torch.ops.aten.silu_backward
        # The code below is not differentiable and cannot be traced.
        if torch.compiler.is_compiling():
            return of_silu(grad * up, gate), grad * nn.functional.silu(gate)
        if torch.is_grad_enabled():
            return grad * up * silu_slope(gate), grad * nn.functional.silu(gate)
        both = grad.new_empty([*grad.shape[:-1], 2, grad.shape[-1]])
        of_gate, of_up = both.unbind(-2)
        of_silu(grad * up, gate, grad_input=of_gate)
        torch.mul(grad, nn.functional.silu(gate), out=of_up)
        return of_gate, of_up


_swiglu: Any = _Swiglu.apply
