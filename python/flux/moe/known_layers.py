"""Layers as calls that C++ repeats (flux.comm.known)."""

from __future__ import annotations

from typing import cast

import torch

from flux import _invariance
from flux.comm import known
from flux.moe.routing import Routing
from flux.ops import grouped_gemm

# Of the arguments of a known call: the ten arrays of the routing, and its weights.
ARRAYS = tuple(range(3, 13))
WEIGHTS = 13


def known_layer(
    op: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    below: bool = False,
) -> torch.Tensor | None:
    """The result of a known call of a layer (flux.comm.known), or None. below: below torch's dispatcher."""
    if torch.compiler.is_compiling() or type(routing) is not Routing:
        return None
    calls = known.of(routing.group_name)
    if calls is None or not (activation is None or isinstance(activation, str)):
        return None
    call, options = calls.call_below if below else calls.call, _options(activation)
    return cast("torch.Tensor | None", call(op, x, weight, *routing[:15], *options))


def layer_recipe(
    op: int, x: torch.Tensor, weight: torch.Tensor, routing: Routing, activation: str | None
) -> known.Recipe:
    """How a layer is called again."""
    return known.Recipe(op, x, weight, *routing[:15], *_options(activation))


def _options(activation: str | None) -> tuple[int, bool]:
    return grouped_gemm.NUMBERS.get(activation, -1), _invariance.active()
