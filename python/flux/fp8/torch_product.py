"""Products of fp8 operands on GPUs that flux's kernel does not compute, or torch's sooner: torch's, or of
their values in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from flux._log import say_once
from flux._memory import aligned
from flux.fp8.scales import Scales
from flux.fp8.wide_product import product

Tensor = torch.Tensor
_ALIGNMENT = 16  # of n and k, in elements


def scaled_mm(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales, out: Tensor) -> None:
    """out [m, n] = x [m, k] · weight [n, k]ᵀ + bias [n], with canonical scales."""
    n, k = weight.shape
    why_not = why_not_torchs(n, k, scales.scaling(k).kind)
    if out.numel() == 0:
        return
    adds_bias = bias is None or out.dtype != torch.float32  # torch._scaled_mm adds none to fp32
    if why_not is None and adds_bias and scales.whole:
        _of_whole_tensors(x, weight, bias, scales, out)
        return
    if why_not is None:
        total = _by_torch(x, weight, scales)
    else:
        say_once(f"a product of fp8 operands runs through their values in wider types: {why_not}")
        total = product(x, weight, False, scales)
    if bias is not None:
        total += bias
    out.copy_(total)


def why_not_torchs(n: int, k: int, kind: str) -> str | None:
    """Why torch._scaled_mm does not take operands with scales of a kind (Scaling.kind), or None."""
    if kind == "block":
        return "torch._scaled_mm takes no block scales of 1 by 128 and 128 by 128 in this layout"
    if n % _ALIGNMENT or k % _ALIGNMENT or k == 0:
        return f"torch._scaled_mm takes multiples of {_ALIGNMENT} as n and k, not {n} and {k}"
    return None


def _of_whole_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales, out: Tensor) -> None:
    """The product with one scale for each operand: one kernel."""
    operands = (aligned(x), aligned(weight).t(), scales.x.reshape(()), scales.w.reshape(()))
    how: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": scales.accumulate == "fast"}
    if out.is_contiguous():
        torch._scaled_mm(*operands, bias=bias, **how, out=out)
    else:
        out.copy_(torch._scaled_mm(*operands, bias=bias, **how))


def _by_torch(x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
    """The scaled product in fp32. Scales are applied here: torch._scaled_mm takes those of rows for some
    types of results only, and not beside those of whole tensors.
    """
    one = scales.x.new_ones(())
    fast = scales.accumulate == "fast"
    operands = (aligned(x), aligned(weight).t(), one, one)
    total = torch._scaled_mm(*operands, out_dtype=torch.float32, use_fast_accum=fast)
    return total.mul_(scales.x[:, None]).mul_(scales.w)
