"""Products of rows and a weight in the wide type, before bias and rounding: the arithmetic of references and
of the CPU path, for operands with and without scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flux._invariance import demanded
from flux._memory import wide_type
from flux.fp8.scales import BLOCK, Scales, of_elements

Tensor = torch.Tensor


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
            total += (
                _mm(x[:, part].to(weight.dtype), weight[part])
                * of_rows[:, block, None]
                * of_columns[:, block]
            )
        return total


def wide_expert(weight: Tensor, expert: int, scales: Scales | None) -> WideWeight:
    """One of the weights [experts, n, k]. scales: canonical, of all of them."""
    return WideWeight(weight[expert], scale=None if scales is None else scales.of_expert(expert))


def product(
    x: Tensor, weight: Tensor, transpose_weight: bool = False, scales: Scales | None = None
) -> Tensor:
    """x [m, k] · weight [n, k] (or [k, n]) in the wide type. scales: canonical."""
    if scales is None:
        return WideWeight(weight, transpose_weight).times(x)
    return WideWeight(weight, transpose_weight, scales.w).times(x, scale=scales.x)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), of x [m, ...] on a CPU; if calls must be batch invariant, computed row by row.

    torch's functions for CPUs add in an order that may depend on the number of rows, and on alignment.
    """
    if not demanded() or x.shape[0] <= 1:
        return function(x)
    return torch.cat([function(x[i : i + 1].clone()) for i in range(x.shape[0])])


def _mm(x: Tensor, w: Tensor) -> Tensor:
    """x [m, k] · w [k, n] on a CPU."""
    return by_rows(lambda rows: torch.mm(rows, w), x)
