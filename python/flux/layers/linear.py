"""nn.Linear with its weight split over the ranks of a group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flux._sharded import Init, ShardedModule, fill, hold
from flux.calls import argument_types, checks
from flux.comm.group import GroupLike
from flux.layers.fp8 import Fp8
from flux.layers.fp8 import check as check_fp8
from flux.layers.functional import SaveGathered, column_linear, row_linear


class _ParallelLinear(ShardedModule):
    """Base of both layers: one slice of a whole weight [out_features, in_features], along `split_dim`."""

    split_dim: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = True,
        gradient_accumulation_fusion: bool = False,
        fp8: Fp8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name, sizes = type(self).__name__, {"out_features": out_features, "in_features": in_features}
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "fp8": fp8, "device": device}
        how |= {"gradient_accumulation_fusion": gradient_accumulation_fusion, "init": init, "dtype": dtype}
        check_options(name, bias, how)
        features = [argument_types.size(name, argument, size) for argument, size in sizes.items()]
        super().__init__(group)
        self.out_features, self.in_features = features
        check_divides(name, list(sizes)[self.split_dim], features[self.split_dim], self.world_size)
        self.sequence_parallel, self.fp8, self.init = sequence_parallel, fp8, init
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        hold(self, "weight", features, [self.split_dim], group, device, dtype)
        if bias:
            hold(self, "bias", features[:1], [None if self.split_dim else 0], group, device, dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _options(self) -> dict[str, Any]:
        how = {"group": self.group_name, "sequence_parallel": self.sequence_parallel, "fp8": self.fp8}
        return {**how, "gradient_accumulation_fusion": self.gradient_accumulation_fusion}

    def _draw(self, name: str, part: torch.Tensor, own: tuple[slice, ...], shape: torch.Size) -> None:
        """Initialises as nn.Linear does, or by `init`."""
        whole = part.new_empty(shape)
        if name == "weight" and self.init is not None:
            fill(type(self).__name__, self.init, whole)
        else:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            whole.uniform_(-bound, bound)
        part.copy_(whole[own])

    def extra_repr(self) -> str:
        told = f"in_features={self.in_features}, out_features={self.out_features}, "
        told += f"bias={self.bias is not None}, rank={self.rank} of {self.world_size}, "
        told += f"sequence_parallel={self.sequence_parallel}"
        return told if self.fp8 is None else f"{told}, fp8={self.fp8}"


def check_options(op: str, bias: object, how: dict[str, Any]) -> None:
    """Checks the arguments that all layers with weights have."""
    argument_types.flag(op, "bias", bias)
    for name in ("sequence_parallel", "gradient_accumulation_fusion"):
        argument_types.flag(op, name, how[name])
    check_fp8(op, how["fp8"])
    argument_types.optional_function(op, "init", how["init"])
    argument_types.device(op, "device", how["device"])
    argument_types.floating_dtype(op, "dtype", how["dtype"])


def check_divides(op: str, argument: str, features: int, world_size: int) -> None:
    if features % world_size:
        checks.fail(op, argument, f"a multiple of the {world_size} ranks of the group", features)


class ColumnParallelLinear(_ParallelLinear):
    """x · weightᵀ + bias, of which each of p ranks computes out_features/p columns.

    x is [M/p, ..., in_features] with `sequence_parallel`, the rank's rows, which the layer gathers; else
    [M, ..., in_features], the same on all ranks. The result is [M, ..., out_features/p].

    Args:
        in_features, out_features: of the whole layer; out_features must be divisible by p.
        bias: whether there is one, of which each rank holds its part.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group. FSDP2
            needs a DeviceMesh, which has the same root as its own.
        sequence_parallel: gather x, and scatter its gradient. Else the gradient of x is summed over ranks.
        save_gathered: keep the gathered x for the backward pass. False: gather it again. "auto": gather it
            again if the plan does so beside a GEMM, else keep it.
        gradient_accumulation_fusion: add a weight's gradient to its attribute `main_grad`, where it has one.
        fp8: multiply in fp8, from operands and gradients that are quantised in each call.
        init: fills the whole weight [out_features, in_features] in place; default: as nn.Linear.
        device, dtype: of the parameters; default: torch's.

    Raises:
        ValueError: out_features is not divisible by p, there is no such group, dtype is not a floating one of
            flux's, or `init` returned another tensor instead of filling the one it got.
        TypeError: an argument is of another type.

    Parameters and state dict: the DTensors "weight" [out_features, in_features] and "bias" [out_features],
    both Shard(0). Loading also takes plain tensors of the whole layer, such as an nn.Linear's, and keeps the
    rank's part. A part of another rank, and a plain one, raise ValueError.

    Example::

        from flux.layers import ColumnParallelLinear

        layer = ColumnParallelLinear(64, 32 * p)
        assert layer(torch.randn(8, 64)).shape == (8 * p, 32)
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = True,
        save_gathered: SaveGathered = False,
        gradient_accumulation_fusion: bool = False,
        fp8: Fp8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        argument_types.flag_or_auto(type(self).__name__, "save_gathered", save_gathered)
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "fp8": fp8, "device": device}
        how |= {"gradient_accumulation_fusion": gradient_accumulation_fusion, "init": init, "dtype": dtype}
        super().__init__(in_features, out_features, bias, group=group, **how)
        self.save_gathered = save_gathered

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "save_gathered": self.save_gathered}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_linear(x, self.weight, self.bias, **self._options())


class RowParallelLinear(_ParallelLinear):
    """x · weightᵀ + bias, summed over p ranks, each with in_features/p columns of x and weight.

    x is [M, ..., in_features/p], as a ColumnParallelLinear leaves it. The result is [M/p, ..., out_features]
    with `sequence_parallel`, the rank's rows; else [M, ..., out_features] on all ranks.

    Args:
        in_features, out_features: of the whole layer; in_features must be divisible by p.
        bias: whether there is one; every rank holds all of it, and its gradient is the same on all ranks.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel: each rank gets its rows of the sum. Else all ranks get all of it.
        gradient_accumulation_fusion: add a weight's gradient to its attribute `main_grad`, where it has one.
        fp8: multiply in fp8, from operands and gradients that are quantised in each call.
        init: fills the whole weight [out_features, in_features] in place; default: as nn.Linear.
        device, dtype: of the parameters; default: torch's.

    Raises:
        ValueError, TypeError: as ColumnParallelLinear, but for in_features.

    Parameters and state dict: the DTensors "weight" [out_features, in_features], Shard(1), and "bias"
    [out_features], Replicate(). Plain tensors of the whole layer load too.

    Example::

        from flux.layers import RowParallelLinear

        layer = RowParallelLinear(16 * p, 64)
        assert layer(torch.randn(8 * p, 16)).shape == (8, 64)
    """

    split_dim = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_linear(x, self.weight, self.bias, **self._options())
