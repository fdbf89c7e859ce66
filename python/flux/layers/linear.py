"""nn.Linear with its weight split over the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flux.comm.group import GroupLike, resolve_group
from flux.layers.functional import column_linear, row_linear

Init = Callable[[torch.Tensor], Any]


class _ParallelLinear(nn.Module):
    """What both layers share: one slice of a global weight [out_features, in_features], along `split_dim`."""

    split_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        sequence_parallel: bool = True,
        gradient_accumulation_fusion: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        process_group = resolve_group(group, name)
        self.group_name: str = process_group.group_name
        self.rank, self.world_size = process_group.rank(), process_group.size()
        split = "in_features" if self.split_dim else "out_features"
        shape = [out_features, in_features]
        if shape[self.split_dim] % self.world_size:
            raise ValueError(
                f"{name}: {split}: expected a multiple of the {self.world_size} ranks of the group, "
                f"got {shape[self.split_dim]}"
            )
        shape[self.split_dim] //= self.world_size
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.init = init
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_load_state_dict_pre_hook(_take_own_slices)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as nn.Linear does, or by `init`.

        Every rank draws the whole tensor and keeps its slice. So with equal seeds on all ranks the model is
        the same for every world size, and the ranks' generators stay equal.
        """
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if parameter.is_meta:
                    continue
                whole = parameter.new_empty(self._global_shape(name))
                if name == "weight" and self.init is not None:
                    self.init(whole)
                else:
                    whole.uniform_(-bound, bound)
                parameter.copy_(self.own_slice(name, whole))

    def own_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the global parameter "weight" or "bias"."""
        if name == "bias" and self.split_dim:
            return whole
        return whole.chunk(self.world_size, self.split_dim)[self.rank]

    def _global_shape(self, name: str) -> tuple[int, ...]:
        return (self.out_features, self.in_features) if name == "weight" else (self.out_features,)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank} of {self.world_size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def _take_own_slices(module: _ParallelLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if given is not None and given.shape != parameter.shape and given.shape == module._global_shape(name):
            state[prefix + name] = module.own_slice(name, given)


class ColumnParallelLinear(_ParallelLinear):
    """x · weightᵀ + bias, of which each of p ranks computes out_features/p columns.

    x is [M/p, ..., in_features] with `sequence_parallel`, the rank's rows, which the layer gathers; else
    [M, ..., in_features], the same on all ranks. The result is [M, ..., out_features/p].

    Args:
        in_features, out_features: of the whole layer; out_features must be divisible by p.
        bias: whether there is one, of which each rank holds its part.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel, save_gathered, gradient_accumulation_fusion: as in column_linear.
        init: fills the whole weight [out_features, in_features] in place; default: as nn.Linear.

    Raises:
        ValueError: out_features is not divisible by p, or there is no such group.

    State dict: "weight" [out_features/p, in_features] and "bias" [out_features/p] of this rank. Loading also
    takes those of the whole layer, such as an nn.Linear's, and keeps the rank's part.
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        save_gathered: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.save_gathered = save_gathered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return column_linear(
            x,
            [self.weight],
            [self.bias],
            group=self.group_name,
            sequence_parallel=self.sequence_parallel,
            save_gathered=self.save_gathered,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )[0]


class RowParallelLinear(_ParallelLinear):
    """x · weightᵀ + bias, summed over p ranks, each with in_features/p columns of x and weight.

    x is [M, ..., in_features/p], as a ColumnParallelLinear leaves it. The result is [M/p, ..., out_features]
    with `sequence_parallel`, the rank's rows; else [M, ..., out_features] on all ranks.

    Args:
        in_features, out_features: of the whole layer; in_features must be divisible by p.
        bias: whether there is one; every rank holds all of it, and its gradient is the same on all ranks.
        group: ProcessGroup, one-dimensional DeviceMesh, group name, or None for the default group.
        sequence_parallel, gradient_accumulation_fusion: as in row_linear.
        init: fills the whole weight [out_features, in_features] in place; default: as nn.Linear.

    Raises:
        ValueError: in_features is not divisible by p, or there is no such group.

    State dict: "weight" [out_features, in_features/p] of this rank, "bias" [out_features]. Loading also takes
    the whole weight.
    """

    split_dim = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_linear(
            x,
            self.weight,
            self.bias,
            group=self.group_name,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )
