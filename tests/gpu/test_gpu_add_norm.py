"""The kernel that adds a residual to a sum and normalises both."""

from __future__ import annotations

import pytest
import torch

from flux.ops.add_norm import _fits, add_norm_

# More rows than CTAs; rows that no CTA has room for in shared memory.
SHAPES = [(1, 8), (3, 4096), (256, 8192), (700, 5120), (2048, 8192), (5, 13312), (2, 32768)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_sum_is_exact_and_the_norm_rounded_once(rows: int, columns: int, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(rows)
    room = torch.randn(rows + 2, columns, generator=g, device="cuda").to(dtype)
    residual = torch.randn(rows, columns, generator=g, device="cuda").to(dtype)
    weight = torch.randn(columns, generator=g, device="cuda").to(dtype)
    total, around, expected = room[1:-1], room[[0, -1]].clone(), room[1:-1] + residual
    assert _fits(total, residual, weight)
    for _ in range(2):  # the second call is repeated by C++
        norm = add_norm_(total, residual, weight, 1e-5)
        assert torch.equal(total, expected) and torch.equal(room[[0, -1]], around)
        wide = expected.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((norm.double() - exact).abs() <= 1.01 * rounding + 1e-7).all()
        expected = expected + residual
