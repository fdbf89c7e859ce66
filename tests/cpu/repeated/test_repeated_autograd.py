"""Calls that C++ repeats (flux.comm.repeat), and autograd: gradients, what a call overwrites, tangents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repeated import CALLS, WITH_OUT, Machine, arguments, flat, tensor
from torch.autograd import forward_ad

import flux
from flux.comm.cuda import CudaWorkspace

pytest_plugins = ("repeated",)  # fixtures


def test_gradients_flow_through_known_calls(machine: Machine, workspace: CudaWorkspace) -> None:
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    weight = torch.randn(16, 64).bfloat16()
    with torch.no_grad():
        flux.gemm_rs(x, weight)
    before = len(machine.dispatched), len(machine.repeated)
    out = flux.gemm_rs(x, weight)  # autograd records it, and C++ repeats the kernel below
    assert (len(machine.dispatched), len(machine.repeated)) == (before[0], before[1] + 1)
    assert out.requires_grad and out.grad_fn is not None
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("op", [*WITH_OUT, "ag_gemm list", "gemm"])
def test_autograd_sees_that_out_is_overwritten(
    op: str, machine: Machine, workspace: CudaWorkspace, gemms: Any
) -> None:
    given = {"x": tensor(8, 64), "weight": tensor(16, 64)} if op == "gemm" else arguments(op)
    given.pop("return_gathered", None)
    call = CALLS.get(op, flux.gemm)
    results = call(**given)
    given["out"] = [torch.empty_like(result) for result in results] if "list" in op else results
    leaf = torch.ones(1, requires_grad=True)
    for repeated in (False, True, True):
        saved = [leaf * out for out in flat(given["out"])]
        before = len(machine.dispatched)
        call(**given)
        assert (len(machine.dispatched) == before) == repeated
        for product in saved:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
    with torch.inference_mode():
        served = [torch.empty_like(out) for out in flat(given["out"])]
    call(**{**given, "out": served if "list" in op else served[0]})  # has no version, as for torch


@pytest.mark.parametrize("op", [op for op in CALLS if "fp8" not in op])
def test_tangents_are_refused(op: str, machine: Machine, workspace: CudaWorkspace) -> None:
    given = arguments(op)
    for _ in range(2):
        CALLS[op](**given)
    with forward_ad.dual_level():
        CALLS[op](**given)  # no tensor has a tangent
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            with pytest.raises(NotImplementedError, match=f"{name}.*: expected a tensor without a tangent"):
                CALLS[op](**{**given, name: dual})
