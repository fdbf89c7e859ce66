"""Products of fp8 operands on GPUs where flux has no kernel for them: torch's, or of their values in fp32."""

from __future__ import annotations

import torch

from flux._log import say_once
from flux.ops._product import product
from flux.ops._scales import Scales
from flux.ops._tensors import aligned

Tensor = torch.Tensor
_ALIGNMENT = 16  # of n and k, in elements


def scaled_mm(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales, out: Tensor) -> None:
    """out [m, n] = x [m, k] · weight [n, k]ᵀ + bias [n], with canonical scales."""
    why_not = why_not_torchs(weight.shape[0], weight.shape[1], scales)
    if out.numel() == 0:
        return
    if why_not is None:
        total = _by_torch(x, weight, scales)
    else:
        say_once(f"a product of fp8 operands runs through their values in wider types: {why_not}")
        total = product(x, weight, False, scales)
    if bias is not None:
        total += bias
    out.copy_(total)


def why_not_torchs(n: int, k: int, scales: Scales) -> str | None:
    """Why torch._scaled_mm does not take operands with such scales, or None."""
    if scales.x.dim() == 2:
        return "torch._scaled_mm takes no block scales of 1 by 128 and 128 by 128 in this layout"
    if n % _ALIGNMENT or k % _ALIGNMENT or k == 0:
        return f"torch._scaled_mm takes multiples of {_ALIGNMENT} as n and k, not {n} and {k}"
    return None


def _by_torch(x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
    """The scaled product in fp32. Scales are applied here: torch._scaled_mm takes those of rows for some
    types of results only, and not beside those of whole tensors.
    """
    one = scales.x.new_ones(())
    fast = scales.accumulate == "fast"
    operands = (aligned(x), aligned(weight).t(), one, one)
    total = torch._scaled_mm(*operands, out_dtype=torch.float32, use_fast_accum=fast)
    return total.mul_(scales.x[:, None]).mul_(scales.w)
