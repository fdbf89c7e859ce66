"""RMSNorm of rows where no kernel of flux computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from flux.ops import _invariant
from flux.ops._tensors import wide_type


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight, the mean over the last dimension (arXiv 1910.07467).

    In fp32 (float64: in float64), rounded once.
    """
    wide = x.to(wide_type(x.dtype))
    squares = wide.square().view(wide.shape[:-1].numel(), wide.shape[-1])
    mean = _invariant.by_rows(lambda rows: rows.mean(-1, keepdim=True), squares)
    scale = torch.rsqrt(mean.view(*wide.shape[:-1], 1) + eps)
    return (wide * scale * weight).to(x.dtype)


def row_norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm by the fastest way on total's device."""
    if total.is_cuda:  # one kernel there; the same sum in fp32 and the same one rounding
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
    return rms_norm(total, weight, eps)
