"""The sweep of AllReduce, but for the kernel, which needs a GPU; AllReduce with RMSNorm between processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux._native import core
from flux.bench.cases import all_reduce
from flux.bench.cases import norms as cases
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem
from flux.bench.timing import CpuTimer
from flux.comm.cuda import CudaWorkspace
from flux.ops.gemm_ar import rms_norm
from flux.ops.plan import PlanInput
from flux.ops.plan_ar import plan_all_reduce
from flux.testing import spawn


def test_the_sweep_gives_the_kernel_all_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace: Any = CudaWorkspace.__new__(CudaWorkspace)
    monkeypatch.setattr(workspace, "enter", lambda plan: nullcontext((77, 0)), raising=False)
    plan = plan_all_reduce(PlanInput("cuda", 1, 512, 0, torch.bfloat16, world_size=2, num_sms=132))
    monkeypatch.setattr(all_reduce, "kernel_plan", lambda *problem: (workspace, plan))
    launched: dict[str, tuple[Any, ...]] = {}

    def graphed(name: str, role: str, step: Any, weights: list[torch.Tensor], context: Context) -> Any:
        def kernel(x: torch.Tensor, out: torch.Tensor, *numbers: int) -> None:
            launched[name] = (x.shape, out.shape, *numbers)

        with torch.library._scoped_library("flux", "IMPL") as library:
            library.impl("_all_reduce", kernel, "CPU")
            step(weights[0])

    monkeypatch.setattr(all_reduce, "graphed", graphed)
    context = Context(0, 2, 2, torch.device("cpu"), torch.bfloat16, mock.Mock())
    all_reduce.sweep(Problem("all_reduce", "custom", "all_reduce", 8, 64, 32), context)
    given = ((1, 512), (1, 512), 77, 0)  # x, out, the workspace, all SMs; then the mode
    one_shot, two_shot = int(core.ExchangeMode.ONE_SHOT), int(core.ExchangeMode.TWO_SHOT)
    assert launched == {
        "plan": (*given, plan.mode),
        "one-shot": (*given, one_shot),
        "two-shot": (*given, two_shot),
    }


PROBLEM = Problem("all_reduce_norm", "custom", "all_reduce", 6, 64, 32)
all_reduce_of_flux = flux.all_reduce  # while another one stands in its place


def without_weight(x: torch.Tensor, **given: Any) -> Any:
    norm, total = all_reduce_of_flux(x, **given)
    return rms_norm(total, torch.ones_like(norm[0]), given["eps"]), total


def without_residual(x: torch.Tensor, **given: Any) -> Any:
    return all_reduce_of_flux(x, **{**given, "residual": None})


def norms(rank: int, world_size: int) -> tuple[Row, list[str]]:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    settings = Settings((PROBLEM,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=2)
    row = measure(PROBLEM, context, CpuTimer(context.group), settings)
    found = []
    for broken in (without_weight, without_residual):
        with mock.patch.object(flux, "all_reduce", broken):
            found.append(cases.check(PROBLEM, context))
    return row, found


def test_norms_between_processes() -> None:
    row, found = spawn(norms, 2, backend="gloo", timeout_s=120)[0]
    assert row.check.startswith("agrees to"), row.check
    roles = {name: timing.role for name, timing in row.times.items()}
    assert roles == {"flux": "flux", "flux.all_reduce+norm": "peer", "gloo": "peer"}
    assert found[0].startswith("norm: off by"), found
    assert "wrong; at [0, 0]" in found[1], found
