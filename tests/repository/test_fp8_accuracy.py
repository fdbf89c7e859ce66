"""The bound of docs/fp8.md#accuracy against a model of a tensor core's sums."""

from __future__ import annotations

import pytest
import torch

import flux
from flux.testing import scaled_bound
from flux.testing.scaled_data import exact_product

BITS, STEP = 13, 32  # of a tensor core's sum; elements of K of one instruction


def accumulated(x: torch.Tensor, weight: torch.Tensor, span: int | None) -> torch.Tensor:
    """The product of values [m, k] and [n, k] as a tensor core adds: an instruction aligns its products and
    the sum so far to the largest of them, and cuts what is below BITS (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
    span: sums begin anew after so many elements of K, and are added in fp32. None: never.
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    inner = torch.zeros_like(total, dtype=torch.float64)
    for k in range(0, x.shape[1], STEP):
        products = x[:, None, k : k + STEP].double() * weight[None, :, k : k + STEP].double()
        addends = torch.cat([products, inner[..., None]], -1)
        largest = addends.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
        unit = torch.exp2(largest.log2().floor() - BITS)
        inner = ((addends / unit).trunc() * unit).sum(-1)
        if span is not None and (k + STEP) % span == 0:
            total += inner.float()
            inner.zero_()
    return total + inner.float()


def test_promotion_keeps_what_13_bits_lose() -> None:
    """2¹⁴ in the first block, 1 in each later one, -2¹⁴ in the last: a pair of blocks loses one."""
    blocks = 20
    x, weight = torch.zeros(1, 128 * blocks), torch.ones(3, 128 * blocks)
    x[0, ::128] = 1.0
    x[0, :64], x[0, -64:] = 256.0, -256.0
    assert (accumulated(x, weight, 128) == blocks - 1).all()
    assert (accumulated(x, weight, 256) == blocks - 2).all()
    assert (accumulated(x, weight, None) < blocks - 2).all()


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("span", [128, 256, None])
def test_the_bound_holds_for_tensor_cores(span: int | None, mean: float) -> None:
    """And with promotion it is one that fast sums break."""
    accumulate = "fast" if span is None else "promoted"
    torch.manual_seed(1)
    (q, scale_x), (w, scale_w) = (flux.quantize(torch.randn(24, 8192) + mean, "tensor") for _ in range(2))
    exact = exact_product(q, scale_x, w, scale_w)
    bound = scaled_bound(q, scale_x, w, scale_w, exact, torch.float32, accumulate)
    sums = accumulated(q.float(), w.float(), span).double()
    errors = (sums * scale_x.double() * scale_w.double() - exact).abs()
    assert (errors <= bound).all()
    if accumulate == "fast" and mean:
        promoted = scaled_bound(q, scale_x, w, scale_w, exact, torch.float32)
        assert (errors > promoted).any()
