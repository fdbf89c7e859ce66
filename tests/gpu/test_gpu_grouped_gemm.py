"""The grouped GEMM kernel on one GPU: tile shapes, uneven and empty experts, rows by index, activations."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import flux
from flux.ops import grouped_gemm as grouped
from flux.ops import wgrad as ops

DTYPES = [torch.bfloat16, torch.float16]
CONFIGS = [0, 3, 5, 9]
# Rows of each expert: none, one, a tile and one more, many.
COUNTS = [[0, 1, 129, 0, 300, 128], [5], [0, 0, 64], [700, 3]]


def inputs(
    counts: list[int], n: int, k: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, offsets and rows: small integers whose products are exact, a shuffled order of rows."""
    g = torch.Generator("cuda").manual_seed(seed)
    total, experts = sum(counts), len(counts)
    x = torch.zeros(total + 7, k, device="cuda")
    # Three entries of each row: no product exceeds 3 * 4 in absolute value.
    columns = torch.randint(k, (total + 7, 3), generator=g, device="cuda")
    x.scatter_(1, columns, torch.randint(1, 3, columns.shape, generator=g, device="cuda").float())
    weight = torch.randint(-2, 3, (experts, n, k), generator=g, device="cuda")
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    rows = torch.randperm(total + 7, generator=g, device="cuda")[:total].int()
    return x.to(dtype), weight.to(dtype), offsets, rows


