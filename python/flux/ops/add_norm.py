"""A residual added to a sum, and the RMSNorm of both, by one kernel. For adapters: it knows no gradients."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from flux import _native
from flux.calls import front
from flux.comm import repeat
from flux.ops.norm_and_quant import row_norm

Tensor = torch.Tensor
_OP = repeat.operator()
_VECTOR = 8  # elements of 16 bits that the kernel loads at once


def add_norm_(
    total: Tensor, residual: Tensor, weight: Tensor, eps: float, within: repeat.Recipe | None = None
) -> Tensor:
    """total += residual, rounded; returns the RMSNorm of total's rows (arXiv 1910.07467). total, residual:
    [rows, n]. weight: [n]. within: as of front.below.
    """
    recipe = repeat.Recipe(_OP, {"total": total, "residual": residual, "weight": weight, "eps": eps}, within)
    done = None if within is not None else repeat.without_group().call_below(*recipe.given)
    if done is not None:
        return cast(Tensor, done)
    if not _fits(total, residual, weight):
        total += residual
        return row_norm(total, weight, eps)
    out = torch.empty_like(total)
    enqueue = functools.partial(_kernel, total, residual, weight, eps, out)
    enqueue()
    front.remember("_add_norm", recipe, enqueue, results={"out": out})
    return out


def _fits(total: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the kernel reads and writes these in place."""
    tensors = (total, residual, weight)
    return (
        total.is_cuda
        and _native.available()
        and total.dtype in (torch.bfloat16, torch.float16)
        and total.numel() > 0
        and total.shape[1] % _VECTOR == 0
        and all(each.dtype == total.dtype and each.is_contiguous() for each in tensors)
        and all(each.data_ptr() % 16 == 0 for each in tensors)
    )


_kernel: Any = torch.ops.flux._add_norm.default
