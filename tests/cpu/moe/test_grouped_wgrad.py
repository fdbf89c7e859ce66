"""flux.grouped_wgrad and grouped_wgrad_accum on CPU tensors, and what CUDA tensors go through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import integers
from torch._subclasses.fake_tensor import FakeTensorMode

import flux
from flux import _log
from flux.ops import wgrad as ops

TUNING = Path(__file__).parents[3] / "benchmarks/results/tuning"
N, K, ROWS = 16, 24, 12
OFFSETS = torch.tensor(
    [0, 0, 5, 5, 9], dtype=torch.int32
)  # of four experts; the last three rows are nobody's
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients and inputs, which are infinite where nobody's rows are, and the products in fp64."""
    grad, x = integers(1, ROWS, N, dtype=dtype), integers(2, ROWS, K, dtype=dtype)
    grad[9:], x[9:] = float("inf"), float("nan")
    pairs = ((0, 0), (0, 5), (5, 5), (5, 9))
    return grad, x, torch.stack([grad[a:b].double().t() @ x[a:b].double() for a, b in pairs])


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_expert_s_rows_are_summed(dtype: torch.dtype) -> None:
    grad, x, expected = operands(dtype)
    result = flux.grouped_wgrad(grad, x, OFFSETS)
    assert result.dtype == dtype and torch.equal(result.double(), expected)
    assert flux.grouped_wgrad(grad, x, OFFSETS[:1]).shape == (0, N, K)
    nothing = flux.grouped_wgrad(grad[:0], x[:0], torch.zeros(3, dtype=torch.int32))
    assert torch.equal(nothing, torch.zeros(2, N, K, dtype=dtype))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_added(dtype: torch.dtype, wide: bool, apart: bool) -> None:
    grad, x, products = operands(dtype)
    main_dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    room = integers(3, 4, N + 3, K, dtype=main_dtype)
    main_grad = room[:, :N] if apart else room[:, :N].contiguous()
    before, between = main_grad.to(torch.float64, copy=True), room[:, N:].clone()
    for _ in range(2):
        flux.grouped_wgrad_accum(grad, x, OFFSETS, main_grad)
    assert torch.equal(main_grad.double(), before + 2 * products)
    assert torch.equal(room[:, N:], between)


@pytest.mark.parametrize("as_one", [False, True])
def test_what_is_added_is_not_rounded(as_one: bool) -> None:
    """257 is no bfloat16. Experts without rows get nothing, and rows after the last are not read."""
    grad, x = torch.ones(300, 3, dtype=torch.bfloat16), torch.ones(300, 5, dtype=torch.bfloat16)
    grad[260:] = x[260:] = float("nan")
    whole = torch.arange(8)[::2, None, None].div(2).add(0.5).repeat(1, 3, 5)
    main_grads = whole if as_one else list(whole)
    ops.add_expert_grads(grad, x, torch.tensor([0, 0, 257, 257, 260], dtype=torch.int32), main_grads)
    for main_grad, expected in zip(main_grads, (0.5, 258.5, 2.5, 6.5), strict=True):
        assert (main_grad == expected).all()


def test_what_cuda_tensors_go_through_without_the_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's grouped product gives what the loop over experts gives, experts without rows too."""
    monkeypatch.setattr(_log, "_said", set())
    grad, x, products = operands(torch.bfloat16)
    expected = products.bfloat16()
    assert torch.equal(ops._cuda(grad, x, OFFSETS), expected)
    main_grad = torch.ones(4, N, K)
    ops._accum_cuda(grad, x, OFFSETS, main_grad)
    assert torch.equal(main_grad, 1 + expected.float()) and not caplog.records
    assert torch.equal(ops._cuda(grad.half(), x.half(), OFFSETS), expected.half())
    assert "float16" in caplog.records[0].message and "synchronise" in caplog.records[0].message
    ops._accum_cuda(grad.half(), x.half(), OFFSETS, main_grad)
    assert torch.equal(main_grad, 1 + 2 * expected.float())
    no_rows = torch.zeros(5, dtype=torch.int32)
    assert not ops._cuda(grad[:0], x[:0], no_rows).any()
    ops._accum_cuda(grad[:0], x[:0], no_rows, main_grad)
    assert torch.equal(main_grad, 1 + 2 * expected.float())


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Lets CPU tensors take the way of a GPU's; returns what the kernel is launched with."""
    launched: list[torch.Tensor] = []

    def kernel(grad: Any, x: Any, offsets: Any, out: torch.Tensor, choice: int, num_sms: int) -> None:
        assert (choice, num_sms) == (ops.PREFETCHES if out.dtype == torch.float32 else 1, 0), "few rows"
        launched.append(out)

    monkeypatch.setattr(ops, "_kernel", kernel)
    monkeypatch.setattr(ops.cuda, "why_not", lambda device: None)
    return launched


@pytest.mark.parametrize(("wanted", "kernels"), [("kernel", True), ("torch", False), (None, True)])
def test_the_kernel_is_used_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, kernels: bool
) -> None:
    on_gpu(monkeypatch)
    monkeypatch.delenv("FLUX_GROUPED_WGRAD", raising=False)
    if wanted is not None:
        monkeypatch.setenv("FLUX_GROUPED_WGRAD", wanted)
    with FakeTensorMode():
        grad, x = (torch.empty(ROWS, n, device="cuda", dtype=torch.bfloat16) for n in (N, K))
        assert ops.uses_kernel(grad, x) is kernels
        assert ops.uses_kernel(grad, x, torch.empty(4, N, K, device="cuda")) is kernels
        assert not ops.uses_kernel(grad.cpu(), x.cpu())