def laid_out(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights [E, N, K] as others store them; between them is NaN, which nothing may be multiplied by."""
    experts, n, k = weight.shape

    def view(shape: tuple[int, int, int], transposed: bool) -> torch.Tensor:
        room = torch.full(shape, float("nan"), dtype=weight.dtype, device="cuda")
        found = room.transpose(1, 2)[:, :n, :k] if transposed else room[:, :n, :k]
        return found.copy_(weight)

    return {
        "[N, K]": weight,
        "[N, K], apart": view((experts, n + 24, k + 8), False),
        "[K, N]": view((experts, k, n), True),
        "[K, N], apart": view((experts, k + 24, n + 8), True),
    }


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_read_where_they_lie(config: int, dtype: torch.dtype) -> None:
    for seed, (n, k) in enumerate([(8, 8), (200, 72), (520, 264), (136, 1608)]):
        x, weight, offsets, rows = inputs([0, 1, 129, 300], n, k, dtype, seed)
        expected = grouped.reference(x, weight, offsets, rows)
        for name, each in laid_out(weight).items():
            assert grouped.readable_weight(each, None, None) is each
            out = torch.full_like(expected, 7)
            grouped.launch(grouped.Grouped(x, each, offsets, rows), out, config)
            assert torch.equal(out, expected), (name, n, k)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_shape(config: int, dtype: torch.dtype) -> None:
    for seed, counts in enumerate(COUNTS):
        # The last has rows long enough that the next tile is asked for in the middle of one.
        for n, k in [(8, 8), (200, 72), (520, 264), (136, 1608)]:
            x, weight, offsets, rows = inputs(counts, n, k, dtype, seed)
            for chosen in (rows, None):
                source = x if chosen is not None else x[: sum(counts)]
                out = torch.full((sum(counts) + 3, n), 7, dtype=dtype, device="cuda")
                grouped.launch(grouped.Grouped(source, weight, offsets, chosen), out[: sum(counts)], config)
                expected = grouped.reference(source, weight, offsets, chosen)
                assert torch.equal(out[: sum(counts)], expected), (counts, n, k, chosen is None)
                assert (out[sum(counts) :] == 7).all(), "written behind the last row"


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_activations(activation: str) -> None:
    x, weight, offsets, rows = inputs([40, 0, 200], 272, 136, torch.bfloat16, 1)
    out = flux.grouped_gemm(x, weight, offsets, rows=rows, activation=activation)
    expected = grouped.reference(x, weight, offsets, rows, activation)
    # The products are exact; one rounding, and what the fast exponential loses.
    assert out.shape == expected.shape
    limit = 1.01 * torch.finfo(torch.bfloat16).eps * expected.float().abs() + 1e-6
    assert ((out.float() - expected.float()).abs() <= limit).all()


@pytest.mark.parametrize("num_sms", [1, 5, 0])
def test_any_number_of_sms(num_sms: int) -> None:
    x, weight, offsets, rows = inputs([260, 130, 0, 9], 1032, 200, torch.bfloat16, 2)
    out = torch.empty(399, 1032, dtype=torch.bfloat16, device="cuda")
    grouped.launch(grouped.Grouped(x, weight, offsets, rows), out, -1, num_sms)
    assert torch.equal(out, grouped.reference(x, weight, offsets, rows))


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_of_the_tile_before_do_not_matter(config: int) -> None:
    """One CTA computes a full tile of NaNs, then a tile of three rows whose other rows nobody loads."""
    x, weight, offsets, rows = inputs([128, 3], 264, 1608, torch.bfloat16, 4)
    x[rows[:128].long()] = float("nan")
    out = torch.empty(131, 264, dtype=torch.bfloat16, device="cuda")
    grouped.launch(grouped.Grouped(x, weight, offsets, rows), out, config, 1)
    assert out[:128].isnan().all()
    assert torch.equal(out[128:], grouped.reference(x, weight, offsets, rows)[128:])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, indexed: bool) -> None:
    """Exact, as on the CPU; gradients of rows that no expert has are zero, whatever comes for them."""
    x, weight, offsets, rows = inputs([0, 1, 129, 40], 264, 136, dtype, 5)
    source = x if indexed else torch.cat([x[:170], x.new_full((3, 136), float("nan"))])
    answers = []
    for device in ("cuda", "cpu"):
        leaves = [each.detach().to(device).requires_grad_() for each in (source, weight)]
        given = rows.to(device) if indexed else None
        result = flux.grouped_gemm(*leaves, offsets.to(device), rows=given)
        grad = (torch.arange(result.numel(), device=device).view(result.shape) % 3 - 1).to(dtype)
        grad[170:] = float("nan")
        result.backward(grad)
        answers.append([leaf.grad.cpu() for leaf in leaves])
    for ours, right in zip(*answers, strict=True):
        assert torch.equal(ours, right) and ours.isfinite().all()


def test_replays_in_a_graph_with_other_offsets() -> None:
    x, weight, offsets, rows = inputs([260, 130, 0, 9], 264, 200, torch.bfloat16, 3)
    flux.grouped_gemm(x, weight, offsets, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flux.grouped_gemm(x, weight, offsets, rows=rows)
    for counts in ([0, 0, 399, 0], [100, 100, 100, 99], [1, 2, 3, 4]):
        offsets.copy_(torch.tensor([0, *counts], device="cuda").cumsum(0))
        graph.replay()
        used = sum(counts)
        assert torch.equal(out[:used], grouped.reference(x, weight, offsets, rows)[:used])


# The kernel of experts' weight gradients: ragged and empty experts, rows of others, graphs.
CHOICES = [0, 1, 1 << 8, 1 + (1 << 8)]  # two tiles, without and with a prefetch of what is added to
# Rows of each expert: none, one, a k-block with and without one more, many.
WGRAD_COUNTS = [[0, 1, 65, 0, 300, 64], [5], [0, 0, 128], [700, 3, 63], [0]]
SHAPES = [(8, 8), (200, 72), (128, 256), (264, 520), (1032, 136)]


def operands(
    counts: list[int], n: int, k: int, dtype: torch.dtype, seed: int, more: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    """grad, x and offsets: small integers, whose sums are exact; NaN in rows behind the last."""
    g = torch.Generator("cuda").manual_seed(seed)
    rows = sum(counts) + more
    grad, x = (torch.randint(-2, 3, (rows, m), generator=g, device="cuda").to(dtype) for m in (n, k))
    grad[sum(counts) :] = x[sum(counts) :] = float("nan")
    return grad, x, torch.tensor([0, *counts], device="cuda").cumsum(0).int()


def products(grad: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    pairs = zip(grad[: sum(counts)].split(counts), x[: sum(counts)].split(counts), strict=True)
    return torch.stack([a.double().t() @ b.double() for a, b in pairs])


def room(experts: int, n: int, k: int, dtype: torch.dtype, apart: bool) -> tuple[Tensor, Tensor]:
    """Memory of NaN, and matrices in it that begin at multiples of 16 bytes."""
    memory = torch.full((experts, n + 3, k + 8), float("nan"), dtype=dtype, device="cuda")
    return (
        (memory, memory[:, 1 : n + 1, :k])
        if apart
        else (memory, memory.view(-1)[: experts * n * k].view(experts, n, k))
    )


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_stored_or_added_unrounded(
    choice: int, dtype: torch.dtype, apart: bool, adds: bool
) -> None:
    for seed, counts in enumerate(WGRAD_COUNTS):
        for n, k in SHAPES:
            grad, x, offsets = operands(counts, n, k, dtype, seed)
            memory, out = room(len(counts), n, k, torch.float32 if adds else dtype, apart)
            expected = products(grad, x, counts)
            if adds:
                before = torch.arange(out.numel(), device="cuda").view(out.shape) % 1000 + 0.25
                out.copy_(before)
                expected = before.double() + 2 * expected
            for _ in range(2):
                ops.launch(grad, x, offsets, out, choice)
            assert torch.equal(out, expected.to(out.dtype)), (counts, n, k)
            out.fill_(float("nan"))
            assert memory.isnan().all(), "written between the gradients"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_rows_of_others_may_be_infinite(choice: int, adds: bool) -> None:
    """Zero times infinity is NaN."""
    counts = [65, 40, 1, 130, 63]
    for poisoned in range(len(counts)):
        grad, x, offsets = operands(counts, 264, 136, torch.bfloat16, poisoned)
        first, last = (int(offsets[poisoned + i]) for i in range(2))
        grad[first:last], x[first:last] = float("inf"), float("-inf")
        out = torch.zeros(
            len(counts), 264, 136, dtype=torch.float32 if adds else torch.bfloat16, device="cuda"
        )
        ops.launch(grad, x, offsets, out, choice)
        expected = products(grad, x, counts).to(out.dtype)
        for expert in range(len(counts)):
            if expert != poisoned:
                assert torch.equal(out[expert], expected[expert]), (poisoned, expert)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_many_problems(choice: int, adds: bool) -> None:
    """Rows that are parts of others, few SMs, and launches behind each other."""
    draw = random.Random(choice + 2 * adds)
    for seed in range(60):
        counts = [
            draw.choice([0, draw.randrange(70), draw.randrange(500)]) for _ in range(draw.randint(1, 40))
        ]
        n, k = (8 * draw.randint(1, 90) for _ in range(2))
        grad, x, offsets = operands(counts, n + 8, k + 16, torch.bfloat16, seed)
        grad, x = grad[:, 8:], x[:, :k]
        out = torch.zeros(len(counts), n, k, dtype=torch.float32 if adds else torch.bfloat16, device="cuda")
        sms = draw.choice([0, 0, 2, 3, 50])
        calls = 3
        for _ in range(calls):
            ops.launch(grad, x, offsets, out, choice, sms)
        expected = products(grad, x, counts) * (calls if adds else 1)
        assert torch.equal(out, expected.to(out.dtype)), (seed, counts, n, k, sms)


@pytest.mark.parametrize(("experts", "n", "k", "rows"), [(4, 28672, 4096, 1024), (64, 1536, 2048, 256)])
def test_sizes_of_models(experts: int, n: int, k: int, rows: int) -> None:
    counts = [rows - 37 + 74 * e // experts for e in range(experts)]
    grad, x, offsets = operands(counts, n, k, torch.bfloat16, 1)
    main_grad = torch.ones(experts, n, k, device="cuda")
    ops.launch(grad, x, offsets, main_grad)
    stored = torch.empty(experts, n, k, dtype=torch.bfloat16, device="cuda")
    ops.launch(grad, x, offsets, stored)
    for expert in range(experts):
        mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
        expected = grad[mine].float().t() @ x[mine].float()
        assert torch.equal(main_grad[expert], 1 + expected), expert
        assert torch.equal(stored[expert], expected.bfloat16()), expert


@pytest.mark.parametrize("wanted", ["kernel", "torch"])
def test_public_functions(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    launched: list[Tensor] = []
    kernel = ops._kernel
    monkeypatch.setattr(ops, "_kernel", lambda *args: (launched.append(args[3]), kernel(*args)))
    monkeypatch.setenv("FLUX_GROUPED_WGRAD", wanted)
    counts = [0, 5, 128, 67]
    grad, x, offsets = operands(counts, 136, 264, torch.bfloat16, 3)
    expected = products(grad, x, counts)
    result = flux.grouped_wgrad(grad, x, offsets)
    assert torch.equal(result, expected.bfloat16())
    main_grad = torch.ones(4, 136, 264, device="cuda")
    flux.grouped_wgrad_accum(grad, x, offsets, main_grad)
    rounded = expected if wanted == "kernel" else expected.bfloat16().double()
    assert torch.equal(main_grad.double(), 1 + rounded)
    assert len(launched) == (2 if wanted == "kernel" else 0)
    narrow = main_grad.bfloat16()
    flux.grouped_wgrad_accum(grad, x, offsets, narrow)
    assert torch.equal(narrow, main_grad.bfloat16() + expected.bfloat16())
    assert not flux.grouped_wgrad(grad[:0], x[:0], torch.zeros_like(offsets)).any()


def test_replays_in_a_graph_with_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_GROUPED_WGRAD", "kernel")
    grad, x, offsets = operands([40, 0, 110, 30], 264, 136, torch.bfloat16, 7, more=0)
    main_grad = torch.zeros(4, 264, 136, device="cuda")
    flux.grouped_wgrad_accum(grad, x, offsets, main_grad)  # kernels are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flux.grouped_wgrad_accum(grad, x, offsets, main_grad)
        stored = flux.grouped_wgrad(grad, x, offsets)
    for counts in ([0, 180, 0, 0], [64, 1, 63, 52], [0, 0, 0, 0]):
        main_grad.fill_(3)
        offsets.copy_(torch.tensor([0, *counts]).cumsum(0))
        graph.replay()
        expected = products(grad, x, counts)
        assert torch.equal(main_grad.double(), 3 + expected) and torch.equal(stored, expected.bfloat16()), (
            counts
        )


def test_the_kernel_refuses_what_it_cannot_do() -> None:
    grad, x, offsets = operands([4], 16, 24, torch.bfloat16, 1, more=0)
    out = torch.zeros(1, 16, 24, device="cuda")
    for bad in (
        (grad.float(), x.float(), offsets, out),
        (grad[:, :12].contiguous(), x, offsets, out[:, :12].contiguous()),
        (grad, x, offsets, torch.zeros(2, 16, 24, device="cuda")),
        (grad, x, offsets, out[:, :8].contiguous()),
        (grad[:2], x, offsets, out),
    ):
        with pytest.raises(RuntimeError):
            ops.launch(*bad)
    with pytest.raises(RuntimeError):
        ops.launch(grad, x, offsets, out, choice=5)
