"""Grouped GEMM: rows that are sorted by expert, each times the weight of its expert."""

from __future__ import annotations

from typing import Any

import torch

from flux import _native
from flux._log import say_once
from flux.comm import cuda
from flux.ops import _check, _gate, _invariant
from flux.ops._library import library
from flux.ops._tensors import readable, wide_type

ACTIVATIONS = ("silu", "gelu", "swiglu")  # in the order of csrc/moe/sm90_grouped_gemm.cuh
_BLOCK_M: int = _native.core.tile_configs()[0].block_m


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """activation(x[rows] · weight[e]ᵀ) for the rows of each expert e, accumulated in fp32 and rounded once.

    Experts may have any number of rows, none too. Nothing is read on the host, but for types and sizes that
    torch has no grouped GEMM for.

    Args:
        x: [M, K], bfloat16, float16, float32 or float64.
        weight: [E, N, K], each expert's as in nn.Linear; dtype and device of x.
        offsets: int32 [E + 1]. Rows offsets[e] to offsets[e + 1] are expert e's; the first entry is 0, none
            is smaller than the one before, and the last is at most R. Checked on CPUs only.
        rows: int32 or int64 [R]: result row i is made of x[rows[i]]. None: of x[i]. Checked on CPUs only, for
            the rows of experts.
        activation: "silu", "gelu" (the exact one), "swiglu" (silu of the first N/2 columns times the last
            N/2), or None.

    Returns:
        [R, N] (without `rows` [M, N]; for "swiglu" N/2 columns) in x's dtype, a fresh tensor. What its rows
        from offsets[E] on hold is not specified.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit.

    Example::

        x, weight = torch.randn(6, 64), torch.randn(3, 32, 64)
        offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)  # 2 rows, none, 4 rows
        out = flux.grouped_gemm(x, weight, offsets, activation="silu")
        assert out.shape == (6, 32)
    """
    _gate.check("grouped_gemm", x=x, weight=weight, offsets=offsets, rows=rows, activation=activation)
    result: torch.Tensor = _op(x, weight, offsets, rows, activation)
    return result


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """grouped_gemm with torch only, expert by expert; rows without an expert are zero. Reads the offsets on
    the host.
    """
    shape = _checked(x, weight, offsets, rows, activation)
    wide = wide_type(x.dtype)
    out = x.new_zeros(shape)
    bounds = _checked_bounds(x, offsets, rows)
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        mine = x[first:last] if rows is None else x[rows[first:last].long()]
        out[first:last] = activate(mine.to(wide) @ weight[expert].to(wide).t(), activation)
    return out


def _checked_bounds(x: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor | None) -> list[int]:
    """Checks the values of offsets and rows; returns the offsets."""
    op = "grouped_gemm"
    bounds: list[int] = offsets.tolist()
    count = x.shape[0] if rows is None else rows.shape[0]
    if bounds[0] != 0:
        _check.fail(op, "offsets", "0 as the first entry", bounds[0])
    for before, after in zip(bounds, bounds[1:], strict=False):
        if after < before:
            _check.fail(op, "offsets", "entries that do not decrease", f"{after} after {before}")
    if bounds[-1] > count:
        _check.fail(op, "offsets", f"entries up to the {count} rows", bounds[-1])
    if rows is not None and bounds[-1] > 0:
        low, high = (int(bound) for bound in rows[: bounds[-1]].aminmax())
        if low < 0 or high >= x.shape[0]:
            _check.fail(op, "rows", f"numbers of the {x.shape[0]} rows of x", low if low < 0 else high)
    return bounds