def test_choices_are_the_fastest_of_those_that_were_timed() -> None:
    rows = json.loads((TUNING / "2026-11-26-grouped-wgrad-1xH100.json").read_text())["rows"]
    names = {0: "flux, 4 stages", 1: "flux, 3 stages, 5 slabs", ops.PREFETCHES: "flux, 4 stages, prefetched"}
    for row in rows:
        us = row["us"]
        chosen = us[names[ops._choice(row["experts_n_k_rows"][3], row["added"])]]
        assert chosen < 1.03 * min(us.values()), row
        assert chosen < min(each for name, each in us.items() if "torch" in name), row


def test_what_the_kernel_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = on_gpu(monkeypatch)
    monkeypatch.setattr(ops, "uses_kernel", lambda *_: True)
    grad, x, _ = operands(torch.bfloat16)
    assert launched == [] and ops._cuda(grad, x, OFFSETS) is launched[0]
    main_grad = torch.zeros(4, N + 2, K)[:, 1 : N + 1]
    ops._accum_cuda(grad, x, OFFSETS, main_grad)
    assert launched[1] is main_grad and main_grad._version == 1
    buffer = torch.zeros(4 * N * K + 4)
    misaligned = next(view for i in (1, 2) if (view := buffer[i:][: 4 * N * K]).data_ptr() % 16)
    monkeypatch.setattr(ops, "uses_kernel", lambda grad, x, main_grad=None: main_grad is not None)
    ops._accum_cuda(grad, x, OFFSETS, misaligned.view(4, N, K))
    assert len(launched) == 2 and buffer.any()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.ones(ROWS, K)}, "take bfloat16 and float16, not float32"),
        ({"grad": torch.ones(ROWS, N + 1).bfloat16()}, "n = 17 is not a multiple of 8"),
        ({"x": torch.ones(ROWS, K + 4).bfloat16()}, "k = 28 is not a multiple of 8"),
        ({"main_grad": torch.ones(4, N, K).bfloat16()}, "adds to float32, not bfloat16"),
        ({"main_grad": torch.ones(4, K, N).transpose(1, 2)}, "do not begin at multiples of 16 bytes"),
        ({"main_grad": torch.ones(4, N, K + 2)[:, :, :K]}, "do not begin at multiples of 16 bytes"),
        ({"main_grad": torch.ones(4 * N * K + 6).as_strided((4, N, K), (N * K + 2, K, 1))}, "do not begin"),
        ({"main_grad": torch.ones(1, N, K).expand(4, N, K)}, "do not begin"),
        ({"main_grad": torch.ones(4, N, K + 4)[:, :, :K]}, None),
        ({"main_grad": torch.ones(N * K + 6).as_strided((1, N, K), (2, K, 1))}, None),
        ({}, None),
    ],
)
def test_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, torch.Tensor], told: str | None
) -> None:
    on_gpu(monkeypatch)
    grad, x, _ = operands(torch.bfloat16)
    found = ops.why_not(**{"grad": grad, "x": x, "main_grad": torch.ones(4, N, K), **change})
    assert found is None if told is None else found is not None and told in found


G, X, MAIN = torch.ones(ROWS, N), torch.ones(ROWS, K), torch.ones(4, N, K)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offsets": OFFSETS[:0]}, r"offsets: expected shape \[experts \+ 1\], got shape \[0\]"),
        ({"offsets": OFFSETS + 1}, "offsets: expected 0 as the first entry"),
        ({"offsets": OFFSETS.flip(0) - 9}, "offsets: expected 0 as|offsets: expected entries that do not"),
        ({"offsets": 2 * OFFSETS}, "offsets: expected entries up to the 12 rows, got 18"),
    ],
)
def test_bad_arguments(change: dict[str, torch.Tensor], told: str) -> None:
    given = {"grad_output": G, "x": X, "offsets": OFFSETS, **change}
    with pytest.raises(ValueError, match=f"grouped_wgrad: {told}"):
        flux.grouped_wgrad(**given)
    with pytest.raises(ValueError, match=f"grouped_wgrad_accum: ({told})"):
        flux.grouped_wgrad_accum(**given, main_grad=MAIN.clone())


@pytest.mark.parametrize("between", [False, True])
def test_main_grads_share_no_memory_with_others(between: bool) -> None:
    """x may lie between the experts' gradients, and not within one of them."""
    memory = torch.zeros(4 * (N * K + ROWS * K))
    main_grad = memory.view(4, N * K + ROWS * K)[:, : N * K].view(4, N, K)
    first = N * K if between else N * K - 1
    x = memory[first : first + ROWS * K].view(ROWS, K)
    if between:
        flux.grouped_wgrad_accum(G, x.fill_(1), OFFSETS, main_grad)
        assert (main_grad[1] == 5).all()
    else:
        with pytest.raises(ValueError, match="main_grad: expected memory of its own"):
            flux.grouped_wgrad_accum(G, x, OFFSETS, main_grad)


def test_a_compiled_step_adds_too() -> None:
    def step(grad: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        flux.grouped_wgrad_accum(grad, x, OFFSETS, main_grad)
        return flux.grouped_wgrad(grad, x, OFFSETS) + main_grad

    grad, x, expected = operands(torch.float32)
    main_grad = torch.zeros(4, N, K)
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(grad, x, main_grad)
    assert torch.equal(main_grad.double(), expected) and torch.equal(result.double(), 2 * expected)
