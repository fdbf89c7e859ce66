"""What a known call costs the host (docs/design/host-cost.md)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import CALLS, FP8_SUMS, Machine, arguments, tensor

import flux
from flux import moe
from flux.calls import front
from flux.comm import cuda
from flux.comm.cuda import CudaWorkspace
from flux.integrations.vllm.experts import own_experts
from flux.measured.times import Tuning

HERE = str(Path(__file__).parents[2])
PACKAGE = str(Path(flux.__file__).parent)
# Of a call through the public function: Python functions, C functions that these call, and new tensors.
HOST_COST = {
    "gemm_rs": (8, 2, 1),
    "ag_gemm": (11, 9, 1),
    "ag_gemm list": (11, 10, 3),
    "gemm_ar": (8, 2, 1),
    "gemm_ar norm": (8, 2, 2),
    "all_reduce": (7, 2, 1),
    "all_reduce norm": (8, 2, 2),
    "reduce_scatter": (7, 2, 1),
    "all_gather": (7, 2, 1),
    "moe.route": (5, 5, 2),
    "moe.ag_scatter_gemm": (10, 10, 1),
    "moe.gemm_gather_rs": (10, 9, 2),
    "gemm_rs fp8": (8, 3, 1),
    "gemm_rs fp8 rows": (8, 3, 1),
    "ag_gemm fp8": (13, 12, 1),
    "ag_gemm fp8 list": (13, 13, 4),
    "gemm_ar quant": (8, 3, 5),
    "all_reduce quant": (8, 3, 4),
    "all_reduce quant static": (8, 3, 4),
    "moe.ag_scatter_gemm fp8": (10, 10, 1),
    "moe.gemm_gather_rs fp8": (10, 9, 2),
}

ALL_CALLS = {**CALLS, **FP8_SUMS, "moe.route": moe.route}

pytest_plugins = ("repeated",)  # fixtures


# The same of calls that run as several operators of flux, by the way that is forced.
IN_PARTS = {
    ("parts", "gemm_rs"): (8, 2, 2),
    ("parts", "gemm_rs bias"): (9, 3, 2),
    ("parts", "gemm_rs fp8"): (8, 3, 2),
    ("parts", "ag_gemm"): (11, 9, 2),
    ("parts", "gemm_ar"): (8, 2, 2),
    ("parts", "gemm_ar bias"): (8, 2, 2),
    ("parts", "gemm_ar norm"): (8, 2, 3),
    ("parts", "gemm_ar fp8 rows"): (8, 3, 2),
    ("composed", "gemm_ar"): (8, 2, 2),
    ("composed", "gemm_ar bias"): (8, 2, 2),
    ("composed", "gemm_ar fp8 rows"): (8, 3, 2),
    ("composed", "gemm_ar norm"): (15, 15, 2),
    ("composed", "gemm_ar fp8 quant"): (25, 25, 4),
}


@pytest.mark.parametrize(
    ("way", "op"), [*(("kernel", op) for op in HOST_COST), *IN_PARTS], ids=lambda each: str(each)
)
def test_what_a_known_call_costs_the_host(
    way: str, op: str, machine: Machine, workspace: CudaWorkspace, gemms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    workspace.tuning = Tuning(forced=way)
    given, call = arguments(op.removesuffix(" bias")), ALL_CALLS[op.removesuffix(" bias")]
    if op.endswith("bias"):
        given["bias"] = torch.zeros(16, dtype=torch.bfloat16)
    calls = calls_of_functions(lambda: call(**given))
    made = []
    for name in ("new_empty", "new_empty_strided"):
        new = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, new=new, **how: made.append(1) or new(*a, **how))
    call(**given)
    most_calls, most_c_calls, tensors = HOST_COST[op] if way == "kernel" else IN_PARTS[way, op]
    assert calls["call"] <= most_calls and calls["c_call"] <= most_c_calls and len(made) == tensors


def calls_of_functions(call: Callable[[], object], before: int = 3) -> dict[str, int]:
    """How many functions of Python, of C and of flux a call calls after others, by which it is known."""
    for _ in range(before):
        call()
    calls = {"call": 0, "c_call": 0, "flux": 0}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in calls and not frame.f_code.co_filename.startswith(HERE):  # the machine
            calls[event] += 1
            calls["flux"] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    gc.disable()  # its callbacks would count
    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    gc.enable()
    return calls


def test_frames_of_a_call(
    machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, again through Python, and repeated by C++ (docs/design/host-cost.md)."""
    monkeypatch.setattr(front, "may_skip_dispatch", lambda *tensors: True)  # as tensors on a GPU
    x, weight = tensor(8, 64), tensor(16, 64)
    frames = [calls_of_functions(lambda: flux.gemm_rs(x, weight), 0)["flux"]]
    workspace.known.clear()
    frames += [calls_of_functions(lambda: flux.gemm_rs(x, weight), 0)["flux"] for _ in range(2)]
    assert all(found <= most for found, most in zip(frames, (82, 45, 4), strict=True)), frames
    assert len(machine.dispatched) == 2 and len(machine.repeated) == 1


def test_what_this_rank_s_part_of_experts_costs_the_host(
    machine: Machine, gemms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four kernels, of which one call repeats two."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(cuda, "num_sms", lambda device: 132)
    ids, weights = tensor(8, 2, dtype=torch.int32), tensor(8, 2, dtype=torch.float32)
    given = tensor(8, 64), ids, weights, tensor(4, 32, 64), tensor(4, 64, 16)
    alone = dist.new_group([0]).group_name
    with torch.inference_mode():
        calls = calls_of_functions(lambda: own_experts(*given, alone))
    assert calls["call"] <= 22 and calls["c_call"] <= 16


@pytest.mark.parametrize(
    ("way", "op"), [("kernel", "gemm_ar norm"), ("composed", "gemm_ar norm"), ("kernel", "moe.route")]
)
def test_known_calls_leak_nothing(
    way: str, op: str, machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    workspace.tuning = Tuning(forced=way)
    given = arguments(op)

    def blocks_after(calls: int) -> int:
        for _ in range(calls):
            ALL_CALLS[op](**given)
        machine.repeated.clear()
        gc.collect()
        return sys.getallocatedblocks()

    gc.freeze()  # what other tests have left makes collections slow
    blocks_after(100)
    before = blocks_after(100)
    assert blocks_after(1000) - before < 50
    gc.unfreeze()
