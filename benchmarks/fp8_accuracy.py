"""How far products of fp8 operands are from those of the numbers that were quantised, and sums of tensor
cores from exact ones: the tables of docs/fp8.md#accuracy. Tensor cores are modelled (`accumulated`).

  python benchmarks/fp8_accuracy.py
"""

from __future__ import annotations

from typing import Any

import torch

import flux
from flux.testing.scaled_data import dequantized

Tensor = torch.Tensor
M, N, K = 128, 256, 4096
LENGTHS = (512, 2048, 8192, 32768)
BITS, STEP = 13, 32  # of a tensor core's sum; elements of K of one instruction
# Of how many elements of K the tensor cores' sums are (flux.gemm).
SUMS = {"promoted, block scales": 128, "promoted, other scales": 256, "fast": None}
# What x and the weight are quantised by.
SCALINGS: dict[str, tuple[Any, Any, bool]] = {
    "tensor": ("tensor", "tensor", False),
    "token and column": ("token", "token", False),
    "1 by 128, 128 by 128": ("group128", "block128", False),
    "the same, powers of two": ("group128", "block128", True),
}


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns)


def tokens(rows: int, columns: int) -> Tensor:
    """Rows of sizes up to 100,000 times apart."""
    return torch.randn(rows, columns) * 10 ** (5 * torch.rand(rows, 1))


def channels(rows: int, columns: int) -> Tensor:
    """One column in 128 is 50 times larger than others."""
    found = torch.randn(rows, columns)
    found[:, ::128] *= 50
    return found


X = {"normal": normal, "rows of all sizes": tokens, "large columns": channels}


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def of_operands(make: Any, scaling: str) -> float:
    """The mean error of a product that comes from rounding the operands, relative to each row."""
    torch.manual_seed(0)
    of_x, of_weight, powers = SCALINGS[scaling]
    x, weight = make(M, K), torch.randn(N, K)
    wide = dequantized(*flux.quantize(x, of_x, ue8m0=powers))
    narrow = dequantized(*flux.quantize(weight, of_weight, ue8m0=powers), 128)
    exact = x.double() @ weight.double().t()
    errors = (wide @ narrow.t() - exact).square().mean(1).sqrt()
    return float((errors / exact.square().mean(1).sqrt()).mean())


def accumulated(x: Tensor, weight: Tensor, span: int | None) -> Tensor:
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


def of_sums(length: int, span: int | None, mean: float) -> float:
    """The mean error of sums over so many elements of K, relative to the exact sums of the same operands."""
    torch.manual_seed(0)
    (x, _), (weight, _) = (flux.quantize(torch.randn(16, length) + mean, "tensor") for _ in range(2))
    exact = x.double() @ weight.double().t()
    return rms(accumulated(x.float(), weight.float(), span).double() - exact) / rms(exact)


def percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def tables() -> list[str]:
    """Both tables, in Markdown."""
    lines = [f"| scales of x, of the weight | {' | '.join(X)} |", f"|---|{'--:|' * len(X)}"]
    for scaling in SCALINGS:
        cells = [percent(of_operands(make, scaling)) for make in X.values()]
        lines.append(f"| {scaling} | {' | '.join(cells)} |")
    made = ["\n".join(lines)]
    lines = [f"| sums | {' | '.join(f'K = {length}' for length in LENGTHS)} |"]
    lines.append(f"|---|{'--:|' * len(LENGTHS)}")
    for how, span in SUMS.items():
        for mean, data in ((0.0, "mean 0"), (1.0, "mean 1")):
            cells = [percent(of_sums(length, span, mean)) for length in LENGTHS]
            lines.append(f"| {how}, elements of {data} | {' | '.join(cells)} |")
    return [*made, "\n".join(lines)]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
