"""A residual added to a sum, and the norm of both, by torch."""

from __future__ import annotations

import pytest
import torch

from flux.ops import add_norm
from flux.ops.add_norm import add_norm_


def test_without_a_kernel() -> None:
    total, residual = torch.randn(3, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    weight, expected = torch.randn(16).bfloat16(), total + residual
    result = add_norm_(total, residual, weight, 1e-3)
    assert torch.equal(total, expected), "it is in place"
    wide = expected.float()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * weight
    torch.testing.assert_close(result.float(), norm, atol=1e-2, rtol=1e-2)
    assert add_norm_(total[:0], residual[:0], weight, 1e-3).shape == (0, 16)


@pytest.mark.parametrize("what", ["columns", "dtype", "rows apart", "address", "weight's dtype", "none"])
def test_what_the_kernel_does_not_take(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_norm._native, "available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    columns, dtype = 12 if what == "columns" else 16, torch.float32 if what == "dtype" else torch.bfloat16
    total, residual = (torch.zeros(0 if what == "none" else 4, columns, dtype=dtype) for _ in range(2))
    weight = torch.zeros(columns, dtype=torch.float32 if what == "weight's dtype" else dtype)
    if what == "rows apart":
        residual = torch.zeros(4, 2 * columns, dtype=dtype)[:, :columns]
    if what == "address":
        residual = torch.zeros(4 * columns + 1, dtype=dtype)[1:].view(4, columns)
    assert not add_norm._fits(total, residual, weight)
    assert add_norm._fits(*(torch.zeros(*shape).bfloat16() for shape in ((4, 16), (4, 16), (16,))))
