"""Tolerances of correct results against exact ones: derived from K and the dtype, not tuned."""

from __future__ import annotations

import math

import torch

from flux.testing.scaled_data import BLOCK, dequantized

# Unit roundoff: half the distance of neighbouring numbers, relative.
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def tolerance(
    k: int, dtype: torch.dtype, world_size: int = 1, *, x_std: float = 1.0, weight_std: float = 1.0
) -> tuple[float, float]:
    """(atol, rtol) for x·Wᵀ summed over ranks, against a float64 or float32 reference.

    For zero-mean independent entries with the given standard deviations, a partial sum has standard deviation
    s = x_std * weight_std * sqrt(k); elements are taken to stay within 6 s (1 in 10^9 does not).

    - The result is rounded once: relative error u (half an ulp), the rtol.
    - Of the p partial sums, those that travel are rounded too: each errs by at most u * 6 s; the errors are
      independent, so sqrt(p) of them, not p, with a margin of 2.
    - fp32 accumulation of k * p terms: a random walk of roundings of at most 2^-24 * 6 s, hence sqrt(k * p)
      of them, times 4, because tensor cores truncate some low bits instead of rounding.

    Args:
        k: columns of x on one rank.
        dtype: of x: bfloat16, float16, float32 or float64.
        world_size: ranks over which is summed.
        x_std: standard deviation of the entries of x.
        weight_std: standard deviation of the entries of the weight.

    Returns:
        Absolute and relative tolerance, as torch.testing.assert_close takes them.

    Raises:
        KeyError: another dtype.

    Example::

        from flux.testing import tolerance

        torch.manual_seed(rank)
        x, weight = torch.randn(8 * p, 64), torch.randn(32, 64)
        exact = flux.reduce_scatter(x.double() @ weight.double().t())
        atol, rtol = tolerance(64, x.dtype, p)
        torch.testing.assert_close(flux.gemm_rs(x, weight).double(), exact, atol=atol, rtol=rtol)
    """
    u = _UNIT[dtype]
    accumulate = _UNIT[torch.float64] if dtype == torch.float64 else _UNIT[torch.float32]
    extent = 6.0 * x_std * weight_std * math.sqrt(k)
    travel = 2.0 * math.sqrt(world_size) * u * extent if world_size > 1 else 0.0
    return travel + 4.0 * math.sqrt(k * world_size) * accumulate * extent, u * 1.01


# A tensor core keeps 13 bits of sums of fp8 products, and cuts the rest, in each instruction of 32 of K.
_TENSOR_CORE = 2.0**-13
_INSTRUCTION_K = 32


def scaled_bound(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    weight: torch.Tensor,
    scale_w: torch.Tensor,
    exact: torch.Tensor,
    out_dtype: torch.dtype,
    accumulate: str = "promoted",
) -> torch.Tensor:
    """The largest error of each element of a product of fp8 operands, against the exact product of what they
    stand for.

    - The result is rounded once: u times its size.
    - Each instruction of a tensor core adds 32 products to the sum so far. It aligns all of them to the
      largest, and cuts 2^-13 of that from each, or the whole of a smaller one. Sums are those of 128 of K
      with block scales, of 128 or 256 with others, wherever they begin, and with "fast" of all of K.
    - fp32 additions of these sums err by 2^-24 each.

    Args:
        x: [m, k] in fp8.
        scale_x: its scales, with the shape that flux.quantize gives them.
        weight: [n, k] in fp8.
        scale_w: its scales, with that shape.
        exact: [m, n] in float64.
        out_dtype: of the result: bfloat16, float16 or float32.
        accumulate: "promoted" or "fast".

    Returns:
        [m, n] in float64.

    Raises:
        KeyError: another dtype.

    Example::

        from flux.testing import scaled_bound
        from flux.testing.scaled_data import exact_product

        q, scale_x = flux.quantize(torch.randn(8, 256))
        w, scale_w = flux.quantize(torch.randn(32, 256), "block128")
        out = flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w)
        exact = exact_product(q, scale_x, w, scale_w)
        assert ((out - exact).abs() <= scaled_bound(q, scale_x, w, scale_w, exact, out.dtype)).all()
    """
    wide, narrow = dequantized(x, scale_x), dequantized(weight, scale_w, BLOCK)
    blocks = -(-wide.shape[1] // BLOCK)
    ways = [set(range(blocks))]
    if accumulate == "fast":
        ways = [{0}]
    elif scale_x.ndim < 2 or scale_x.shape[1] == 1:
        ways += [{0, *range(first, blocks, 2)} for first in (1, 2)]
    # Of each way to begin sums anew at some k-blocks; the worst counts.
    partial, error, total = torch.zeros(3, len(ways), *exact.shape, dtype=torch.float64, device=exact.device)
    for first in range(0, wide.shape[1], _INSTRUCTION_K):
        if first % BLOCK == 0:
            anew = [first // BLOCK in way for way in ways]
            total[anew] += error[anew]
            partial[anew] = error[anew] = 0.0
        a, b = wide[:, first : first + _INSTRUCTION_K], narrow[:, first : first + _INSTRUCTION_K]
        largest_product = a.abs().amax(1)[:, None] * b.abs().amax(1)
        cut = _TENSOR_CORE * torch.maximum(partial.abs() + error, largest_product)
        error += cut + torch.minimum(_INSTRUCTION_K * cut, a.abs() @ b.abs().t())
        partial += a @ b.t()
    sizes = wide.abs() @ narrow.abs().t()
    cuts: torch.Tensor = (total + error).amax(0)
    return _UNIT[out_dtype] * exact.abs() + cuts + blocks * _UNIT[torch.float32] * sizes
