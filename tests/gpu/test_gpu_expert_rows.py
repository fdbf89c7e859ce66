"""Steps between GEMMs on one GPU, against torch's formulas: of expert layers, and the kernel that adds a
residual to a sum and normalises both.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flux.moe import rows as steps
from flux.ops.add_norm import _fits, add_norm_
from flux.ops.grouped_gemm import ACTIVATIONS

DTYPES = [torch.bfloat16, torch.float16]
# Rows, of which the last belong to nobody, and columns.
SHAPES = [(1, 0, 8), (7, 9, 24), (300, 213, 2056), (2000, 2000, 768), (600, 1, 14336)]
NAN = float("nan")


def integers(seed: int, *shape: int, dtype: torch.dtype, most: int = 4) -> Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g, device="cuda").to(dtype)


def offsets_to(end: int) -> Tensor:
    return torch.tensor([0, end // 3, end // 3, end], dtype=torch.int32, device="cuda")


def nowhere(rows: Tensor, end: int) -> Tensor:
    rows[end:] = NAN
    return rows


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("end", "more", "n"), SHAPES)
def test_gathered_rows(end: int, more: int, n: int, dtype: torch.dtype, scaled: bool) -> None:
    x, scores = integers(n, 500, n, dtype=dtype), integers(1, end + more, dtype=torch.float32)
    tokens = torch.randint(0, 500, (end + more,), device="cuda").int()
    tokens[end:] = 2**31 - 1  # not to be followed
    out = torch.full((end + more, n), 7, dtype=dtype, device="cuda")
    torch.ops.flux._moe_gather_rows(x, tokens, offsets_to(end), scores if scaled else None, out)
    expected = x[tokens[:end].long()]
    assert torch.equal(out[:end], expected * scores[:end, None].to(dtype) if scaled else expected)
    assert (out[end:] == 7).all()


@pytest.mark.parametrize(("scaled", "dotted"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("end", "more", "n"), SHAPES)
def test_finished_rows(end: int, more: int, n: int, dtype: torch.dtype, scaled: bool, dotted: bool) -> None:
    rows, x = (nowhere(integers(seed, end + more, n, dtype=dtype), end) for seed in (1, 2))
    scores = nowhere(integers(3, end + more, dtype=torch.float32), end)
    given = (offsets_to(end), scores if scaled else None, x if dotted else None)
    expected = (rows.float() * scores[:, None]).to(dtype) if scaled else rows.clone()
    dots = (rows.float() * x.float()).sum(-1)
    expected[end:], dots[end:] = 0, 0
    with torch.no_grad():
        finished, found = steps.finish_rows(rows, *given)
    assert finished is rows and torch.equal(rows, expected)
    assert torch.equal(found, dots if dotted else dots[:0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("end", "more", "n"), SHAPES)
def test_activations(end: int, more: int, n: int, dtype: torch.dtype, activation: str) -> None:
    columns, offsets = 2 * n if activation == "swiglu" else n, offsets_to(end)
    g = torch.Generator("cuda").manual_seed(n)
    product = (3 * torch.randn(end + more, columns, generator=g, device="cuda")).to(dtype)
    product[: end // 2, : n // 2] = integers(4, end // 2, n // 2, dtype=dtype, most=1) * 200
    grad = torch.randn(end + more, n, generator=g, device="cuda").to(dtype)
    kept = product.clone().requires_grad_()
    result = steps.activate_rows(kept, offsets, activation)
    (of_product,) = torch.autograd.grad(result, kept, grad)
    close = {"rtol": 2**-7 if dtype == torch.bfloat16 else 2**-10, "atol": 1e-4}
    expected = steps.activate(product.double(), activation)
    torch.testing.assert_close(result[:end].double(), expected[:end], **close)
    of_all = steps._activation_grad(grad.double(), product.double(), offsets, activation)
    torch.testing.assert_close(of_product[:end].double(), of_all[:end], **close)

    scores = integers(7, end + more, dtype=torch.float32)
    rows = nowhere(grad.clone(), end)
    with torch.no_grad():
        of_both, active, found = steps.finish_activation(rows, product, offsets, scores, activation)
    assert active is rows
    torch.testing.assert_close(active[:end].double(), expected[:end], **close)
    dots = (grad[:end].double() * active[:end].double()).sum(-1)
    torch.testing.assert_close(found[:end].double(), dots, rtol=1e-4, atol=1e-5 * n**0.5 * 200)
    scaled = of_all * scores[:, None].double()
    torch.testing.assert_close(of_both[:end].double(), scaled[:end], **close)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_of_nobody_are_neither_read_nor_written(activation: str) -> None:
    end, n = 133, 512
    columns, number = 2 * n if activation == "swiglu" else n, 1 + ACTIVATIONS.index(activation)
    product = nowhere(integers(5, 200, columns, dtype=torch.bfloat16), end)
    grad = nowhere(integers(6, 200, n, dtype=torch.bfloat16), end)
    result, of_product = torch.full_like(grad, 7), torch.full_like(product, 7)
    torch.ops.flux._moe_activate_rows(product, offsets_to(end), number, result)
    torch.ops.flux._moe_activation_grad(grad, product, offsets_to(end), number, of_product)
    of_both, dots, scores = (
        torch.full_like(product, 7),
        torch.full_like(grad[:, 0].float(), 7),
        grad[:, 0].float(),
    )
    torch.ops.flux._moe_finish_activation(grad, product, offsets_to(end), scores, number, of_both, dots)
    assert torch.isnan(grad[end:]).all()
    for out in (result, of_product, of_both, dots):
        assert torch.isfinite(out).all() and (out[end:] == 7).all() and (out[:end] != 7).any()


def test_replays_in_a_graph_with_another_number_of_rows() -> None:
    rows, offsets = torch.ones(64, 256, dtype=torch.bfloat16, device="cuda"), offsets_to(20)
    with torch.no_grad():
        steps.finish_rows(rows.clone(), offsets)  # kernels are loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps.finish_rows(rows, offsets)
    for end in (50, 3):
        rows.fill_(1)
        offsets.copy_(offsets_to(end))
        graph.replay()
        assert int(rows.sum()) == end * 256


def test_kernels_refuse_what_they_cannot_do() -> None:
    rows, offsets = torch.ones(4, 16, dtype=torch.float32, device="cuda"), offsets_to(4)
    with pytest.raises(RuntimeError):
        torch.ops.flux._moe_finish_rows(rows, offsets, None, None, None)
    half = rows.bfloat16()
    with pytest.raises(RuntimeError):
        torch.ops.flux._moe_finish_rows(half[:, :12].contiguous(), offsets, None, None, None)
    with pytest.raises(RuntimeError):
        torch.ops.flux._moe_activate_rows(half, offsets, 3, torch.empty_like(half))
    # The operators take them, by torch.
    with torch.no_grad():
        assert torch.equal(steps.finish_rows(rows.clone(), offsets)[0], rows)


# More rows than CTAs; rows that no CTA has room for in shared memory.
NORM_SHAPES = [(1, 8), (3, 4096), (256, 8192), (700, 5120), (2048, 8192), (5, 13312), (2, 32768)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), NORM_SHAPES)
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
