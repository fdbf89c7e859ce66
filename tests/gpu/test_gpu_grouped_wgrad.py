"""The kernel of experts' weight gradients on one GPU: ragged and empty experts, rows of others, graphs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import flux
from flux.ops import wgrad as ops

DTYPES = [torch.bfloat16, torch.float16]
CHOICES = [0, 1, 1 << 8, 1 + (1 << 8)]  # two tiles, without and with a prefetch of what is added to
# Rows of each expert: none, one, a k-block with and without one more, many.
COUNTS = [[0, 1, 65, 0, 300, 64], [5], [0, 0, 128], [700, 3, 63], [0]]
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
    for seed, counts in enumerate(COUNTS):
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
