"""Scales of fp8 operands: what callers may pass, and the layout in which kernels read it. Those of tensors
and rows have one block, all of K; block scales one for each 128 of K, of weights for 128 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from flux.comm.workspace import round_up
from flux.errors import fail

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT = (torch.bfloat16, torch.float16, torch.float32)
DEFAULT_OUT = torch.bfloat16
# Old words for kinds of scales: of tensors, and of operands.
OLD_WORDS = {"token": "row", "current": "tensor"}
BLOCK = 128  # of K, and of the columns of a weight
NAMES = ("scale_x", "scale_w", "out_dtype", "accumulate")  # of arguments, in the order of Scales
_SCALE_TYPES = (torch.float32, torch.float8_e8m0fnu)
_SCALE_BYTES, _RECORD_ALIGNMENT = 4, 16
_COLUMN_ALIGNMENT = 4  # fp32 entries of 16 bytes, which TMA loads

Tensor = torch.Tensor
Accumulate = Literal["promoted", "fast"]


class Scaling(NamedTuple):
    """The facts of fp8 operands on which a plan depends. kind: "row" (one scale for each row and column, or
    for all of them), or "block"; of gemm "tensor", too (one for all rows, one for all columns). fast:
    partial sums stay in the tensor core, and are not promoted to fp32.
    """

    kind: str
    out_dtype: torch.dtype
    fast: bool = False

    def __str__(self) -> str:
        fast = ", fast accumulation" if self.fast else ""
        return f"{self.kind} scales, result {str(self.out_dtype).removeprefix('torch.')}{fast}"

    def stays_in_tensor_cores(self, x_dtype: torch.dtype) -> bool:
        """Whether kernels do not promote partial sums. There are fast tiles for e4m3 only."""
        return self.fast and x_dtype == torch.float8_e4m3fn

    def operands(self, x_dtype: torch.dtype) -> dict[str, Any]:
        """What the choice of a tile depends on, besides sizes."""
        fast = self.stays_in_tensor_cores(x_dtype)
        return {"operand_bytes": 1, "block_scales": self.kind == "block", "fast": fast}

    def columns(self, k: int) -> int:
        """Scales of a row of x with k elements."""
        return -(-k // BLOCK) if self.kind == "block" else 1

    def records(self, k: int, x_dtype: torch.dtype) -> Records:
        """The form in which rows of x with k elements travel."""
        return Records(k, x_dtype, self.columns(k))


class Records(NamedTuple):
    """The form of rows that travel with their scales: k bytes, then `columns` scales, then padding."""

    k: int
    dtype: torch.dtype
    columns: int

    @property
    def _scales_at(self) -> int:
        return round_up(self.k, _SCALE_BYTES)

    @property
    def row_bytes(self) -> int:
        return round_up(self._scales_at + _SCALE_BYTES * self.columns, _RECORD_ALIGNMENT)

    def pack(self, x: Tensor, scale: Tensor) -> Tensor:
        """Rows [rows, k] and their canonical scales as bytes [rows, row_bytes]."""
        packed = torch.zeros(x.shape[0], self.row_bytes, dtype=torch.uint8, device=x.device)
        packed[:, : self.k] = x.view(torch.uint8)
        # Not contiguous(): without rows it keeps steps of 0, with which nothing can be viewed as bytes.
        own = of_elements(scale, x.shape[0]).clone(memory_format=torch.contiguous_format)
        packed[:, self._scales_at : self._scales_at + _SCALE_BYTES * own.shape[1]] = own.view(torch.uint8)
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


def kind_of(op: str, scales: str) -> str:
    """Scaling.kind of scales of "tensor", "row" or "block" in an operator."""
    return "row" if scales == "tensor" and op != "gemm" else scales


class Scales(NamedTuple):
    """The scales of a call and what goes with them; see `given`. w: of one weight.

    Canonical ones (`canonical`) are fp32: [1] or [rows], or for blocks x [rows, blocks of K], in memory
    column by column, each starting at a multiple of 16 bytes, and w [blocks of N, blocks of K], contiguous.
    """

    x: Tensor
    w: Tensor
    out_dtype: torch.dtype
    accumulate: str

    def of_rows(self, rows: int, some: Callable[[Tensor], Tensor]) -> Scales:
        """The scales of some rows of x [rows, k], of canonical ones. some: takes those rows from a tensor."""
        return self if self.x.shape[0] != rows or self.x.numel() == 1 else self._replace(x=some(self.x))

    @property
    def whole(self) -> bool:
        """Whether x and the weight have one scale each."""
        return self.x.numel() == self.w.numel() == 1

    def of_product(self, k: int) -> Scaling:
        """As scaling, of canonical scales of one product."""
        return self.scaling(k)._replace(kind="tensor") if self.whole else self.scaling(k)

    def scaling(self, k: int) -> Scaling:
        """The facts for the plan, of checked scales."""
        kind = "block" if is_by_block(self.x, k) else "row"
        return Scaling(kind, self.out_dtype, self.accumulate == "fast")

    def check(
        self, op: str, x: Tensor, weight: Tensor, transpose_weight: bool = False, which: str = ""
    ) -> None:
        """Checks operands x [..., k], weight [n, k], [k, n] or [experts, n, k], that fit, and scales."""
        if x.dtype not in FP8:
            fail(op, "x", "dtype float8_e4m3fn or float8_e5m2 with scales", x.dtype)
        if weight.dtype != torch.float8_e4m3fn:
            fail(op, "weight" + which, "dtype float8_e4m3fn with scales", weight.dtype)
        check_how(op, self.out_dtype, self.accumulate)
        by_block = check_of_rows(op, self.x, x, self.accumulate)
        _check_type(op, "scale_w" + which, self.w, x)
        experts, order = list(weight.shape[:-2]), -1 if transpose_weight else 1
        (n, k), (_, step) = weight.shape[-2:][::order], weight.stride()[-2:][::order]
        if step != 1 and k > 1 and weight.numel() > 0:
            expected = "[n, k] with stride(1) == 1, or [k, n] with transpose_weight=True and stride(0) == 1"
            expected = "[experts, n, k] with stride(2) == 1" if experts else expected
            got = f"shape {list(weight.shape)}, strides {list(weight.stride())}"
            fail(op, "weight" + which, expected, got)
        blocks, shape = [*experts, *(-(-size // BLOCK) for size in weight.shape[-2:])], list(self.w.shape)
        if shape == blocks and (by_block or -(-k // BLOCK) == 1):
            return
        if by_block:
            fail(op, "scale_w" + which, f"shape {blocks}, one entry for each 128 by 128 block", shape)
        known = [[*experts, n], [*experts, 1, n], [*experts, n, 1]]
        known += [experts + [1] * i for i in range(3)] if experts else []
        if self.w.numel() != 1 and shape not in known:
            expected = f"{experts}, {[*experts, n]}" if experts else f"[{n}] or [1, {n}] with such a scale_x"
            expected = f"one entry, {expected}, or blocks {blocks} with block scales"
            fail(op, "scale_w" + which, expected, f"shape {shape}")

    def canonical(self, n: int, k: int, transpose_weight: bool = False) -> Scales:
        """The same scales in the kernels' layout, for x [m, k] and a weight [n, k]."""
        w = _fp32(self.w.t() if transpose_weight and self.w.dim() == 2 else self.w)
        if not is_by_block(self.x, k):
            w = w.reshape(-1)
            if w.shape[0] not in (1, n):  # blocks of 128 columns, of a weight that has one block of K
                w = w.repeat_interleave(BLOCK)[:n]
        return self._replace(x=self.canonical_x(k), w=w.contiguous())

    def canonical_x(self, k: int) -> Tensor:
        """The scales of x [..., k] in the kernels' layout."""
        if is_by_block(self.x, k):
            return column_major(self.x.flatten(0, -2))
        return _fp32(self.x).reshape(-1).contiguous()

    def for_kernel(self, x: Tensor) -> dict[str, Any]:
        """What a kernel gets besides the operands, from canonical scales."""
        fast = self.scaling(x.shape[-1]).stays_in_tensor_cores(x.dtype)
        return {"scale_x": self.x, "scale_w": self.w, "fast": fast}

    def canonical_experts(self, experts: int, n: int, k: int) -> Scales:
        """As canonical, of weights [experts, n, k]: w is [experts], [experts, n], or of blocks."""
        w = _fp32(self.w)
        if not is_by_block(self.x, k):
            w = w.reshape(1).expand(experts) if w.numel() == 1 else w
            w = w.reshape(experts, w.numel() // max(experts, 1))
            if w.shape[1] not in (1, n):
                w = w.repeat_interleave(BLOCK, 1)[:, :n]
            w = w[:, 0] if w.shape[1] == 1 else w
        return self._replace(x=self.canonical_x(k), w=w.contiguous())

    def of_expert(self, expert: int) -> Tensor:
        return self.w[expert : expert + 1] if self.w.dim() == 1 else self.w[expert]

    def x_of(self, rows: slice | Tensor) -> Tensor:
        """The canonical scales of some rows of x, from those of all."""
        return self.x if self.x.dim() == 1 and self.x.shape[0] == 1 else self.x[rows]


def check_how(op: str, out_dtype: torch.dtype, accumulate: str) -> None:
    if out_dtype not in OUT:
        fail(op, "out_dtype", "bfloat16, float16 or float32 with scales", out_dtype)
    if accumulate not in ("promoted", "fast"):
        fail(op, "accumulate", "'promoted' or 'fast'", repr(accumulate))


def check_of_rows(op: str, scale: Tensor, x: Tensor, accumulate: str = "promoted") -> bool:
    """Checks scale_x of x [..., k]; returns whether it has one entry for each block of 128 elements."""
    _check_type(op, "scale_x", scale, x)
    rows, shape = list(x.shape[:-1]), list(scale.shape)
    m = math.prod(rows)
    blocks = -(-x.shape[-1] // BLOCK)
    if blocks != 1 and shape in ([*rows, blocks], [m, blocks]):
        if accumulate == "fast":
            expected = "'promoted' with block scales, as each block is scaled by itself"
            fail(op, "accumulate", expected, "'fast'")
        return True
    if scale.numel() != 1 and shape not in ([*rows, 1], [m, 1], [m]):
        got = f"shape {shape}"
        if shape == [blocks, _padded(m)]:
            got += " (if that is TransformerEngine's layout, pass scale.t()[:m])"
        fail(op, "scale_x", f"one entry, {[*rows, 1]} or {[*rows, blocks]}", got)
    return False


def _check_type(op: str, name: str, scale: Tensor, x: Tensor) -> None:
    if scale.dtype not in _SCALE_TYPES:
        fail(op, name, "dtype float32 or float8_e8m0fnu", scale.dtype)
    if scale.device != x.device:
        fail(op, name, f"device {x.device}, that of x", scale.device)


def given(
    op: str,
    scale_x: Tensor | None = None,
    scale_w: Any = None,
    out_dtype: torch.dtype | None = None,
    accumulate: str = "promoted",
    which: str = "",
) -> Any:
    """The scales of a call from an operator's last arguments, if any; of a list of weights a tuple."""
    if isinstance(scale_w, (list, tuple)):
        numbered = [(each, f"[{i}]" if len(scale_w) > 1 else "") for i, each in enumerate(scale_w)]
        return tuple(given(op, scale_x, each, out_dtype, accumulate, of) for each, of in numbered)
    if scale_x is None and scale_w is None:
        if out_dtype is not None:
            fail(op, "out_dtype", "None or the dtype of x without scales", out_dtype)
        if accumulate != "promoted":
            fail(op, "accumulate", "'promoted' without scales", repr(accumulate))
        return None
    if scale_x is None:
        fail(op, "scale_x", "a tensor, as scale_w is one", None)
    if scale_w is None:
        fail(op, "scale_w" + which, "a tensor, as scale_x is one", None)
    return Scales(scale_x, scale_w, out_dtype or DEFAULT_OUT, accumulate)


def by_name(scales: Scales | Sequence[Scales] | None) -> dict[str, Any]:
    """The arguments that scales of one weight, or of each of several, were given by, for flux.comm.repeat."""
    if isinstance(scales, Scales):
        return dict(zip(NAMES, scales, strict=True))
    if not scales:
        return {}
    x, _, out_dtype, accumulate = scales[0]
    weights = {f"scale_w[{i}]": each.w for i, each in enumerate(scales)}
    return {"scale_x": x, **weights, "out_dtype": out_dtype, "accumulate": accumulate}


def result_dtype(x: Tensor, scales: Scales | None) -> torch.dtype:
    return x.dtype if scales is None else scales.out_dtype


def column_major(scale: Tensor) -> Tensor:
    """Block scales [m, blocks] of rows as fp32 with strides (1, m rounded up to 4), as TMA loads them."""
    rows, blocks = scale.shape
    scale, strides = _fp32(scale), (1, _padded(rows))
    if rows == 1:  # torch gives a single row any stride
        scale = scale.as_strided((1, blocks), (1, scale.stride(1)))
    fits = scale.stride() == strides and scale.data_ptr() % 16 == 0
    return scale if fits else empty_column_major(rows, blocks, scale).copy_(scale)


def empty_column_major(rows: int, blocks: int, like: Tensor) -> Tensor:
    """Memory for block scales in that layout, on the device of a tensor."""
    return like.new_empty_strided((rows, blocks), (1, _padded(rows)), dtype=torch.float32)


def of_elements(scale: Tensor, count: int) -> Tensor:
    """Canonical scales of `count` rows or columns as a matrix with one row for each of them."""
    if scale.dim() == 1:
        return scale.expand(count)[:, None]
    if scale.shape[0] != count:
        scale = scale.repeat_interleave(BLOCK, 0)[:count]
    return scale


def is_by_block(scale: Tensor, k: int) -> bool:
    """Whether a checked scale_x is one of blocks. With one block of K it is one of rows."""
    blocks = -(-k // BLOCK)
    return blocks != 1 and scale.dim() > 1 and scale.shape[-1] == blocks


def _fp32(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else scale.to(torch.float32)


def _padded(rows: int) -> int:
    return -(-rows // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT
