"""fp8 GEMMs of small batches in any linear layer of vLLM: flux.gemm in front of vLLM's kernel, up to the
number of tokens in FLUX_VLLM_FP8_GEMM.

vLLM's kernel of a layer stays, for larger batches. A traced graph holds both products, and the pass keeps one
of them in each range:

    scaled_gemm, range up to FLUX_VLLM_FP8_GEMM tokens       scaled_gemm without vLLM's product
    scaled_gemm, another range                           →   vLLM's product
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

import flux
from flux.integrations.vllm.op import plain, plain_if_any

Tensor = torch.Tensor
_torch_library: Any = torch.library  # not typed
_library: Any = _torch_library.Library("flux_vllm", "FRAGMENT")
_library.define(
    "scaled_gemm(Tensor x, Tensor weight, Tensor? bias, Tensor scale_x, Tensor scale_w, ScalarType out_dtype,"
    " int up_to, Tensor? product) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_UP_TO, _PRODUCT = 6, 7  # places of arguments


def put_before(found: Any, up_to: int, in_graphs: bool) -> None:
    """Puts flux.gemm in front of the kernel of a layer with fp8 weights.

    Args:
        found: how the layer computes (fp8.Fp8), of loaded weights.
        up_to: tokens of the largest batch that flux multiplies.
        in_graphs: flux's pass sees the graphs that are traced.
    """
    kernel = found.kernel
    apply_weights = kernel.apply_weights

    @functools.wraps(apply_weights)
    def apply_flux(layer: Any, x: Any, bias: Tensor | None = None, **more: Any) -> Any:
        rows = x if isinstance(x, torch.Tensor) else x.data
        compiling = torch.compiler.is_compiling()
        fits = rows.dim() == 2 and (bias is None or bias.dtype == found.out_dtype)
        if not fits or not (in_graphs if compiling else len(rows) <= up_to):
            return apply_weights(layer, x, bias, **more)
        q, scale = found.quantised(layer, x)
        weight, scale_w = found.operands(layer)
        product = apply_weights(layer, x, bias, **more) if compiling else None
        call = torch.ops.flux_vllm.scaled_gemm.default if compiling else _run
        return call(q, weight, bias, scale, scale_w, found.out_dtype, up_to, product)

    kernel.apply_weights = apply_flux


def settle_gemms(graph: fx.Graph, end: int) -> int:
    """Keeps flux's products of fp8 layers if all batches of a range, up to `end` tokens, are flux's, and
    vLLM's if not. Returns how many are flux's.
    """
    nodes = graph.find_nodes(op="call_function", target=torch.ops.flux_vllm.scaled_gemm.default)
    served = 0
    for node in nodes:
        if end <= node.args[_UP_TO]:
            node.update_arg(_PRODUCT, None)
            served += 1
        else:
            node.replace_all_uses_with(node.args[_PRODUCT])
            graph.erase_node(node)
    if nodes:
        graph.eliminate_dead_code()  # the other product, and its quantisation
    return served


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale_x: Tensor,
    scale_w: Tensor,
    out_dtype: torch.dtype,
    up_to: int,
    product: Tensor | None,
) -> Tensor:
    if product is not None and len(x) > up_to:
        return product.clone()  # an operator must not return its argument
    with torch.no_grad():
        scales: dict[str, Any] = {"scale_x": scale_x, "scale_w": plain(scale_w)}
        return flux.gemm(x, plain(weight), plain_if_any(bias), out_dtype=out_dtype, **scales)


def _fake(
    x: Tensor, weight: Tensor, bias: Any, scale_x: Any, scale_w: Any, out_dtype: Any, *_: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


_library.impl("scaled_gemm", _run, "CompositeExplicitAutograd")
_torch_library.register_fake("flux_vllm::scaled_gemm", _fake, lib=_library)
