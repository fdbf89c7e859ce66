"""Sweeps over the choices of a kernel, but for the kernel, which needs a GPU: what each launch gives it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from flux._native import core
from flux.bench.cases import OPS, ranks
from flux.bench.cases.common import Context, Lineup
from flux.bench.suites import Problem
from flux.comm.cuda import CudaWorkspace
from flux.fp8.scales import Scaling
from flux.ops.ways import ag_gemm, exchange, gemm_ar, gemm_rs
from flux.plan.choose import PLANNERS, WAYS, PlanInput

CONTEXT = Context(0, 2, 2, torch.device("cpu"), torch.bfloat16, mock.Mock())
ADDRESS, EPOCH, SMS = 77, 5, 132
# The modules whose kernels the operators launch.
KERNELS = {"gemm_rs": gemm_rs, "ag_gemm": ag_gemm, "gemm_ar": gemm_ar, "all_reduce": exchange}


@dataclass
class Launches:
    """By candidate: the numbers that the kernel got, shapes of its tensors, scales; plans entered with."""

    plan: Any
    numbers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    scales: dict[str, dict[str, Any]] = field(default_factory=dict)
    entered: list[Any] = field(default_factory=list)


def launches(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> Launches:
    op, sizes = problem.op, problem.local(2)
    sizes = (1, sizes[0] * sizes[1], 0) if op == "all_reduce" else sizes
    scaling = Scaling("row", torch.bfloat16) if problem.scales else None
    dtype = torch.float8_e4m3fn if problem.scales else torch.bfloat16
    planner: Any = partial(WAYS[op, "kernel"], reason="") if op == "gemm_ar" else PLANNERS[op]
    given = PlanInput("cuda", *sizes, dtype, world_size=2, num_sms=SMS, scaling=scaling)
    found = Launches(planner(given))
    workspace: Any = CudaWorkspace.__new__(CudaWorkspace)
    monkeypatch.setattr(workspace, "num_sms", SMS, raising=False)
    monkeypatch.setattr(workspace, "group", None, raising=False)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def enter(plan: Any) -> Any:
        found.entered.append(plan)
        return nullcontext((ADDRESS, EPOCH))

    def add(self: Lineup, name: str, role: str, step: Any, weights: Any = ()) -> None:
        step(self.weights[0])
        given, found.scales[name] = calls.pop()
        found.numbers[name] = tuple(each for each in given if not isinstance(each, torch.Tensor))
        found.shapes.add(tuple(tuple(each.shape) for each in given if isinstance(each, torch.Tensor)))

    for method in ("enter", "enter_copy"):
        monkeypatch.setattr(workspace, method, enter, raising=False)
    monkeypatch.setattr(ranks, "kernel_plan", lambda *problem: (workspace, found.plan))
    monkeypatch.setattr(KERNELS[op], "_kernel", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(Lineup, "add", add)
    sweep = OPS[op].sweep
    assert sweep is not None
    sweep(problem, CONTEXT)
    return found


def test_all_reduce_sums_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch, Problem("all_reduce", "custom", "all_reduce", 8, 64, 32))
    one_shot, two_shot = int(core.ExchangeMode.ONE_SHOT), int(core.ExchangeMode.TWO_SHOT)
    assert found.shapes == {((1, 512), (1, 512))}
    # The workspace, its SMs and the mode; then neither residual nor norm.
    rest = (None, None, 0.0, None)
    assert found.numbers == {
        "plan": (ADDRESS, SMS, found.plan.mode, *rest),
        "one-shot": (ADDRESS, SMS, one_shot, *rest),
        "two-shot": (ADDRESS, SMS, two_shot, *rest),
    }


# What comes behind the choice: of gemm_ar with the mode of the plan.
REST = {
    "gemm_rs": (0, EPOCH, 0, None, False),
    "ag_gemm": (0, EPOCH, 0, False),
    "gemm_ar": (SMS, 0, None, None, 0.0, None),
}
TENSORS = {
    "gemm_rs": ((256, 128), (512, 128), (128, 512)),
    "ag_gemm": ((128, 256), (256, 256), (256, 256)),
    "gemm_ar": ((64, 512), (512, 512), (64, 512)),
}


@pytest.mark.parametrize(("op", "scales"), [*product(("gemm_rs", "ag_gemm"), ("", "row")), ("gemm_ar", "")])
def test_every_choice_of_a_fused_gemm(monkeypatch: pytest.MonkeyPatch, op: str, scales: str) -> None:
    m, k = (64, 1024) if op == "gemm_ar" else (256, 256)
    found = launches(monkeypatch, Problem(op, "custom", op, m, 512, k, scales=scales))
    plan, numbers = found.plan, found.numbers
    assert found.shapes == {TENSORS[op]}
    choices = {name: given[3] for name, given in numbers.items()}
    one = choices.pop("plan two-shot", None) if op == "gemm_ar" else None
    assert choices.pop("plan") == plan.choice and one in (None, plan.choice)
    assert len(set(choices.values())) == len(choices) == len(plan.candidates) > 4
    chunk = REST[op] if op != "ag_gemm" else (0, EPOCH, plan.chunk_rows, False)
    for name, given in numbers.items():
        rest = (SMS, 1, None, None, 0.0, None) if name == "plan two-shot" else chunk
        # Without a bias, weight not transposed; the workspace.
        assert given == (None, False, ADDRESS, given[3], *rest), name
        scaled = found.scales[name]
        assert set(scaled) == ({"scale_x", "scale_w", "fast"} if scales else set())
        assert not scales or (scaled["scale_x"].shape == TENSORS[op][0][:1] and not scaled["fast"])
    # One room for all, so that nobody pays for growing it.
    rooms = {(each.signal_bytes, each.slot_bytes, each.exchange_bytes) for each in found.entered}
    assert len(rooms) == 1 and len(found.entered) == len(numbers)
