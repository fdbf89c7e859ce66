"""A layer of experts in vLLM: C++ repeats all of it, and what it puts on streams is four kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import Machine, tensor

from flux.comm.cuda import CudaWorkspace
from flux.integrations.vllm.experts import summed_experts
from flux.moe import route_kernel, routing
from flux.ops import grouped_gemm
from flux.ops.all_gather import AWAITED_BY_SMS_BYTES, gather_plan
from flux.ops.plan_gemm import COPY_FROM_BYTES
from flux.tuning.facts import Tuning

pytest_plugins = ("repeated",)  # fixtures

EXPERTS, HIDDEN, INNER, TOP_K = 4, 4096, 16, 2
KERNELS = ["moe_route", "grouped_gemm", "moe_gemm_gather_rs", "all_gather"]


@pytest.fixture
def on_gpu(gemms: Any, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(route_kernel, "_num_sms", lambda device: 132)


# 2051: a last share with fewer tokens, and weights at addresses that are no multiples of 16.
@pytest.mark.parametrize("tokens", [2048, 2051])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_of_vllms_experts_is_repeated(rank: int, tokens: int, machine: Machine, on_gpu: None) -> None:
    w13, w2 = tensor(EXPERTS, 2 * INNER, HIDDEN), tensor(EXPERTS, HIDDEN, INNER)
    share = -(-tokens // 2)
    assert share * HIDDEN * 2 >= COPY_FROM_BYTES  # of which copy engines carry a gather that something hides
    # On tensors of CPUs, torch's dispatcher does not find the kernel of the first call.
    offsets, _, rows, *_ = routing.checked_shapes(2, EXPERTS, 1, share, share, TOP_K)
    arrays = (tensor(*offsets, dtype=torch.int32), tensor(*rows, dtype=torch.int32))
    grouped_gemm._cuda(tensor(tokens, HIDDEN), w13, *arrays, "swiglu")
    for _ in range(3):
        machine.dispatched.clear(), machine.repeated.clear()
        x, ids = tensor(tokens, HIDDEN), tensor(tokens, TOP_K, dtype=torch.int32)
        weights = tensor(tokens, TOP_K, dtype=torch.float32)
        with torch.inference_mode():
            total = summed_experts(x, ids, weights, w13, w2, dist.group.WORLD.group_name, rank, 2)
        assert total.shape == x.shape
    assert not machine.dispatched
    assert [name.split("::_")[1] for name, _, _ in machine.repeated] == KERNELS
    assert [epoch for _, _, epoch in machine.repeated] == [0] * 4, "no copy engine"
    own = rank * share
    assert machine.repeated[0][1][:2] == [ids[own:].data_ptr(), weights[own:].data_ptr()], "read in place"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("shard", "copied", "copied_at_once"),
    [
        (COPY_FROM_BYTES - 8192, False, False),
        (COPY_FROM_BYTES, True, False),
        (AWAITED_BY_SMS_BYTES, True, False),
        (AWAITED_BY_SMS_BYTES + 8192, True, True),
    ],
)
def test_who_carries_rows_that_are_awaited(
    shard: int, copied: bool, copied_at_once: bool, at_once: bool, on_gpu: None, workspace: CudaWorkspace
) -> None:
    rows = torch.empty(shard // 8192, 4096, dtype=torch.bfloat16, device="meta")
    plan = gather_plan(workspace, rows, at_once=at_once)
    assert plan.fused and plan.copied == (copied_at_once if at_once else copied)
    assert plan.copied or plan.chunk_rows == 0


def test_a_forced_way_holds_for_rows_that_are_awaited(on_gpu: None, workspace: CudaWorkspace) -> None:
    workspace.tuning = Tuning(forced="torch")
    rows = torch.empty(AWAITED_BY_SMS_BYTES // 8192, 4096, dtype=torch.bfloat16, device="meta")
    assert not gather_plan(workspace, rows, at_once=True).fused
