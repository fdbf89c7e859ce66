"""Quantisation to fp8: the scale of a group makes its largest value the largest of the type."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, cast

import torch

from flux import _deprecated, _invariance, _native
from flux._memory import readable
from flux.calls import checks, front
from flux.comm import repeat
from flux.fp8.scales import BLOCK, FP8, OLD_WORDS, empty_column_major

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

# In the order of the kernel.
QUANTS = ("tensor", "row", "group128", "block128")
# Smaller largest values count as this one, so that no scale is zero or denormal.
_LEAST_AMAX = 1e-10
_MANTISSA = (1 << 23) - 1  # of fp32


def quantize(
    x: Tensor,
    quant: Literal["tensor", "row", "group128", "block128"] = "group128",
    *,
    scale: Tensor | None = None,
    ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Pair:
    """x in fp8, and the scales by which flux's products multiply it.

    For each group: scale = max(amax, 1e-10) / L, with L the largest number of the type; q = x * (1 / scale),
    beyond L cut to L, rounded to nearest even. All in fp32, every operation rounded once. NaN stays NaN.

    Args:
        x: [..., K], bfloat16, float16, float32 or float64.
        quant: what has one scale: "tensor" all of x; "row" each row, or token; "group128" each 128 elements
            of a row (DeepSeek's activations); "block128" each 128 by 128 block of a matrix [..., N, K] (its
            weights).
        scale: with "tensor": float32 [1], to use instead of one made from x (static quantisation).
        ue8m0: round scales up to powers of two.
        dtype: float8_e4m3fn, or float8_e5m2 for gradients.

    Returns:
        q, of x's shape, contiguous; and float32 scales: "tensor" [1] (`scale`, if given), "row" [..., 1],
        "group128" [..., K / 128], in memory column by column, "block128" [..., N / 128, K / 128].

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit, or x needs a gradient in grad mode.

    Example::

        x, weight = torch.randn(8, 256), torch.randn(128, 256)
        (q, scale_x), (w, scale_w) = flux.quantize(x), flux.quantize(weight, "block128")
        assert scale_x.shape == (8, 2) and scale_w.shape == (1, 2)
        out = flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w)
        assert out.shape == (8, 128) and out.dtype == torch.bfloat16
    """
    if not torch.compiler.is_compiling():
        known = (QUANTIZE.number, _invariance.active(), x, quant, scale, ue8m0, dtype, None)
        done = repeat.without_group().call(*known)
        if done is not None:
            return cast(Pair, done)
    quant = _deprecated.word("quantize", "quant", quant, OLD_WORDS)
    given = {"x": x, "quant": quant, "scale": scale, "ue8m0": ue8m0, "dtype": dtype}
    return cast(Pair, front.enter(QUANTIZE, given))


class Call(NamedTuple):
    """The arguments of flux.quantize. out: q and scales."""

    x: Tensor
    quant: str
    scale: Tensor | None
    ue8m0: bool
    dtype: torch.dtype = torch.float8_e4m3fn
    out: Any = None


def checked(
    op: str, x: Tensor, quant: str, scale: Tensor | None, ue8m0: bool, dtype: torch.dtype, name: str = "scale"
) -> None:
    """Checks the options of a quantisation. name: of the argument `scale`."""
    if quant not in QUANTS:
        checks.fail(op, "quant", f"one of {', '.join(QUANTS)}", repr(quant))
    if dtype not in FP8:
        checks.fail(op, "dtype", "float8_e4m3fn or float8_e5m2", dtype)
    if type(ue8m0) is not bool:
        raise TypeError(f"{op}: ue8m0: expected True or False, got {ue8m0!r}")
    if scale is None:
        return
    if quant != "tensor":
        checks.fail(op, name, f"None with {quant!r}, whose scales are made from the data", "a tensor")
    if ue8m0:
        checks.fail(op, "ue8m0", f"False, as {name} is given", True)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        checks.fail(op, name, "float32 with one entry", f"{scale.dtype}, shape {list(scale.shape)}")
    if scale.device != x.device:
        checks.fail(op, name, f"device {x.device}, that of x", scale.device)


def empty(x: Tensor, quant: str, dtype: torch.dtype) -> Pair:
    q, shape = x.new_empty(x.shape, dtype=dtype), scales_shape(x, quant)
    if quant == "group128":
        return q, empty_column_major(math.prod(shape[:-1]), shape[-1], x).view(shape)
    return q, x.new_empty(shape, dtype=torch.float32)


def scales_shape(x: Tensor, quant: str) -> list[int]:
    *rows, k = x.shape
    if quant == "tensor":
        return [1]
    if quant == "row":
        return [*rows, 1]
    groups = -(-k // BLOCK)
    return [*rows, groups] if quant == "group128" else [*rows[:-1], -(-rows[-1] // BLOCK), groups]


def _results(call: Call, sizes: front.Sizes, op: str) -> Pair:
    x, quant = call.x, call.quant
    checked(op, x, quant, call.scale, call.ue8m0, call.dtype)
    least = 2 if quant == "block128" else 1
    if x.dim() < least:
        checks.fail(op, "x", f"at least {least} dimensions for {quant!r}", x.dim())
    checks.floating(op, x)
    return empty(x, quant, call.dtype)


def run(call: Call, recipe: repeat.Recipe | None = None) -> None:
    """Writes the quantised x, and its scales. recipe: of the call, if it is to be known."""
    x, quant, scale, ue8m0, _, (q, scales) = call
    if not (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() and x.shape[-1] % 8 == 0):
        if scale is not None:
            scales.copy_(scale.reshape(1))
        by_torch(x, quant, ue8m0, q, scales, scale is not None)
        return
    source, parts = readable(x), scratch(q, quant, scale)
    enqueue = functools.partial(_kernel, source, q, scales, QUANTS.index(quant), ue8m0, scale, parts)
    enqueue()
    front.remember("_quantize", recipe, enqueue, results={"q": q, "q_scale": scales})


def scratch(q: Tensor, quant: str, scale: Tensor | None) -> Tensor | None:
    """Memory in which a kernel finds the scale of a whole tensor. scale: if one is given, it needs none."""
    if quant != "tensor" or scale is not None:
        return None
    return q.new_empty(_native.core.QUANTIZE_SCRATCH_FLOATS, dtype=torch.float32)


def by_torch(x: Tensor, quant: str, ue8m0: bool, q: Tensor, scales: Tensor, is_static: bool = False) -> None:
    """The same with torch only. is_static: the scales are given."""
    wide = x.to(torch.float32)
    if not is_static:
        scales.copy_(scales_of(amax_of(wide, quant), torch.finfo(q.dtype).max, ue8m0))
    inverse = spread(1.0 / scales, quant, wide)
    q.copy_(rounded(wide * inverse, q.dtype))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values in an fp8 type: the nearest, beyond the largest the largest, NaN without a sign."""
    most = torch.finfo(dtype).max
    return torch.where(values.isnan(), torch.nan, values.clamp(-most, most)).to(dtype)


