"""Calls that run in parts are repeated by C++ as a whole (flux.comm.known.Recipe)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repeated import CALLS, WITH_OUT, Machine, arguments, roles, tensor, told

import flux
from flux.comm.cuda import CudaWorkspace
from flux.tuning.facts import Tuning

pytest_plugins = ("repeated",)  # fixtures


@pytest.fixture
def in_parts(machine: Machine, workspace: CudaWorkspace, gemms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators that can run in parts do so, on tensors that pass for a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    workspace.tuning = Tuning(forced="parts")


# The kernels of a call in parts, and what each of them is given. "scratch": memory of the call's own.
PARTS = {
    "gemm_rs": {"gemm": ["x", "weight", None, "scratch"], "all_reduce": ["scratch", "result 0"]},
    "ag_gemm": {"all_gather": ["x", "scratch"], "gemm": ["scratch", "weight", None, "result 0"]},
    "ag_gemm gathered": {
        "all_gather": ["x", "result 1"],
        "gemm": ["result 1", "weight", None, "result 0"],
    },
    "gemm_ar": {"gemm": ["x", "weight", None, "scratch"], "all_reduce": ["scratch", "result 0"]},
    "gemm_ar residual": {
        "gemm": ["x", "weight", None, "scratch"],
        "all_reduce": ["scratch", "result 0", "residual"],
    },
    "gemm_ar norm": {
        "gemm": ["x", "weight", None, "scratch"],
        "all_reduce": ["scratch", "result 0", "residual", "norm_weight", "result 1"],
    },
}
MORE = {
    "ag_gemm gathered": {"return_gathered": True},
    "gemm_ar residual": {"residual": tensor(8, 16)},
    "gemm_ar norm": {"residual": tensor(8, 16), "norm_weight": tensor(16), "eps": 1e-5},
}


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("op", PARTS)
def test_a_call_in_parts_is_repeated_as_a_whole(
    op: str, with_out: bool, machine: Machine, in_parts: None
) -> None:
    call, given = CALLS[op.split()[0]], arguments(op.split()[0]) | MORE.get(op, {})
    if with_out and op in WITH_OUT:
        given["out"] = call(**given)
    flux.all_gather(given["x"])  # a part that is known by itself already
    machine.dispatched.clear()
    call(**given)
    for _ in range(2):
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        machine.repeated.clear()
        result = call(**given)
        assert len(machine.dispatched) == 2, "Python has launched once"
        named = roles({name: value for name, value in given.items() if name != "out"}, result)
        assert [name.split("::_")[1] for name, _, _ in machine.repeated] == list(PARTS[op])
        for (_, addresses, _), expected in zip(machine.repeated, PARTS[op].values(), strict=True):
            assert told(named, addresses)[: len(expected)] == expected
        everything = {address for _, addresses, _ in machine.repeated for address in addresses}
        scratch = everything - {None, *named}
        assert len(scratch) == (op != "ag_gemm gathered"), "the second kernel reads what the first one wrote"


def test_parts_are_repeated_only_if_they_are_all_of_the_call(machine: Machine, in_parts: None) -> None:
    x, weight, bias = tensor(8, 64), tensor(16, 64), tensor(16)
    odd = tensor(8 * 64 + 1)[1:].view(8, 64)  # kernels read a copy
    both = tensor(64, 64)
    for call in (
        lambda: flux.gemm_rs(x, weight, bias),  # torch adds the bias
        lambda: flux.gemm_ar(x, weight, bias, residual=tensor(8, 16)),
        lambda: flux.gemm_rs(odd, weight),
        lambda: flux.ag_gemm(odd, weight),
        lambda: flux.ag_gemm(both, both),  # which of the two a kernel reads
    ):
        for _ in range(2):
            machine.dispatched.clear()
            call()
            assert len(machine.dispatched) == 2 and not machine.repeated
