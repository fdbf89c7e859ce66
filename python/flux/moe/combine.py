"""The weighted sum of rows of a product, by a kernel where there is one."""

from __future__ import annotations

from typing import Any

import torch

from flux import _native
from flux.comm import cuda
from flux.moe import reference

_MAX_CHOICES: int = _native.core.MOE_MAX_TOP_K


def weighted_sum(product: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As reference.weighted_sum; if there is a kernel, in one pass and rounded to the dtype of `product`."""
    kernel_takes = product.dtype in (torch.bfloat16, torch.float16) and product.shape[1] % 8 == 0
    kernel_takes = kernel_takes and positions.shape[-1] <= _MAX_CHOICES
    if not product.is_cuda or not kernel_takes or cuda.why_not(product.device) is not None:
        return reference.weighted_sum(product, positions, weights)
    out = product.new_empty(*positions.shape[:-1], product.shape[1])
    _combine(product.contiguous(), positions, weights, out)
    return out


_combine: Any = torch.ops.flux._moe_combine.default
