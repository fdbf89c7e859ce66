"""flux.layers in fp8 between CPU processes: forward passes are those of the operators on quantised operands,
bit for bit, gradients are near those of the same layers in 32 bits, and master weights stay as they are.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import scenario_test
from torch import nn

import flux
from flux._sharded import local
from flux.layers import ColumnParallelLinear, Fp8, ParallelMLP, RowParallelLinear

RECIPES = [
    Fp8(),
    Fp8("block"),
    Fp8("tensor", ue8m0=True, grad_dtype=torch.float8_e4m3fn),
    Fp8("block", ue8m0=False, weight_grads=False),
]


def trained(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    result = layer(x)
    result.backward(grad)
    return [result.detach(), x.grad, *(weight.grad for weight in layer.parameters())]  # type: ignore[list-item]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def near_32_bits(rank: int, p: int) -> None:
    for recipe in RECIPES:
        for sequence_parallel in (True, False):
            how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": True}
            torch.manual_seed(3)
            layers: list[nn.Module] = [
                ColumnParallelLinear(256, 128 * p, fp8=recipe, **how),
                RowParallelLinear(256 * p, 128, fp8=recipe, **how),
                ParallelMLP(128, 128 * p, fp8=recipe, **how),
            ]
            for layer in layers:
                torch.manual_seed(rank if sequence_parallel else 5)
                rows = 16 if not isinstance(layer, RowParallelLinear) else 16 * p
                if isinstance(layer, RowParallelLinear):
                    torch.manual_seed(rank)
                width = 128 if isinstance(layer, ParallelMLP) else 256
                x = torch.randn(rows, width)
                plain = copy.deepcopy(layer)
                for module in plain.modules():
                    if hasattr(module, "fp8"):
                        module.fp8 = None
                before = [weight.clone() for weight in layer.parameters()]
                torch.manual_seed(7)
                grad = torch.randn_like(plain(x))
                for got, wanted in zip(trained(layer, x, grad), trained(plain, x, grad), strict=True):
                    assert got.dtype == wanted.dtype and got.shape == wanted.shape
                    assert distance(got, wanted) < 0.12, (recipe, layer, distance(got, wanted))
                for weight, old in zip(layer.parameters(), before, strict=True):
                    assert torch.equal(weight, old)


def forward_is_the_operators(rank: int, p: int) -> None:
    torch.manual_seed(3)
    layer = ColumnParallelLinear(256, 128 * p, bias=False, fp8=Fp8("block"))
    torch.manual_seed(rank)
    x = torch.randn(16, 256)
    (q, scale_x), (w, scale_w) = (
        flux.quantize(x, ue8m0=True),
        flux.quantize(local(layer.weight), "block128", ue8m0=True),
    )
    expected = flux.ag_gemm(q, w, scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float32)
    assert torch.equal(layer(x).detach(), expected)
    # With current scaling the ranks share the scale of x.
    layer.fp8 = Fp8()
    most = x.abs().amax()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    scale = (most / 448).view(1)
    q = flux.quantize(x, "tensor", scale=scale)[0]
    w, scale_w = flux.quantize(local(layer.weight), "tensor")
    expected = flux.ag_gemm(q, w, scale_x=scale, scale_w=scale_w, out_dtype=torch.float32)
    assert torch.equal(layer(x).detach(), expected)


def bad_options(rank: int, p: int) -> None:
    with pytest.raises(ValueError, match="Fp8: scales: expected 'tensor' or 'block'"):
        Fp8("delayed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Fp8: accumulate: expected 'promoted'"):
        Fp8("block", accumulate="fast")
    with pytest.raises(TypeError, match="ColumnParallelLinear: fp8: expected None or an Fp8"):
        ColumnParallelLinear(8, 8 * p, fp8="block")  # type: ignore[arg-type]
    layer = RowParallelLinear(128 * p, 64, fp8=Fp8(), dtype=torch.float64)
    with pytest.raises(ValueError, match="row_linear: x: expected dtype bfloat16, float16 or float32"):
        layer(torch.ones(p, 128, dtype=torch.float64))


test_fp8_layers = scenario_test([1, 2], near_32_bits, forward_is_the_operators, bad_options, timeout_s=300)
