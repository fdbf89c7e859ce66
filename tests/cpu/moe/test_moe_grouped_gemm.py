"""flux.grouped_gemm on CPU tensors, and what CUDA tensors go through where there is no kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import integers

import flux
from flux import _log
from flux.ops import grouped_gemm as ops

E, N, K = 4, 16, 24
SIZES = [0, 5, 0, 3]  # rows of each expert
OFFSETS = torch.tensor([0, 0, 5, 5, 8], dtype=torch.int32)


def by_expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts = [e for e, size in enumerate(SIZES) for _ in range(size)]
    return torch.stack([x[i].double() @ weight[e].double().t() for i, e in enumerate(experts)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_each_row_meets_the_weight_of_its_expert(dtype: torch.dtype) -> None:
    x, weight = integers(0, 10, K).to(dtype), integers(1, E, N, K).to(dtype)
    result = flux.grouped_gemm(x, weight, OFFSETS)
    assert result.shape == (10, N) and result.dtype == dtype
    assert torch.equal(result[:8].double(), by_expert(x, weight))
    rows = torch.tensor([9, 9, 0, 1, 2, 3, 4, 5, -1], dtype=torch.int32)
    gathered = flux.grouped_gemm(x, weight, OFFSETS, rows=rows)
    assert torch.equal(gathered[:8].double(), by_expert(x[rows[:8].long()], weight))
    assert torch.equal(gathered, flux.grouped_gemm(x, weight, OFFSETS, rows=rows.long()))


def test_torch_s_grouped_gemm_gives_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA tensors go through, and that it is said once."""
    monkeypatch.setattr(_log, "_said", set())
    x, weight = integers(0, 10, K).bfloat16(), integers(1, E, N, K).bfloat16()
    for _ in range(2):
        result = ops.unfused(ops.Grouped(x, weight, OFFSETS))
        assert torch.equal(result[:8].double(), by_expert(x, weight))
    swiglu = ops.unfused(ops.Grouped(x, weight, OFFSETS, None, "swiglu"))[:8]
    torch.testing.assert_close(swiglu, flux.grouped_gemm(x, weight, OFFSETS, activation="swiglu")[:8])
    assert [r.message for r in caplog.records] == [
        "grouped GEMMs run unfused, through torch: there is no kernel for them yet"
    ]
    odd = ops.unfused(ops.Grouped(x.half(), weight.half(), OFFSETS))
    assert torch.equal(odd[:8].double(), by_expert(x, weight))
    assert "float16" in caplog.records[-1].message and "synchronises" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("layout", "activation", "in_place"),
    [
        (lambda w: w, "swiglu", True),
        (lambda w: apart(w, (8, 8)), "swiglu", True),
        (lambda w: apart(w, (8, 4)), None, False),  # rows do not begin at multiples of 16 bytes
        (lambda w: apart(w.mT, (8, 8)).mT, None, True),
        (lambda w: apart(w.mT, (8, 8)).mT, "swiglu", False),  # tiles of gates and ups need [N, K]
        (lambda w: apart(w.mT, (1, 4)).mT, None, False),
        (lambda w: w.repeat_interleave(2, 2)[..., ::2], None, False),
        (lambda w: torch.cat([w.flatten().new_zeros(1), w.flatten()])[1:].view(w.shape), None, False),
    ],
)
def test_weights_are_read_where_they_lie_if_tma_can(layout: Any, activation: Any, in_place: bool) -> None:
    weight = layout(integers(1, E, N, K).bfloat16())
    read = ops.readable_weight(weight, activation, None)
    assert (read is weight) == in_place and torch.equal(read, weight)
    assert in_place or read.is_contiguous()
    one = ops.readable_weight(weight[2:3], activation, None)
    assert torch.equal(one, weight[2:3]) and (one.data_ptr() == weight[2].data_ptr()) == in_place


def test_weights_that_overlap_are_copied() -> None:
    weight = integers(2, 1, N, K).bfloat16().expand(E, N, K)
    assert torch.equal(read := ops.readable_weight(weight, None, None), weight) and read.is_contiguous()


def apart(weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """The same weights, with rows and columns between them."""
    experts, n, k = weight.shape
    return weight.new_zeros(experts, n + padding[0], k + padding[1])[:, :n, :k].copy_(weight)
