"""The tables of docs/fp8.md#accuracy, and the model of a tensor core's sums behind them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flux
from flux.testing import scaled_bound
from flux.testing.scaled_data import exact_product

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import fp8_accuracy  # noqa: E402


def test_the_page_has_what_the_program_prints() -> None:
    page = (ROOT / "docs" / "fp8.md").read_text()
    for table in fp8_accuracy.tables():
        assert table in page, table


def test_promotion_keeps_what_13_bits_lose() -> None:
    """2¹⁴ in the first block, 1 in each later one, -2¹⁴ in the last: a pair of blocks loses one."""
    blocks = 20
    x, weight = torch.zeros(1, 128 * blocks), torch.ones(3, 128 * blocks)
    x[0, ::128] = 1.0
    x[0, :64], x[0, -64:] = 256.0, -256.0
    assert (fp8_accuracy.accumulated(x, weight, 128) == blocks - 1).all()
    assert (fp8_accuracy.accumulated(x, weight, 256) == blocks - 2).all()
    assert (fp8_accuracy.accumulated(x, weight, None) < blocks - 2).all()


def test_small_integers_are_exact() -> None:
    x, weight = (torch.randint(-4, 5, (5, 160)).float() for _ in range(2))
    for span in (128, 256, None):
        assert torch.equal(fp8_accuracy.accumulated(x, weight, span), x @ weight.t())


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("span", [128, 256, None])
def test_the_bound_holds_for_tensor_cores(span: int | None, mean: float) -> None:
    """And with promotion it is one that fast sums break."""
    accumulate = "fast" if span is None else "promoted"
    torch.manual_seed(1)
    (q, scale_x), (w, scale_w) = (flux.quantize(torch.randn(24, 8192) + mean, "tensor") for _ in range(2))
    exact = exact_product(q, scale_x, w, scale_w)
    bound = scaled_bound(q, scale_x, w, scale_w, exact, torch.float32, accumulate)
    sums = fp8_accuracy.accumulated(q.float(), w.float(), span).double()
    errors = (sums * scale_x.double() * scale_w.double() - exact).abs()
    assert (errors <= bound).all()
    if accumulate == "fast" and mean:
        promoted = scaled_bound(q, scale_x, w, scale_w, exact, torch.float32)
        assert (errors > promoted).any()
