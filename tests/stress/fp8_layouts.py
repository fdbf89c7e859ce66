"""How other libraries lay out fp8 operands and their scales, made from those of a ScaledCase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flux.fp8 import scales as fp8

Arguments = dict[str, Any]


def _vllm_block(x: Any, weight: Any, scale_x: Any, scale_w: Any) -> Arguments | None:
    """Activation scales column by column, not padded; a block's weight scales beside others."""
    if scale_x.dim() < 2 or scale_x.shape[1] == 1:
        return None
    wide = torch.empty(scale_w.shape[0], 3 + scale_w.shape[1])
    return {"scale_x": scale_x.t().contiguous().t(), "scale_w": wide[:, 3:].copy_(scale_w)}


def _vllm_channel(x: Any, weight: Any, scale_x: Any, scale_w: Any) -> Arguments | None:
    """The weight [K, N] as CUTLASS takes it, scales of its columns as a column."""
    if scale_x.dim() > 1 and scale_x.shape[1] > 1:
        return None
    channels = scale_w.view(-1, 1) if scale_w.dim() < 2 else scale_w.t()
    return {"weight": weight.t(), "transpose_weight": True, "scale_w": channels}


def _deep_gemm(x: Any, weight: Any, scale_x: Any, scale_w: Any) -> Arguments | None:
    """As get_mn_major_tma_aligned_tensor lays scales out."""
    return {"scale_x": fp8.column_major(scale_x)} if scale_x.dim() > 1 else None


def _transformer_engine(x: Any, weight: Any, scale_x: Any, scale_w: Any) -> Arguments | None:
    """Values as bytes. Scales of x as [K / 128, M rounded up to 4], those of a weight as [N / 128, K / 128
    rounded up to 4]; padding is not set.
    """
    values = {"x": x.view(torch.uint8).view(x.dtype), "weight": weight.view(torch.uint8).view(weight.dtype)}
    if scale_x.dim() < 2 or scale_x.shape[1] == 1:
        return values if scale_x.numel() == scale_w.numel() == 1 else None
    (rows, blocks), nan = scale_x.shape, float("nan")
    of_rows = torch.full((blocks, -(-rows // 4) * 4), nan)
    of_rows[:, :rows] = scale_x.t()
    of_weight = torch.full((scale_w.shape[0], -(-blocks // 4) * 4), nan)
    of_weight[:, :blocks] = scale_w
    return values | {"scale_x": of_rows.t()[:rows], "scale_w": of_weight[:, :blocks]}


def _scaled_mm_args(x: Any, weight: Any, scale_x: Any, scale_w: Any) -> Arguments | None:
    """torch._scaled_mm: the second matrix and its scales transposed; scalars without a dimension."""
    if scale_x.numel() == 1 and scale_w.numel() == 1:
        return {
            "weight": weight.t(),
            "transpose_weight": True,
            "scale_x": scale_x.view(()),
            "scale_w": scale_w.view(()),
        }
    across = scale_w.t() if scale_w.dim() == 2 else scale_w.view(1, -1)
    return {"weight": weight.t(), "transpose_weight": True, "scale_w": across}


LAYOUTS: dict[str, Callable[..., Arguments | None]] = {
    "as quantize returns them": lambda *_: {},
    "vllm block": _vllm_block,
    "vllm channel": _vllm_channel,
    "deep_gemm": _deep_gemm,
    "transformer_engine": _transformer_engine,
    "torch._scaled_mm": _scaled_mm_args,
    "e8m0": lambda x, weight, scale_x, scale_w: {
        "scale_x": scale_x.to(torch.float8_e8m0fnu),
        "scale_w": scale_w.to(torch.float8_e8m0fnu),
    },
    "strided": lambda x, weight, scale_x, scale_w: {
        "x": torch.zeros(x.shape[0], 2 * x.shape[1] + 3).to(x.dtype)[:, 3::2].copy_(x),
        "weight": torch.zeros(weight.shape[0], weight.shape[1] + 5)
        .to(torch.float8_e4m3fn)[:, 5:]
        .copy_(weight),
    },
    "flat rows": lambda x, weight, scale_x, scale_w: {
        "scale_x": scale_x.flatten() if scale_x.dim() < 2 or scale_x.shape[1] == 1 else scale_x
    },
}
