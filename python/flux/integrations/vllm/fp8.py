"""Linear layers of vLLM with fp8 weights: which flux can run, and what it gets of them.

vLLM quantises what such a layer gets, and multiplies with one of many kernels. Most of these keep the weight
and its scales as they were loaded, which flux takes. A row-parallel layer (layer.py) gives flux the rows as
vLLM has quantised them. Of column-parallel layers a mark in the graph says how, so that sequence-parallel
models (sequence.py) quantise own rows and gather them in fp8.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

from flux.fp8.scales import BLOCK, OUT, Scaling
from flux.integrations.vllm.op import quantised_rows, scaled_linear

Tensor = torch.Tensor
_METHODS = (Fp8LinearMethod, CompressedTensorsLinearMethod)
_PER_COLUMN = (-1, 1)  # vLLM's name of scales of the columns of a weight [K, N]


@dataclass(frozen=True)
class Fp8:
    """How a layer computes.

    Attributes:
        kernel: vLLM's. One that chooses between two quantises inside; its second one does what flux does.
        shape: [N, K] of this rank's weight.
        quant: how rows are quantised, as in flux.quantize.
        out_dtype: of the product.
        scale_name: of the layer's attribute that holds the weight's scales, once it is loaded.
        is_transposed: the weight lies there as [K, N].
        marked: the marks of column-parallel layers are to be in the graph.
        powers: scales of rows are powers of two; known of marked layers.
    """

    kernel: Any
    shape: tuple[int, int]
    quant: str
    is_static: bool
    out_dtype: torch.dtype
    scale_name: str = ""
    is_transposed: bool = False
    marked: bool = False
    powers: bool = False

    @property
    def scaling(self) -> Scaling:
        """What flux's plans depend on."""
        by_block = self.quant == "group128" and self.shape[1] > BLOCK
        return Scaling("block" if by_block else "row", self.out_dtype)

    def operands(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The weight [N, K] and its scales."""
        weight: Tensor = layer.weight
        return weight.t() if self.is_transposed else weight, getattr(layer, self.scale_name)

    def quantised(self, layer: Any, x: Any) -> tuple[Tensor, Tensor]:
        """Rows [M, K] and their scales, as vLLM quantises them; it may have done so already."""
        if not isinstance(x, torch.Tensor):
            return x.data, x.scale
        q, scale = self.kernel.quant_fp8(x, getattr(layer, "input_scale", None), None)
        return q[: x.shape[0]], scale  # without the rows that vLLM pads for some kernels

    def of_mark(self, static: Tensor | None) -> tuple[str, Tensor | None, bool]:
        """The last arguments of a mark. static: the scale that the layer has, if it has one."""
        return self.quant, static if self.is_static else None, self.powers


def of_layer(layer: Any) -> Fp8 | str:
    """How a quantised layer computes, or why flux cannot do so; before its weights are loaded."""
    method = layer.quant_method
    source = getattr(layer, "scheme", None) if type(method) is CompressedTensorsLinearMethod else method
    if source is None or type(source) not in (Fp8LinearMethod, CompressedTensorsW8A8Fp8):
        return f"weights are quantised ({type(source).__name__})"
    kernel = source.fp8_linear
    config = kernel.config
    of_x, of_w = config.activation_quant_key.scale, config.weight_quant_key.scale
    rows, columns = of_x.group_shape, of_w.group_shape
    if rows.is_per_tensor() or rows.is_per_token():
        quant = "tensor" if rows.is_per_tensor() else "row"
        fits = columns.is_per_tensor() or tuple(columns) == _PER_COLUMN
    else:
        quant, fits = "group128", tuple(rows) == (1, BLOCK) and tuple(columns) == (BLOCK, BLOCK)
    if not fits:
        return f"weights are fp8 with scales for {tuple(columns)}, of rows {tuple(rows)}"
    out_dtype = config.out_dtype or layer.params_dtype
    if out_dtype not in OUT:
        return f"weights are fp8, and results {out_dtype}"
    n, k = config.weight_shape
    kernel = getattr(kernel, "fallback", kernel)
    return Fp8(kernel, (int(n), int(k)), quant, bool(of_x.static), out_dtype)


def loaded(layer: Any, found: Fp8) -> Fp8 | str:
    """The same of a layer with loaded weights, or why flux cannot take them: vLLM may have repacked them."""
    weight, (n, k) = layer.weight, found.shape
    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    scale = getattr(layer, name, None)
    packed = f"{type(found.kernel).__name__} of vLLM repacks the weights"
    if weight.dtype != torch.float8_e4m3fn or not isinstance(scale, torch.Tensor):
        return packed
    is_transposed = weight.shape == (k, n) and weight.stride(0) == 1
    if not is_transposed and (weight.shape != (n, k) or weight.stride(1) != 1):
        return packed
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    shapes = [blocks] if found.quant == "group128" else [(n,), (n, 1), (1, n)]
    single = scale.numel() == 1 and found.quant != "group128"
    if scale.dtype != torch.float32 or not (single or tuple(scale.shape) in shapes):
        return f"{packed[: -len('the weights')]}the scales"
    if getattr(layer, "input_scale_ub", None) is not None:
        return "scales of rows have an upper bound"
    return replace(found, scale_name=name, is_transposed=is_transposed)


@functools.cache
def install(mark: Any) -> None:
    """Lets flux look at fp8 layers once they are loaded, and mark column-parallel ones that may be; once."""
    for method in _METHODS:
        _watch(method, mark)


def _watch(method: Any, mark: Any) -> None:
    process, apply = method.process_weights_after_loading, method.apply

    @functools.wraps(process)
    def process_and_look(self: Any, layer: Any) -> None:
        process(self, layer)
        if hasattr(layer, "flux_take_fp8"):
            layer.flux_take_fp8()
        elif isinstance(layer, ColumnParallelLinear) and isinstance(found := of_layer(layer), Fp8):
            found = loaded(layer, found)
            if isinstance(found, Fp8) and mark(layer, found):
                layer._flux_fp8 = _marking(found)

    @functools.wraps(apply)
    def apply_and_mark(self: Any, layer: Any, x: Any, bias: Tensor | None = None) -> Any:
        product = apply(self, layer, x, bias)
        found = getattr(layer, "_flux_fp8", None)
        if found is None or not found.marked or not torch.compiler.is_compiling():
            return product
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            return product
        weight, scale = found.operands(layer)
        return scaled_linear(
            product, x, weight, bias, scale, *found.of_mark(getattr(layer, "input_scale", None))
        )

    method.process_weights_after_loading, method.apply = process_and_look, apply_and_mark


def _marking(found: Fp8) -> Fp8:
    """A column-parallel layer that marks its product, and what vLLM's quantisation of its rows gives."""
    quantise = found.kernel.quant_fp8
    powers = found.quant == "group128" and bool(quantise.use_ue8m0)
    found = replace(found, marked=True, powers=powers)

    def quantise_and_mark(x: Tensor, static: Tensor | None = None, *more: Any, **options: Any) -> Any:
        q, scale = quantise(x, static, *more, **options)
        if not torch.compiler.is_compiling():
            return q, scale
        return quantised_rows(q, scale, x, *found.of_mark(static))

    found.kernel.quant_fp8 = quantise_and_mark
    return found
