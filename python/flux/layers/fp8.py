"""Linear maps in fp8: operands and gradients are quantised in every call, master weights only read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch

from flux import _deprecated
from flux.calls import argument_types, checks
from flux.comm.group import process_group
from flux.fp8 import scales as fp8_
from flux.fp8.scales import OLD_WORDS, Accumulate
from flux.ops import quantize as quantising
from flux.ops.ag_gemm import ag_gemm
from flux.ops.all_gather import all_gather
from flux.ops.gemm import gemm
from flux.ops.quantize import quantize

Tensor = torch.Tensor
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SCALES = ("tensor", "block")
# Rows that the kernels read are multiples of 16 bytes, of fp8 and of float32.
_WHOLE, _WORDS = 16, 4


@dataclass(frozen=True)
class Fp8:
    """How a layer multiplies in fp8.

    Attributes:
        scales: "tensor": one for each tensor, made from the values that it has now; ranks that gather rows
            agree on it. "block": one for each 1 by 128 elements of activations and gradients ("group128" of
            flux.quantize), and for each 128 by 128 of weights (arXiv 2412.19437, section 3.3).
        grad_dtype: of gradients: float8_e5m2 or float8_e4m3fn. None: e5m2 for "tensor", whose scales cover a
            wide range of values, e4m3 for "block".
        ue8m0: round scales up to powers of two. None: for "block". Then quantised rows that are quantised
            once more along the other axis, for the gradient of a weight, lose nothing but underflow.
        weight_grads: compute gradients of weights in fp8 too. Else from 16 or 32 bits, which are kept or
            gathered for that.
        accumulate: of the forward pass: "promoted", or "fast" (only for "tensor"). Gradients are promoted.

    Raises:
        ValueError, TypeError: a value is none of these.

    Example::

        from flux.layers import ColumnParallelLinear, Fp8

        layer = ColumnParallelLinear(256, 128 * p, fp8=Fp8("block"))
        assert layer(torch.randn(8, 256)).shape == (8 * p, 128)
    """

    scales: Literal["tensor", "block"] = "tensor"
    grad_dtype: torch.dtype | None = None
    ue8m0: bool | None = None
    weight_grads: bool = True
    accumulate: Literal["promoted", "fast"] = "promoted"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", _deprecated.word("Fp8", "scales", self.scales, OLD_WORDS))
        if self.scales not in _SCALES:
            checks.fail("Fp8", "scales", "'tensor' or 'block'", repr(self.scales))
        if self.grad_dtype not in (None, _E4M3, _E5M2):
            checks.fail("Fp8", "grad_dtype", "float8_e5m2, float8_e4m3fn or None", self.grad_dtype)
        if self.ue8m0 is not None:
            argument_types.flag("Fp8", "ue8m0", self.ue8m0)
        argument_types.flag("Fp8", "weight_grads", self.weight_grads)
        fp8_.check_how("Fp8", torch.bfloat16, self.accumulate)
        if self.by_block and self.accumulate == "fast":
            checks.fail("Fp8", "accumulate", "'promoted' for block scales", "'fast'")

    scaling = _deprecated.attribute("scaling", "scales")

    @property
    def by_block(self) -> bool:
        return self.scales == "block"

    @property
    def powers_of_two(self) -> bool:
        return self.by_block if self.ue8m0 is None else self.ue8m0

    @property
    def of_grads(self) -> torch.dtype:
        return self.grad_dtype or (_E4M3 if self.by_block else _E5M2)

    def rows(self, x: Tensor, dtype: torch.dtype = _E4M3, among: str | None = None) -> Quantised:
        """Activations or gradients [..., K]. among: a group that gathers them, whose ranks share a scale."""
        if self.by_block:
            return Quantised(*quantize(x, "group128", ue8m0=self.powers_of_two, dtype=dtype))
        scale = self._scale([x], dtype, among)
        return Quantised(quantize(x, "tensor", scale=scale, dtype=dtype)[0], scale)

    def weights(self, weights: Sequence[Tensor]) -> list[Quantised]:
        """Weights [N, K] of one call; with "tensor" they share a scale."""
        if self.by_block:
            return [Quantised(*quantize(w, "block128", ue8m0=self.powers_of_two)) for w in weights]
        scale = self._scale(weights, _E4M3)
        return [Quantised(quantize(w, "tensor", scale=scale)[0], scale) for w in weights]

    def columns(self, x: Tensor, dtype: torch.dtype, quant: Literal["group128", "block128"]) -> Quantised:
        """x [M, K] quantised along M, as [K, M], with block scales; M rounded up to whole blocks."""
        padded = x.new_zeros(x.shape[1], -(-x.shape[0] // fp8_.BLOCK) * fp8_.BLOCK)
        padded[:, : x.shape[0]] = x.t()
        return Quantised(*quantize(padded, quant, ue8m0=self.powers_of_two, dtype=dtype))

    def _scale(self, tensors: Sequence[Tensor], dtype: torch.dtype, among: str | None = None) -> Tensor:
        """One scale for tensors, float32 [1]; of all ranks of a group, if one is named."""
        largest = [quantising.amax_of(x, "tensor").to(torch.float32) for x in tensors]
        amax = torch.cat(largest).amax(0, keepdim=True)
        if among is not None and process_group(among).size() > 1:
            amax = all_gather(amax.expand(1, _WORDS), group=among).amax().view(1)
        return quantising.scales_of(amax, torch.finfo(dtype).max, self.powers_of_two)


Fp8.__init__ = _deprecated.arguments(scaling="scales")(Fp8.__init__)  # type: ignore[method-assign]


class Quantised(NamedTuple):
    """fp8 and its scales, as flux.quantize returns them: one of the tensor, or some of each row."""

    q: Tensor
    scale: Tensor

    def both(self, function: Callable[[Tensor], Tensor]) -> Quantised:
        return Quantised(function(self.q), self.scale if self.scale.dim() == 1 else function(self.scale))

    def transposed(self, multiple: int = 1) -> Quantised:
        """A weight [N, K], or a matrix with one scale, as [K, N]; N rounded up to a multiple of something."""
        n, k = self.q.shape
        flipped = torch.zeros(k, -(-n // multiple) * multiple, dtype=torch.uint8, device=self.q.device)
        flipped[:, :n] = self.q.view(torch.uint8).t()
        return Quantised(flipped.view(self.q.dtype), self.scale if self.scale.dim() == 1 else self.scale.t())

    def values(self, dtype: torch.dtype) -> Tensor:
        """What rows [..., K] stand for."""
        quant = "tensor" if self.scale.dim() == 1 else "group128"
        return quantising.dequantized(self.q, self.scale, quant).to(dtype)

    def gathered(self, name: str) -> Quantised:
        """The rows of all ranks, which share a scale of the tensor."""
        return self.both(lambda each: all_gather(each.contiguous(), group=name))


def check(op: str, fp8: object, x: Tensor | None = None) -> None:
    if fp8 is not None and not isinstance(fp8, Fp8):
        argument_types.wrong_type(op, "fp8", "None or an Fp8", fp8)
    if fp8 is not None and x is not None and x.dtype not in fp8_.OUT:
        checks.fail(op, "x", "dtype bfloat16, float16 or float32 with fp8", x.dtype)


def product(
    op: Callable[..., Tensor], x: Quantised, weight: Quantised, bias: Tensor | None = None, **how: Any
) -> Tensor:
    """x · weightᵀ + bias by gemm, gemm_rs or gemm_ar, with their options."""
    return op(x.q, weight.q, bias, scale_x=x.scale, scale_w=weight.scale, **how)


def gathered_products(
    rows: Quantised,
    weights: Sequence[Quantised],
    biases: Sequence[Tensor | None],
    name: str | None,
    keep: bool,
    out_dtype: torch.dtype,
    accumulate: Accumulate = "promoted",
) -> tuple[list[Tensor], Quantised]:
    """Products of rows with each weight, and the rows; with `keep` as gathered by the group of that name."""
    how: dict[str, Any] = {"out_dtype": out_dtype, "accumulate": accumulate}
    if name is None:
        return [product(gemm, rows, *each, **how) for each in zip_longest(weights, biases)], rows
    how |= {"group": name, "scale_x": rows.scale, "scale_w": [w.scale for w in weights]}
    given = rows.q, [w.q for w in weights], list(biases) or None
    if not keep:
        return ag_gemm(*given, **how), rows
    results, q, scale = ag_gemm(*given, return_gathered=True, **how)
    return results, Quantised(q, rows.scale if rows.scale.dim() == 1 else scale)


def weight_grad_operands(
    fp8: Fp8, grads: Quantised, sizes: Sequence[int], x: Quantised, dtype: torch.dtype
) -> tuple[list[Quantised], Quantised]:
    """Operands of gradᵀ · x along M: of each weight [N, M], and [K, M]. grads: of weights of these sizes,
    side by side. dtype: in which rows are quantised along the other axis.
    """
    grads, x = (each.both(lambda rows: rows.flatten(0, -2)) for each in (grads, x))
    if fp8.by_block:
        left = fp8.columns(grads.values(dtype), fp8.of_grads, "group128")
        right = fp8.columns(x.values(dtype), _E4M3, "block128")
    else:
        left, right = grads.transposed(_WHOLE), x.transposed(_WHOLE)
    parts = torch.split(left.q, list(sizes))
    scales = [left.scale] * len(sizes) if left.scale.dim() == 1 else torch.split(left.scale, list(sizes))
    return [Quantised(*each) for each in zip(parts, scales, strict=True)], right
