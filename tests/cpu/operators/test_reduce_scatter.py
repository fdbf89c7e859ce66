"""flux.reduce_scatter: plans, and what the kernel is given. test_dense.py makes calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flux._native import core
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import round_up
from flux.ops.ways import exchange
from flux.plan.choose import Plan, PlanInput
from flux.plan.sums import exchange_room, plan_reduce_scatter


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
    exchange.kernel(workspace, made, exchange.Call(x, out=out))
    assert told[0] == (x, out, 77, 114, 2, None, None, 0.0, None)
    # A result that a kernel cannot write where it shall lie.
    shifted = torch.zeros(33).bfloat16()[1:].view(1, 32)
    monkeypatch.setattr(exchange, "_kernel", lambda *arguments: arguments[1].fill_(5))
    exchange.kernel(workspace, made, exchange.Call(x, out=shifted))
    assert (shifted == 5).all()
