"""Rows of fp8 with their scales as rows of bytes: how the CPU path sends them, so that a row and its scales
arrive together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flux.comm.workspace import round_up
from flux.fp8.scales import Scaling, of_elements

Tensor = torch.Tensor
_ALIGNMENT = 16
_SCALE_BYTES = 4


class Records(NamedTuple):
    """The form of such rows: k elements, then the scales, then padding.

    Attributes:
        k: elements of a row.
        dtype: of its elements, of one byte.
        columns: scales of a row.
    """

    k: int
    dtype: torch.dtype
    columns: int

    @property
    def _scales_at(self) -> int:
        return round_up(self.k, _SCALE_BYTES)

    @property
    def row_bytes(self) -> int:
        return round_up(self._scales_at + _SCALE_BYTES * self.columns, _ALIGNMENT)

    def pack(self, x: Tensor, scale: Tensor) -> Tensor:
        """Rows [rows, k] and their canonical scales as bytes [rows, row_bytes]."""
        packed = torch.zeros(x.shape[0], self.row_bytes, dtype=torch.uint8, device=x.device)
        packed[:, : self.k] = x.view(torch.uint8)
        # Not contiguous(): without rows it keeps steps of 0, with which nothing can be viewed as bytes.
        of_rows = (
            of_elements(scale, x.shape[0]).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        )
        packed[:, self._scales_at : self._scales_at + of_rows.shape[1]] = of_rows
        return packed

    def rows(self, packed: Tensor) -> Tensor:
        """The rows [rows, k] of bytes [rows, row_bytes], a view."""
        return packed[:, : self.k].view(self.dtype)

    def scales(self, packed: Tensor) -> Tensor:
        """Their scales [rows, columns]."""
        if self.columns == 0:  # bytes of no columns cannot be viewed as floats
            return packed.new_empty(packed.shape[0], 0, dtype=torch.float32)
        end = self._scales_at + _SCALE_BYTES * self.columns
        return packed[:, self._scales_at : end].contiguous().view(torch.float32)


def records_of(k: int, dtype: torch.dtype, scaling: Scaling) -> Records:
    return Records(k, dtype, scaling.columns(k))
