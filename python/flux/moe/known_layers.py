"""Layers as calls that C++ repeats (flux.comm.repeat)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from flux import _invariance
from flux._memory import in_place
from flux.comm import repeat
from flux.fp8.scales import Scales, tensors
from flux.moe.routing import Routing

# Of the arguments of a known call: the ten arrays of the routing, its weights, and the scales.
ARRAYS = tuple(range(3, 13))
WEIGHTS = 13
_SCALES = 20


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
    options = (activation, _invariance.active(), *(scales or ()))
    return repeat.Recipe(op, x, weight, *routing[:15], *options)


def scale_operands(
    recipe: repeat.Recipe, operands: Sequence[torch.Tensor], scales: Scales | None
) -> list[int] | None:
    """The operands for the scales of a launch; None if it reads copies of arguments, and cannot be repeated.

    Args:
        operands: x and weight as the launch reads them.
        scales: as it reads them.
    """
    of_scales = tensors(scales)
    numbers = range(_SCALES, _SCALES + len(of_scales))
    given = (*recipe.given[1:3], *(recipe.given[number] for number in numbers))
    return list(numbers) if in_place((*operands, *of_scales), given) else None
