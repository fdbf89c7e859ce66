"""The weighted sum of rows of a product, by a kernel where there is one."""

from __future__ import annotations

from typing import Any

import torch

from flux import _native
from flux.moe import reference
from flux.moe.rows import kernel_takes

_MAX_CHOICES: int = _native.core.MOE_MAX_TOP_K


def weighted_sum(product: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As reference.weighted_sum; if there is a kernel, in one pass and rounded to the dtype of `product`."""
    if not kernel_takes(product, product.shape[1]) or positions.shape[-1] > _MAX_CHOICES:
        return reference.weighted_sum(product, positions, weights)
    out = product.new_empty(*positions.shape[:-1], product.shape[1])
    _combine(product.contiguous(), positions, weights, out)
    return out


_combine: Any = torch.ops.flux._moe_combine.default