def activate(product: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of products in their wide type."""
    if activation == "swiglu":
        gate, up = product.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if activation == "silu":
        return torch.nn.functional.silu(product)
    return torch.nn.functional.gelu(product) if activation == "gelu" else product


def expert_weight(op: str, x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> int:
    """Checks x [M, K], weight [E, N, K] and the activation; returns the columns of the result."""
    _invariant.refuse(op)
    if x.dim() != 2:
        _check.fail(op, "x", "2 dimensions [m, k]", f"{x.dim()}")
    if weight.dim() != 3:
        _check.fail(op, "weight", "3 dimensions [experts, n, k]", f"{weight.dim()}")
    if weight.shape[2] != x.shape[1]:
        _check.fail(
            op,
            "weight",
            f"[experts, n, k] with k = {x.shape[1]}, the last dimension of x",
            f"shape {list(weight.shape)}",
        )
    if x.dtype not in _check.FLOATING:
        _check.fail(op, "x", "dtype bfloat16, float16, float32 or float64", x.dtype)
    if weight.dtype != x.dtype:
        _check.fail(op, "weight", f"dtype {x.dtype}, that of x", weight.dtype)
    if weight.device != x.device:
        _check.fail(op, "weight", f"device {x.device}, that of x", weight.device)
    if activation is not None and activation not in ACTIVATIONS:
        _check.fail(op, "activation", f"None or one of {', '.join(ACTIVATIONS)}", repr(activation))
    n = weight.shape[1]
    if activation != "swiglu":
        return n
    if n % 2:
        _check.fail(op, "weight", "an even n for swiglu", f"shape {list(weight.shape)}")
    return n // 2


def _checked(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
) -> list[int]:
    op = "grouped_gemm"
    columns = expert_weight(op, x, weight, activation)
    experts = weight.shape[0]
    if list(offsets.shape) != [experts + 1]:
        _check.fail(op, "offsets", f"shape [{experts + 1}], one more than experts", list(offsets.shape))
    if offsets.dtype != torch.int32:
        _check.fail(op, "offsets", "dtype int32", offsets.dtype)
    if offsets.device != x.device:
        _check.fail(op, "offsets", f"device {x.device}, that of x", offsets.device)
    if rows is None:
        return [x.shape[0], columns]
    if rows.dim() != 1:
        _check.fail(op, "rows", "1 dimension", rows.dim())
    if rows.dtype not in (torch.int32, torch.int64):
        _check.fail(op, "rows", "dtype int32 or int64", rows.dtype)
    if rows.device != x.device:
        _check.fail(op, "rows", f"device {x.device}, that of x", rows.device)
    return [rows.shape[0], columns]


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    return x.new_empty(_checked(x, weight, offsets, rows, activation))


def _cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    shape = _checked(x, weight, offsets, rows, activation)
    if 0 in shape or x.shape[1] == 0:
        return x.new_zeros(shape)
    if _why_not(x, shape[1]) is None:
        out = x.new_empty(shape)
        launch(x, weight, offsets, rows, activation, out)
        return out
    if rows is not None:
        # Entries after the last expert's rows may be invalid.
        x = x.index_select(0, rows.clamp(min=0))
    return unfused(x, weight, offsets, activation)


def _why_not(x: torch.Tensor, columns: int) -> str | None:
    """Why the kernel does not support the arguments, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
    if x.shape[1] % 8 or columns % 8:
        return f"n, k = {columns}, {x.shape[1]} are not multiples of 8: TMA needs 16-byte aligned rows"
    return cuda.why_not(x.device)


def schedule_words(num_rows: int, experts: int) -> int:
    """Number of int32 words of a tile schedule."""
    return 4 * (num_rows // _BLOCK_M + experts) + 1


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    config: int = -1,
    num_sms: int = 0,
) -> None:
    """Runs checked arguments in the kernel. config: id of a tile shape; -1: the cost model chooses."""
    words = schedule_words(out.shape[0], weight.shape[0])
    schedule = torch.empty(words, dtype=torch.int32, device=x.device)
    _kernel(
        readable(x),
        readable(weight),
        offsets,
        None if rows is None else rows.to(torch.int32),
        0 if activation is None else ACTIVATIONS.index(activation) + 1,
        out,
        schedule,
        config,
        num_sms,
    )


def unfused(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, activation: str | None
) -> torch.Tensor:
    """grouped_gemm of sorted rows with torch; on a GPU with torch's grouped GEMM."""
    if x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0:
        say_once("grouped GEMMs run unfused, through torch: there is no kernel for them yet")
        product: torch.Tensor = torch_grouped_mm()(x.contiguous(), weight.transpose(1, 2), offs=offsets[1:])
        if activation is None:
            return product
        return activate(product.float(), activation).to(x.dtype)
    say_once(
        f"grouped GEMM of {str(x.dtype).removeprefix('torch.')} with n, k = {weight.shape[1]}, "
        f"{weight.shape[2]} runs expert by expert and synchronises with the host: torch's takes bfloat16 "
        "and multiples of 8"
    )
    return reference(x, weight, offsets, None, activation)


def torch_grouped_mm() -> Any:
    """torch's grouped GEMM, under the preferred name of this torch version."""
    return getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)


library.impl("grouped_gemm", reference, "CPU")
library.impl("grouped_gemm", _cuda, "CUDA")
torch.library.register_fake("flux::grouped_gemm", _fake, lib=library)

_op: Any = torch.ops.flux.grouped_gemm.default
_kernel: Any = torch.ops.flux._grouped_gemm.default
