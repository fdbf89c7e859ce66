"""flux.reduce_scatter: plans, what the kernel is given, and exact sums between CPU processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import asked_of_one_and_of_several, compare, is_asked

import flux
from flux._native import core
from flux.comm import registry
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import round_up
from flux.ops import reduce_scatter as ops
from flux.ops.ways import exchange
from flux.plan.choose import Plan, PlanInput
from flux.plan.sums import exchange_room, plan_reduce_scatter
from flux.testing import GemmRsCase, spawn

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# rows of each rank, columns; some of whose shares a vector is cut
SHAPES = [(1, 1), (1, 8), (3, 20), (5, 264), (130, 33)]


def plan(**change: Any) -> Plan:
    facts: dict[str, Any] = {
        "device_type": "cuda",
        "m": 64,
        "n": 1024,
        "k": 0,
        "dtype": torch.bfloat16,
        "transpose_weight": False,
        "world_size": 4,
        "why_not": None,
        "num_sms": 132,
        "transport": "stores",
    }
    return plan_reduce_scatter(PlanInput(**(facts | change)))


@pytest.mark.parametrize(
    ("change", "fused", "words"),
    [
        ({}, True, "supported by the kernel"),
        ({"m": 4, "n": 8}, True, "supported by the kernel"),
        ({"m": 8, "n": 4}, True, "supported by the kernel"),
        ({"m": 4, "n": 12}, False, "12 elements are no whole number"),
        ({"m": 4, "n": 12, "device_type": "cpu"}, True, "share memory"),
        ({"m": 32768}, True, "supported by the kernel"),
        ({"m": 32772}, False, "more than an exchange holds"),
        ({"dtype": torch.float32}, False, "not float32"),
        ({"m": 0}, False, "empty"),
        ({"world_size": 1}, False, "one rank"),
        ({"why_not": "no links"}, False, "no links"),
    ],
)
def test_plans(change: dict[str, Any], fused: bool, words: str) -> None:
    made = plan(**change)
    assert made.by_flux == fused and words in made.reason, made
    if not fused:
        assert made.mode < 0 and made.slot_bytes == made.exchange_bytes == 0
        return
    assert core.ExchangeMode(made.mode) == core.ExchangeMode.SCATTER
    assert made.m == made.world_size and made.config >= 0
    layout = core.exchange(made.m, round_up(made.n, 8), made.world_size, core.ExchangeMode.SCATTER)
    on_gpu = change.get("device_type") != "cpu"
    assert (made.exchange_bytes if on_gpu else made.slot_bytes) == round_up(layout.bytes)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_what_is_reserved_suffices(world_size: int, device_type: str) -> None:
    for max_m, max_n in [(8, 1), (24, 8192), (16384, 8192), (48, 3001)]:
        room = exchange_room(device_type, max_m, max_n, world_size, torch.bfloat16)
        for m in range(world_size, max_m + 1, max(1, max_m // 8) * world_size):
            made = plan(m=m, n=max_n, device_type=device_type, world_size=world_size)
            for name in ("signal_bytes", "slot_bytes", "exchange_bytes"):
                assert getattr(made, name) <= room[name], (m, max_n, name)


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(exchange, "_kernel", lambda *arguments: told.append(arguments))
    workspace: Any = CudaWorkspace.__new__(CudaWorkspace)
    monkeypatch.setattr(workspace, "enter", lambda plan: nullcontext((77, 0)), raising=False)
    monkeypatch.setattr(workspace, "num_sms", 114, raising=False)
    made = plan(m=8, n=16)
    x, out = torch.ones(4, 32).bfloat16(), torch.zeros(1, 32).bfloat16()
    exchange.run_fused(workspace, made, 0, x, out)
    assert told[0] == (x, out, 77, 114, 2, None, None, 0.0, None)
    # A result that a kernel cannot write where it shall lie.
    shifted = torch.zeros(33).bfloat16()[1:].view(1, 32)
    monkeypatch.setattr(exchange, "_kernel", lambda *arguments: arguments[1].fill_(5))
    exchange.run_fused(workspace, made, 0, x, shifted)
    assert (shifted == 5).all()


def exact_sums(rank: int, p: int) -> list[str]:
    told = []
    for number, (rows, n) in enumerate(SHAPES):
        for dtype in DTYPES:
            case = GemmRsCase(rows * p, n, 8, p, dtype, seed=number)
            x, weight, _ = case.inputs(rank)
            partial, expected = flux.gemm(x, weight), case.expected(rank)
            out = torch.full_like(expected, 7)
            assert flux.reduce_scatter(partial, out=out) is out
            answers = [compare(r, expected) for r in (out, ops.reference(partial))]
            answers += [compare(flux.reduce_scatter(partial), expected) for _ in range(3)]
            answers.append(compare(flux.all_reduce(partial)[rank * rows :][:rows], expected))
            told += [f"{rows}x{n} {dtype}: {answer}" for answer in answers if answer]
    return told


def rounded_sums(rank: int, p: int) -> list[str]:
    told = []
    for dtype in DTYPES:
        x = torch.randn(7 * p, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)
        result = flux.reduce_scatter(x)
        # The same roundings, in the same order.
        answers = [compare(result, ops.reference(x)), compare(flux.reduce_scatter(x), result)]
        answers.append(compare(result, flux.all_reduce(x)[rank * 7 :][:7]))
        told += [f"{dtype}: {answer}" for answer in answers if answer]
    return told


def other_forms(rank: int, p: int) -> list[str]:
    deep = torch.arange(3.0).view(1, 3, 1).expand(2 * p, 3, 4)  # not contiguous
    marked = torch.arange(4.0 * p).add(100 * rank)
    total = p * torch.arange(4.0 * p) + 100 * sum(range(p))
    answers = [
        compare(flux.reduce_scatter(deep), deep[:2] * p),
        compare(flux.reduce_scatter(marked), total[4 * rank :][:4]),
        compare(flux.reduce_scatter(marked, group=dist.group.WORLD), total[4 * rank :][:4]),
        compare(flux.reduce_scatter(marked[:0]), marked[:0]),
        compare(flux.reduce_scatter(deep[:, :0]), deep[:2, :0]),
    ]
    return [answer for answer in answers if answer]


def unfused_sums(rank: int, p: int) -> list[str]:
    told = []
    for dtype in DTYPES:
        case = GemmRsCase(5 * p, 12, 8, p, dtype)
        x, weight, _ = case.inputs(rank)
        out = torch.empty(5, 12, dtype=dtype)
        ops.unfused(flux.gemm(x, weight), dist.group.WORLD, out)
        told.append(compare(out, case.expected(rank)))
    return [answer for answer in told if answer]


def gradients(rank: int, p: int) -> list[str]:
    x = torch.randn(3 * p, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.arange(1.0, 16.0, dtype=torch.float64).view(3, 5)
    (flux.reduce_scatter(x) * scale * (rank + 1)).sum().backward()
    # Each rank's rows reach the sum of the losses through the rank that owns them.
    expected = torch.cat([scale * (owner + 1) for owner in range(p)])
    assert x.grad is not None
    rows = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (flux.all_gather(rows) * (rank + 1)).sum().backward()
    assert rows.grad is not None
    answers = [compare(x.grad, expected), compare(rows.grad, torch.full_like(rows, p * (p + 1) / 2))]
    with torch.no_grad():
        assert not flux.reduce_scatter(x, out=torch.empty(3, 5, dtype=torch.float64)).requires_grad
    return [answer for answer in answers if answer]


@asked_of_one_and_of_several
def torch_sees(rank: int, p: int) -> list[str]:
    """opcheck, meta tensors and torch.compile, in the same order on all ranks."""
    name = dist.group.WORLD.group_name
    x = torch.randn(2 * p, 8)
    torch.library.opcheck(torch.ops.flux.reduce_scatter.default, (x, name))
    torch.library.opcheck(torch.ops.flux.reduce_scatter.default, (x.clone().requires_grad_(), name))
    torch.library.opcheck(torch.ops.flux.reduce_scatter_out.default, (x, name, torch.empty(2, 8)))
    assert tuple(flux.reduce_scatter(torch.empty(4 * p, 3, 8, device="meta")).shape) == (4, 3, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(flux.reduce_scatter(x * 2)).sum()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (2, 3):
        x = torch.randn(rows * p, 8, requires_grad=True)
        grads = [torch.autograd.grad(function(x), x)[0] for function in (layer, compiled)]
        torch.testing.assert_close(*grads)
    return []


def explained(rank: int, p: int) -> list[str]:
    flux.reserve(max_m=12 * p, max_n=100, max_k=1)
    workspaces = registry.existing(dist.group.WORLD)
    room = [(w.signal_bytes, w.slot_bytes) for w in workspaces]
    flux.reduce_scatter(torch.ones(12 * p, 100, dtype=torch.bfloat16))
    assert [(w.signal_bytes, w.slot_bytes) for w in workspaces] == room
    made = flux.explain("reduce_scatter", 12 * p, 100, 0)
    assert made.by_flux == (p > 1)
    assert str(made).startswith(f"reduce_scatter: x [{p}, 1200], bfloat16, {p} rank"), made
    return []


CHECKS = (exact_sums, rounded_sums, other_forms, unfused_sums, gradients, torch_sees, explained)


def all_checks(rank: int, p: int) -> dict[str, list[str]]:
    return {check.__name__: check(rank, p) for check in CHECKS if is_asked(check, p)}


@pytest.mark.parametrize("p", [1, 2, 3])
def test_between_processes(p: int) -> None:
    for rank, told in enumerate(spawn(all_checks, p, backend="gloo", timeout_s=300)):
        assert told == {check.__name__: [] for check in CHECKS if is_asked(check, p)}, f"rank {rank}"
