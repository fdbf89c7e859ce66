"""The benchmarks of sums with RMSNorm: their candidates, and that wrong sums and norms are found."""

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

ROLES = {
    "gemm_ar": {"flux": "flux", "torch": "gemm", "flux.gemm_ar+norm": "peer", "torch+gloo": "serial"},
    "all_reduce": {"flux": "flux", "flux.all_reduce+norm": "peer", "gloo": "peer"},
}


def norms(rank: int, world_size: int) -> dict[str, tuple[Row, list[str]]]:
    """Of each operator its row, and what is said of it without the norm's weight, and without residual."""
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    told = {}
    for op in ROLES:
        problem, right = Problem(f"{op}_norm", "custom", op, 6, 64, 32), getattr(flux, op)
        settings = Settings((problem,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=2)
        row, found = measure(problem, context, CpuTimer(context.group), settings), []

        def without_weight(*given: Any, right: Any = right, **more: Any) -> Any:
            norm, total = right(*given, **more)
            return rms_norm(total, torch.ones_like(norm[0]), more["eps"]), total

        def without_residual(*given: Any, right: Any = right, **more: Any) -> Any:
            return right(*given, **{**more, "residual": torch.zeros_like(more["residual"])})

        for broken in (without_weight, without_residual):
            with mock.patch.object(flux, op, broken):
                found.append(cases.check(problem, context))
        told[op] = row, found
    return told


def test_norms_between_processes() -> None:
    for op, (row, found) in spawn(norms, 2, backend="gloo", timeout_s=120)[0].items():
        assert row.check.startswith("agrees to"), row.check
        assert {name: timing.role for name, timing in row.times.items()} == ROLES[op]
        assert found[0].startswith("norm: off by"), found
        assert "wrong; at [0, 0]" in found[1], found
