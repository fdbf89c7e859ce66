"""Layers as calls that C++ repeats (flux.comm.repeat)."""

from __future__ import annotations

from typing import Any, cast

import torch

from flux import _invariance
from flux.comm import repeat
from flux.fp8.scales import Scales, by_name
from flux.moe.routing import Routing

# Of the arguments of a known call: the ten arrays of the routing.
ARRAYS = Routing._fields[:10]


def known_layer(
    op: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    scaling: tuple[Any, ...],
    below: bool = False,
) -> torch.Tensor | None:
    """The result of a known call of a layer (flux.comm.repeat), or None. scaling: as fp8.arguments
    returns it. below: below torch's dispatcher.
    """
    if torch.compiler.is_compiling() or type(routing) is not Routing:
        return None
    calls = repeat.of(routing.group_name)
    if calls is None:
        return None
    call = calls.call_below if below else calls.call
    options = (activation, _invariance.active(), *scaling)
    return cast("torch.Tensor | None", call(op, x, weight, *routing[:15], *options))


def layer_recipe(
    op: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    scales: Scales | None,
) -> repeat.Recipe:
    """How a layer is called again. scales: as they were given."""
    given = {"x": x, "weight": weight, **dict(zip(Routing._fields[:15], routing, strict=False))}
    given |= {"activation": activation, "batch_invariant": _invariance.active(), **by_name(scales)}
    return repeat.Recipe(op, given)
