"""The benchmark of AllReduce with RMSNorm between processes, and that wrong sums and norms are found."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import flux
from flux.bench.cases import ranks as cases
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem
from flux.bench.timing import CpuTimer
from flux.ops.gemm_ar import rms_norm
from flux.testing import spawn

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
