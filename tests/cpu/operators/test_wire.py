"""Sums whose contributions travel as int8 (wire="int8"), between CPU processes: bit for bit those of a model
that knows only the definition, within the error that the docs state, and exact where nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import asked_at, compare, scenario_test
from int8_model import data, model
from test_gemm_ar_plan import SCATTER, gpu_workspace, plan

import flux
from flux._native import core
from flux.moe.rows import weighted_sum
from flux.ops import quantize
from flux.ops.ways import int8_sum
from flux.plan.sums import MAX_EXCHANGE_BYTES, exchange_room
from flux.testing import spawn
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_data import ScaledCase

Tensor = torch.Tensor
INT8: dict[str, Any] = {"wire": "int8"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of each rank, and n: whole groups, parts of one, several rows of one group, and nothing.
SHAPES: list[tuple[int, ...]] = [(1, 128), (3, 300), (2, 5, 130), (7, 1), (4,), (0, 64), (5, 0)]


def every(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def rounded_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.abs() * {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[dtype]


def sums(rank: int, p: int) -> None:
    for number, (first, *rest) in enumerate(SHAPES):
        for dtype in DTYPES:
            x = data((first * p, *rest), 100 * number + rank, dtype)
            result = flux.reduce_scatter(x, **INT8)
            n = rest[-1] if rest else first
            rows = result.numel() // n if n else 0
            mine = [part.reshape(p, rows, n)[rank] for part in every(x)]
            total, exact, bound = model(mine, rank)
            told = f"{(first, *rest)}, {dtype}"
            expected = total.to(dtype).view(first, *rest)
            assert compare(result, expected) == "", f"{told}: {compare(result, expected)}"
            error = (result.double().view(exact.shape) - exact).abs()
            assert (error <= bound * (1 + 2**-8) + rounded_once(exact, dtype) + 1e-30).all(), told
            out = torch.full_like(result, 7)
            assert flux.reduce_scatter(x, **INT8, out=out) is out and torch.equal(out, result)


def exact_sums(rank: int, p: int) -> None:
    """127 of something in each group: the scale is that, and numbers of it travel as they are."""
    for exponent in (-3, 0, 9):
        g = torch.Generator().manual_seed(rank)
        x = torch.randint(-127, 128, (3 * p, 300), generator=g).float()
        x[:, ::128] = 127.0 * (1 - 2 * (rank % 2))
        x *= 2.0**exponent
        expected = sum(part.chunk(p)[rank] for part in every(x))
        assert torch.equal(flux.reduce_scatter(x, **INT8), expected)  # type: ignore[arg-type]
        twelve = flux.reduce_scatter(torch.full((2 * p, 7), 12.5), **INT8)
        assert (twelve == 12.5 * p).all()
        assert (flux.reduce_scatter(torch.zeros(2 * p, 130), **INT8) == 0).all()


def not_finite(rank: int, p: int) -> None:
    """What is not finite stays so, in its group of 128 only; and so do largest values."""
    for value in (float("inf"), float("-inf"), float("nan")):
        x = torch.ones(2 * p, 300)
        if rank == p - 1:
            x[:, 140] = value
        result = flux.reduce_scatter(x, **INT8)
        assert not result[:, 140].isfinite().any()
        assert (result[:, :128] == p).all() and (result[:, 256:] == p).all()
    largest = torch.finfo(torch.float32).max / (2 * p)
    assert flux.reduce_scatter(torch.full((p, 4), largest), **INT8).isfinite().all()


DEFECTS: dict[str, Callable[..., Any]] = {
    "scales dropped": lambda scale, n: torch.ones(scale.shape[0], n),
    "scales of another group": lambda scale, n: scale.roll(1, 1).repeat_interleave(128, 1)[:, :n],
    "scales of another row": lambda scale, n: scale.roll(1, 0).repeat_interleave(128, 1)[:, :n],
    "scales doubled": lambda scale, n: 2 * scale.repeat_interleave(128, 1)[:, :n],
    "groups that are too short": lambda scale, n: scale.repeat_interleave(120, 1).repeat(1, 2)[:, :n],
}


@asked_at(2, 3, 4)  # otherwise nothing travels
def defects(rank: int, p: int) -> None:
    x = data((3 * p, 300), rank, torch.float32)
    expected = model([part.chunk(p)[rank] for part in every(x)], rank)[0]
    right = quantize.spread
    for name, wrong in DEFECTS.items():
        asked: list[int] = []

        def once(scale: Tensor, quant: str, x: Tensor, asked: Any = asked, wrong: Any = wrong) -> Tensor:
            asked.append(x.shape[1])  # the first is that of the sender
            return right(scale, quant, x) if len(asked) == 1 else wrong(scale, x.shape[1])

        with mock.patch.object(quantize, "spread", once):
            assert not torch.equal(flux.reduce_scatter(x, **INT8), expected), name
        assert len(asked) > 1
    most = int8_sum._MOST
    for name, attribute, value in (("128 steps", "_MOST", most + 1), ("120 steps", "_MOST", 120.0)):
        with mock.patch.object(int8_sum, attribute, value):
            assert not torch.equal(flux.reduce_scatter(x, **INT8), expected), name


@asked_at(2, 3, 4)
def what_travels(rank: int, p: int) -> None:
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        flux.reduce_scatter(torch.ones(5 * p, 1024, dtype=torch.bfloat16), **INT8)
    _, sent = exchange.call_args.args
    assert sent.dtype == torch.uint8 and sent.numel() == 5 * p * (1024 + 4 * 8)  # bf16: 2048 for each row
    assert not [call for call in exchange.mock_calls[1:] if call]


def gemm_rs(rank: int, p: int) -> None:
    for dtype in DTYPES:
        x, weight = data((4 * p, 2, 40), rank, dtype), data((200, 40), 9 + rank, dtype)
        bias = data((200,), 3, dtype)
        expected = flux.reduce_scatter(flux.gemm(x, weight), **INT8)
        assert torch.equal(flux.gemm_rs(x, weight, **INT8), expected)
        flipped = flux.gemm_rs(x, weight.t().contiguous(), bias, **INT8, transpose_weight=True)
        assert torch.equal(flipped, expected + bias)
        out = torch.empty_like(expected)
        assert flux.gemm_rs(x, weight, bias, **INT8, out=out) is out and torch.equal(out, expected + bias)
    case = ScaledCase(4 * p, 130, 256, p, "block", sums=True)
    q, w, scale_x, scale_w, _ = case.inputs(rank)
    how: dict[str, Any] = {"scale_x": scale_x, "scale_w": scale_w}
    expected = flux.reduce_scatter(flux.gemm(q, w, **how), **INT8)
    assert torch.equal(flux.gemm_rs(q, w, **how, **INT8), expected) and expected.dtype == torch.bfloat16


def gradients(rank: int, p: int) -> None:
    """Those of the sum of what was not rounded."""
    found = []
    for how in ({}, INT8):
        x, weight, bias = (
            data(shape, seed, torch.float32).requires_grad_()
            for shape, seed in (((4 * p, 40), rank), ((200, 40), 9 + rank), ((200,), 3))
        )
        result = flux.gemm_rs(x, weight, bias, **how)
        result.backward(data(tuple(result.shape), 20 + rank, torch.float32))
        found.append([x.grad, weight.grad, bias.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))  # type: ignore[union-attr]
    x = torch.randn(2 * p, 4, requires_grad=True)
    flux.reduce_scatter(x, **INT8).sum().backward()
    assert (x.grad == 1).all()  # type: ignore[union-attr]


def expert_layers(rank: int, p: int) -> None:
    for seed in range(4):
        tokens = tuple((0 if seed == 1 else 3) + 5 * r for r in range(p))
        case = MoeCase(tokens, 140, 48, 4 * p, 2, p if seed % 2 else 1, skew="skewed", seed=seed)
        ids, scores = case.routing(rank)
        sizes = {"ep_size": case.ep_size, "max_tokens": case.max_tokens}
        routing = flux.moe.route(ids, scores, case.num_experts, **sizes)
        x = data((routing.rows.shape[0], 48), rank, torch.float32)
        weight = data((case.local_experts, 140, 48), 7, torch.float32)
        products = flux.grouped_gemm(x, weight, routing.offsets)
        partial = weighted_sum(products, routing.positions, routing.weights)
        mine = [parts[rank] for parts in every(partial)]
        result = flux.moe.gemm_gather_rs(x, weight, routing, **INT8)
        assert result.shape == (tokens[rank], 140)
        if p == 1:
            assert torch.equal(result, flux.moe.gemm_gather_rs(x, weight, routing))
            continue
        total, exact, bound = model(mine, rank)
        assert torch.equal(result, total[: len(result)]), f"seed {seed}"
        error = (result - exact[: len(result)]).abs()
        assert (error <= bound[: len(result)] + rounded_once(exact[: len(result)], torch.float32)).all()
        found = []
        for how in ({}, INT8):
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            flux.moe.gemm_gather_rs(*leaves, routing, **how).sum().backward()
            found.append([leaf.grad for leaf in leaves])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def batch_invariant(rank: int, p: int) -> None:
    """A row does not depend on the rank that owns it."""
    x = data((p, 300), rank, torch.bfloat16)
    with flux.batch_invariant():
        rows = [every(flux.reduce_scatter(x.roll(shift, 0).contiguous(), **INT8)) for shift in range(p)]
    mine = model([part.chunk(p)[rank] for part in every(x)], rank, rounds_own=p > 1)[0]
    assert torch.equal(rows[0][rank], mine.to(x.dtype))
    for shift, found in enumerate(rows):
        for owner, row in enumerate(found):
            assert torch.equal(row, rows[0][(owner - shift) % p]), shift


def refused(rank: int, p: int) -> None:
    x, weight = torch.ones(2 * p, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match="reduce_scatter: wire: expected None for sums of torch.float64"):
        flux.reduce_scatter(x.double(), **INT8)
    with pytest.raises(ValueError, match="gemm_rs: wire: expected None for sums of torch.float64"):
        flux.gemm_rs(x.double(), weight.double(), **INT8)
    with pytest.raises(ValueError, match="gemm_rs: out"):
        flux.gemm_rs(x, weight, **INT8, out=torch.empty(3, 4))
    if p > 1:
        with pytest.raises(ValueError, match="gemm_rs: x: expected dimension 0 divisible"):
            flux.gemm_rs(torch.ones(2 * p + 1, 8), weight, **INT8)


SCENARIOS = (
    *(sums, exact_sums, not_finite, defects, what_travels, gemm_rs, gradients, expert_layers),
    *(batch_invariant, refused),
)
test_int8_on_the_wire = scenario_test([1, 2, 3, 4], *SCENARIOS, timeout_s=300)


def on_nodes(rank: int, p: int) -> None:
    sums(rank, p)
    expert_layers(rank, p)


def test_on_two_nodes() -> None:
    assert spawn(on_nodes, 4, backend="gloo", ranks_per_node=2, timeout_s=120) == [None] * 4


def test_plans_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = gpu_workspace(monkeypatch)
    for rows, n, words in (
        (0, 64, "empty"),
        (5, 60, "60 elements are no whole number"),
        (1, 1 << 27, "more than an exchange holds"),
    ):
        made = int8_sum.planned(plan(**SCATTER), workspace, rows, n)
        assert not made.by_flux and words in made.reason and "int8" in made.reason
        assert made.slot_bytes == made.exchange_bytes == 0
    monkeypatch.setattr(workspace, "why_not", "no links", raising=False)
    assert "no links" in int8_sum.planned(plan(**SCATTER), workspace, 4, 128).reason
    assert not int8_sum.planned(plan(**SCATTER), object(), 4, 128).by_flux  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_kernel_has_room(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = gpu_workspace(monkeypatch, p)
    for rows, n in ((1, 8), (3, 136), (4096, 8192), (65536, 7168), (7, 12345 * 8)):
        made, most = int8_sum.planned(plan(**SCATTER), workspace, rows, n), int8_sum.rows_at_once(n, p)
        assert made.by_flux and made.exchange_bytes <= MAX_EXCHANGE_BYTES
        area = core.int8_scatter_bytes(min(rows, most), n, p)
        assert area <= made.exchange_bytes < area + 4096
        # A byte for each element of whole groups, and four for their scales.
        groups = min(rows, most) * -(-n // 128)
        assert area == p * -(-groups // 4) * 4 * (128 + 4)
        # One row more would not fit.
        assert core.int8_scatter_bytes(most + 1, n, p) > MAX_EXCHANGE_BYTES
        # What flux.reserve makes room for suffices.
        room = exchange_room("cuda", rows * p, n, p, torch.bfloat16)
        assert n % 128 or made.exchange_bytes <= room["exchange_bytes"]


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = gpu_workspace(monkeypatch, 2)
    told: list[tuple[Any, ...]] = []

    def kernel(x: Tensor, out: Tensor, *rest: Any) -> None:
        assert x.shape == (2, *out.shape) and x.stride() == (5 * 16, 16, 1)
        told.append(rest)
        out.copy_(x.sum(0))

    monkeypatch.setattr(int8_sum, "_kernel", kernel)
    monkeypatch.setattr(int8_sum, "rows_at_once", lambda n, p: 2)
    made = int8_sum.planned(plan(**SCATTER), workspace, 5, 16)
    x = torch.arange(2.0 * 5 * 16).view(2, 5, 16)
    out = torch.zeros(5, 16)
    int8_sum.sum_into(out, x, workspace, made)
    assert torch.equal(out, x.sum(0)) and told == [(77, 114, False)] * 3
    with flux.batch_invariant():
        # A result that a kernel cannot write where it shall lie.
        shifted = torch.zeros(81)[1:].view(5, 16)
        int8_sum.sum_into(shifted, x, workspace, made)
    assert torch.equal(shifted, out) and told[3:] == [(77, 114, True)] * 3
