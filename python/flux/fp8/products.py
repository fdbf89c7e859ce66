"""Products outside flux's kernels: in the wide type (references, CPUs), and torch's of fp8 on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flux._invariance import demanded
from flux._log import say_once
from flux._memory import aligned, wide_type
from flux.fp8.scales import BLOCK, Scales, of_elements

Tensor = torch.Tensor
_ALIGNMENT = 16  # of n and k, in elements


class WideWeight:
    """A weight [n, k] (or [k, n]) in the wide type, and canonical scales of its columns."""

    def __init__(self, weight: Tensor, transpose_weight: bool = False, scale: Tensor | None = None) -> None:
        self._weight = (weight if transpose_weight else weight.t()).to(wide_type(weight.dtype))
        self._scale = None
        if scale is not None:
            self._scale = of_elements(scale, self._weight.shape[1])

    def times(self, x: Tensor, columns: slice = slice(None), scale: Tensor | None = None) -> Tensor:
        """x [rows, k] · some columns of the weight, in the wide type. scale: canonical, of these rows."""
        weight = self._weight[:, columns]
        if scale is None or self._scale is None:
            return _mm(x.to(weight.dtype), weight)
        of_rows, of_columns = of_elements(scale, x.shape[0]), self._scale[columns]
        step = BLOCK if of_rows.shape[1] > 1 else max(x.shape[1], 1)
        total = torch.zeros(x.shape[0], weight.shape[1], dtype=weight.dtype, device=x.device)
        for block in range(of_rows.shape[1]):
            part = slice(block * step, (block + 1) * step)
            summand = _mm(x[:, part].to(weight.dtype), weight[part]) * of_rows[:, block, None]
            total += summand * of_columns[:, block]
        return total


def wide_expert(weight: Tensor, expert: int, scales: Scales | None) -> WideWeight:
    """One of the weights [experts, n, k]. scales: canonical, of all of them."""
    return WideWeight(weight[expert], scale=None if scales is None else scales.of_expert(expert))


def product(
    x: Tensor, weight: Tensor, transpose_weight: bool = False, scales: Scales | None = None
) -> Tensor:
    """x [m, k] · weight [n, k] (or [k, n]) in the wide type. scales: canonical."""
    of_x, of_w = (None, None) if scales is None else scales[:2]
    return WideWeight(weight, transpose_weight, of_w).times(x, scale=of_x)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) on a CPU; row by row if calls must be batch invariant: torch's order of sums may vary."""
    if not demanded() or x.shape[0] <= 1:
        return function(x)
    return torch.cat([function(x[i : i + 1].clone()) for i in range(x.shape[0])])


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return by_rows(lambda rows: torch.mm(rows, w), x)


def scaled_mm(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales, out: Tensor) -> None:
    """out [m, n] = x [m, k] · weight [n, k]ᵀ + bias [n], with canonical scales."""
    n, k = weight.shape
    why_not = why_not_torchs(n, k, scales.scaling(k).kind)
    if out.numel() == 0:
        return
    adds_bias = bias is None or out.dtype != torch.float32  # torch._scaled_mm adds none to fp32
    if why_not is not None:
        say_once(f"a product of fp8 operands runs through their values in wider types: {why_not}")
        total = product(x, weight, False, scales)
    else:
        operands = aligned(x), aligned(weight).t()
        how: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": scales.accumulate == "fast"}
        if adds_bias and scales.whole:  # one kernel
            how |= {"scale_a": scales.x.reshape(()), "scale_b": scales.w.reshape(()), "bias": bias}
            if out.is_contiguous():
                torch._scaled_mm(*operands, **how, out=out)
            else:
                out.copy_(torch._scaled_mm(*operands, **how))
            return
        # In fp32, because torch takes scales of rows for some results only, and not beside those of tensors.
        one = scales.x.new_ones(())
        total = torch._scaled_mm(*operands, one, one, **{**how, "out_dtype": torch.float32})
        total.mul_(scales.x[:, None]).mul_(scales.w)
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