def amax_of(x: Tensor, quant: str) -> Tensor:
    size = x.abs()
    if x.numel() == 0:
        return x.new_zeros(scales_shape(x, quant))
    if quant == "tensor":
        return size.amax().view(1)
    if quant == "row":
        return size.amax(-1, keepdim=True)
    size = torch.nn.functional.pad(size, (0, -size.shape[-1] % BLOCK))
    groups = size.view(*size.shape[:-1], -1, BLOCK).amax(-1)
    if quant == "group128":
        return groups
    groups = torch.nn.functional.pad(groups, (0, 0, 0, -groups.shape[-2] % BLOCK))
    return groups.view(*groups.shape[:-2], -1, BLOCK, groups.shape[-1]).amax(-2)


def scales_of(amax: Tensor, most: float, ue8m0: bool) -> Tensor:
    # Not a number: torch multiplies by its reciprocal on a GPU, and that rounds differently.
    scales = amax.clamp(min=_LEAST_AMAX) / torch.full_like(amax, most)
    if not ue8m0:
        return scales
    bits = (scales.view(torch.int32) + _MANTISSA) & ~_MANTISSA
    return torch.where(scales.isfinite(), bits.view(torch.float32), scales)


def spread(scales: Tensor, quant: str, x: Tensor) -> Tensor:
    """The scales such that they can be multiplied with x."""
    if quant in ("tensor", "row"):
        return scales
    scales = scales.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
    if quant == "block128":
        scales = scales.repeat_interleave(BLOCK, -2)[..., : x.shape[-2], :]
    return scales


def dequantized(q: Tensor, scales: Tensor, quant: str) -> Tensor:
    return q.to(torch.float32) * spread(scales, quant, q)


QUANTIZE = front.Collective(
    name="quantize",
    call=Call,
    sizes=lambda call, p: ((), 0, 0, 0),
    results=_results,
    alone=run,
    differentiable=False,
)
front.register(QUANTIZE, maps=False)
_kernel: Any = torch.ops.flux._quantize.default
