"""The weighted sum of rows of a product, by a kernel where there is one."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flux import _native
from flux.comm import repeat
from flux.moe import reference
from flux.moe.rows import kernel_takes

_OP = repeat.operator()
_MAX_CHOICES: int = _native.core.MOE_MAX_TOP_K


def weighted_sum(
    product: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    within: repeat.Recipe | None = None,
) -> torch.Tensor:
    """As reference.weighted_sum; if there is a kernel, in one pass and rounded to the dtype of `product`.
    within: of the call that this one is a part of, if that is to be known (flux.comm.repeat).
    """
    if not kernel_takes(product, product.shape[1]) or positions.shape[-1] > _MAX_CHOICES:
        return reference.weighted_sum(product, positions, weights)
    out = product.new_empty(*positions.shape[:-1], product.shape[1])
    enqueue = functools.partial(_combine, product.contiguous(), positions, weights, out)
    enqueue()
    if within is not None and product.is_contiguous():
        given = {"product": product, "positions": positions, "weights": weights}
        recipe = repeat.Recipe(_OP, given, within)
        within.add(recipe, enqueue, [[*recipe.numbers(*given), recipe.returns(out)]], [0], [None])
    return out


_combine: Any = torch.ops.flux._moe_combine.default
