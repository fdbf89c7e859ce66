"""The sweep of AllReduce, but for the kernel, which needs a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from flux._native import core
from flux.bench.cases import all_reduce
from flux.bench.cases.common import Context
from flux.bench.suites import Problem
from flux.comm.cuda import CudaWorkspace
from flux.ops.plan_ar import plan_all_reduce


def test_the_sweep_gives_the_kernel_all_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace: Any = CudaWorkspace.__new__(CudaWorkspace)
    monkeypatch.setattr(workspace, "enter", lambda plan: nullcontext((77, 0)), raising=False)
    plan = plan_all_reduce("cuda", 1, 512, 0, torch.bfloat16, False, 2, None, 132, "links")
    monkeypatch.setattr(all_reduce.registry, "get", lambda group, device, op: workspace)
    monkeypatch.setattr(all_reduce, "workspace_plan", lambda *arguments: plan)
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
