"""flux.quantize on CPUs: its definition element by element, its edges, arguments, and how torch sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flux
from flux.ops.quantize import QUANTS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest finite value of the type, the one with an even mantissa of two."""
    every = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    values = every[every.isfinite()]  # in order, from 0
    far = (values - x.abs().clamp(max=values[-1]).flatten()[:, None]).abs()
    best = far.argmin(1)  # the lower one of two
    upper = (best + 1).clamp(max=len(values) - 1)
    tie = far.gather(1, best[:, None]) == far.gather(1, upper[:, None])
    return values[torch.where(tie[:, 0] & (best % 2 == 1), upper, best)].view(x.shape).copysign(x)


def definition(
    x: torch.Tensor, quant: str, dtype: torch.dtype, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales."""
    i, j = torch.meshgrid(*map(torch.arange, x.shape), indexing="ij")
    places = {"tensor": (0 * i, 0 * j), "row": (i, 0 * j), "group128": (i, j // 128)}
    rows, columns = (places | {"block128": (i // 128, j // 128)})[quant]
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    index = (rows * shape[1] + columns).flatten()
    most = torch.zeros(shape[0] * shape[1]).scatter_reduce(0, index, x.float().abs().flatten(), "amax")
    scale = most.clamp(min=1e-10) / LARGEST[dtype]
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return nearest(x.float() * (1 / scale)[index].view(x.shape), dtype), scale.view(shape)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_definition(quant: Any, dtype: torch.dtype, ue8m0: bool) -> None:
    rows, columns = (130, 3) if quant == "block128" else (5, 130)
    torch.manual_seed(0)
    x = (torch.randn(rows, columns) * torch.rand(rows, 1).exp()).bfloat16()
    q, scale = flux.quantize(x, quant, ue8m0=ue8m0, dtype=dtype)
    assert q.dtype == dtype and q.shape == x.shape and q.is_contiguous() and scale.dtype == torch.float32
    values, scales = definition(x, quant, dtype, ue8m0)
    assert torch.equal(scale.view(scales.shape), scales) and torch.equal(q.float(), values)


@pytest.mark.parametrize("quant", QUANTS)
def test_shapes_and_layout(quant: Any) -> None:
    x = torch.randn(6, 260)
    q, scale = flux.quantize(x, quant)
    shape = {"tensor": (1,), "row": (6, 1), "group128": (6, 3), "block128": (1, 3)}[quant]
    assert tuple(scale.shape) == shape
    if quant == "group128":
        assert scale.stride() == (1, 8) and scale.data_ptr() % 16 == 0
    deep_q, deep_scale = flux.quantize(x.view(2, 3, 260), quant)
    assert deep_q.shape == (2, 3, 260)
    if quant == "block128":  # a matrix for each entry of the first dimension, such as an expert
        assert deep_scale.shape == (2, 1, 3)
        assert torch.equal(deep_scale[1], flux.quantize(x[3:], quant)[1])
        return
    assert torch.equal(deep_q.float().view(6, 260), q.float())
    assert torch.equal(deep_scale.reshape(scale.shape), scale)
    if quant != "tensor":
        assert deep_scale.shape[:2] == (2, 3)
        flat = flux.quantize(x[0], quant)
        assert torch.equal(flat[0].float(), q[0].float()) and torch.equal(flat[1], scale[0])
    strided_q, strided_scale = flux.quantize(torch.randn(260, 12)[:, ::2].copy_(x.t()).t(), quant)
    assert torch.equal(strided_q.float(), q.float()) and torch.equal(strided_scale, scale)


def test_static_scale() -> None:
    x = torch.tensor([[1.0, -2.0, 1000.0, 0.3]])
    given = torch.tensor([0.5])
    q, scale = flux.quantize(x, "tensor", scale=given)
    assert torch.equal(q.float(), torch.tensor([[2.0, -4.0, 448.0, 0.625]]))
    assert torch.equal(scale, given) and scale.data_ptr() != given.data_ptr()
    assert torch.equal(flux.quantize(x, "tensor", scale=torch.tensor(0.5))[1], given)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[0.0, 0.0], [nan, 1.0], [-nan, 2.0], [inf, 3.0], [1e-30, -1e-30], [-0.0, 1.0]])
    q, scale = flux.quantize(x, "row", dtype=dtype)
    assert torch.equal(q[0].float(), torch.zeros(2)) and scale[0] == torch.tensor(1e-10) / LARGEST[dtype]
    assert (q[1:3].view(torch.uint8) == 0x7F).all() and scale[1:3].isnan().all()
    assert q[3, 0].float().isnan() and q[3, 1].float() == 0 and scale[3].isinf()
    assert (q[4].float() == 0).all() and q[5].view(torch.uint8)[0] == 0x80
    ue8m0 = flux.quantize(x, "row", dtype=dtype, ue8m0=True)[1]
    assert ue8m0[1:3].isnan().all() and ue8m0[3].isinf()


X = torch.ones(4, 256)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"quant": "rows"}, "quant: expected one of tensor, row, group128, block128, got 'rows'"),
    ({"x": torch.ones(4), "quant": "block128"}, "x: expected at least 2 dimensions for 'block128'"),
    ({"quant": "row", "scale": torch.ones(1)}, "scale: expected None with 'row'"),
    ({"quant": "tensor", "scale": torch.ones(1), "ue8m0": True}, "ue8m0: expected False"),
]


@pytest.mark.parametrize(("change", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_arguments(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="quantize: " + told):
        flux.quantize(**({"x": X} | change))
