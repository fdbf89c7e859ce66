"""Tensors that kernels can read or write in place, or copies of them; the dtype in which sums are taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of a dtype are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself if TMA can read it in place, else a copy.

    TMA needs unit column stride and rows that start at multiples of 16 bytes.
    """
    if matrix.data_ptr() % 16 == 0:
        if matrix.is_contiguous():  # the kernels' K and N are multiples of 16 bytes
            return matrix
        row_stride, column_stride = matrix.stride()
        if column_stride == 1 and _rows_fit(matrix, row_stride, matrix.shape[1]):
            return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def aligned_experts(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """As aligned, for the weights [E, N, K] of experts, which may lie apart.

    Args:
        transposed: each may be stored as [K, N], too.
    """
    step, rows, columns = weight.stride()
    count, n, k = weight.shape
    lines, length, stride = (n, k, rows) if columns == 1 else (k, n, columns)
    unit = columns == 1 or (transposed and rows == 1)
    apart = count == 1 or _rows_fit(weight, step, lines * stride)
    if weight.data_ptr() % 16 == 0 and unit and _rows_fit(weight, stride, length) and apart:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def _rows_fit(tensor: torch.Tensor, stride: int, length: int) -> bool:
    """Whether TMA can read rows of `length` elements that begin every `stride` elements."""
    return stride >= length and stride * tensor.element_size() % 16 == 0


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and 16-byte aligned, as kernels read it, else a copy."""
    if tensor.data_ptr() % 16 == 0 and tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def in_place(operands: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> bool:
    """Whether kernels read and write the tensors of a call themselves, and no copies."""
    return all(
        operand is None or (tensor is not None and operand.data_ptr() == tensor.data_ptr())
        for operand, tensor in zip(operands, given, strict=True)
    )


def readable_if_any(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As readable, for an optional argument."""
    return None if tensor is None else readable(tensor)


def movable(x: torch.Tensor) -> torch.Tensor:
    """x, or a view of an fp8 x as bytes: neither torch nor all backends copy rows of those types."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def taken(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of x. Differentiable, which a view as another dtype is not."""
    if x.dtype.itemsize > 1:
        return x.index_select(0, rows)
    return movable(x).index_select(0, rows).view(x.dtype)


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [m, k] and zeros behind it: [rows, k]; x itself if it has so many rows."""
    if x.shape[0] == rows:
        return x
    out = x.new_zeros(rows, x.shape[1])
    out[: x.shape[0]] = x
    return out


def writable(out: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor itself if kernels can write it in place, else a new one to copy from."""
    return out if out.data_ptr() % 16 == 0 else torch.empty_like(out)
