"""Calls that a GPU workspace knows are not checked and planned again: whatever differs must be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from repeated import CALLS, Machine, arguments, tensor

import flux
from flux.comm import workspace
from flux.comm.cuda import CudaWorkspace

pytest_plugins = ("repeated",)  # fixtures

OPS = ("gemm_rs", "gemm_ar", "ag_gemm")
ROWS = {"gemm_rs": 4, "gemm_ar": 8, "ag_gemm": 16}  # of the result
META, HALF = torch.device("meta"), torch.float16
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "x dtype": ({"x": tensor(8, 64, dtype=HALF)}, r"weight\b.*float16, that of x"),
    "both dtypes": ({"x": tensor(8, 64).int(), "weight": tensor(16, 64).int()}, "x: .*dtype bfloat16"),
    "k of x": ({"x": tensor(8, 56)}, r"weight\b.*k = 56"),
    "weight dtype": ({"weight": tensor(16, 64, dtype=HALF)}, r"weight\b.*bfloat16, that of x"),
    "weight device": ({"weight": tensor(16, 64).to(META)}, r"weight\b.*device cpu, that of x"),
    "weight dimensions": ({"weight": tensor(1, 16, 64)}, r"weight\b.*2 dimensions"),
    "layout": ({"transpose_weight": True}, r"weight\b.*transpose_weight=True"),
    "bias shape": ({"bias": tensor(15)}, r"bias\b.*shape \[16\]"),
    "bias dtype": ({"bias": tensor(16, dtype=HALF)}, r"bias\b.*dtype torch.bfloat16"),
    "bias device": ({"bias": tensor(16).to(META)}, r"bias\b.*device cpu"),
    "out shape": ({"out": lambda rows: tensor(3, 16)}, r"out\b.*shape \[3, 16\]"),
    "out dtype": ({"out": lambda rows: tensor(rows, 16, dtype=HALF)}, r"out\b.*dtype torch.bfloat16"),
    "out strides": ({"out": lambda rows: tensor(16, rows).t()}, r"out\b.*contiguous"),
}


@pytest.fixture(params=[False, True], ids=["by C++", "by Python"])
def known(request: pytest.FixtureRequest, machine: Machine, workspace: CudaWorkspace) -> Machine:
    """What knows a call: C++, or, as under torch's profiler, the plans of Python."""
    workspace.known.paused = request.param
    return machine


def launched(machine: Machine) -> int:
    return len(machine.dispatched) + len(machine.repeated)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_after_calls_that_did(misfit: str, op: str, known: Machine) -> None:
    change, words = MISFITS[misfit]
    change = {name: value(ROWS[op]) if callable(value) else value for name, value in change.items()}
    for bias in (None, tensor(16)):  # calls that fit
        CALLS[op](**arguments(op), bias=bias)
        CALLS[op](**arguments(op), bias=bias, out=tensor(ROWS[op], 16))
    with pytest.raises(ValueError, match=f"{op}: .*{words}"):
        CALLS[op](**arguments(op) | change)
    assert launched(known) == 4


def test_a_residual_is_checked_each_time(known: Machine) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    flux.gemm_ar(x, weight, residual=tensor(8, 16))
    flux.gemm_ar(x, weight)
    for wrong in (tensor(8, 15), tensor(8, 16, dtype=HALF), tensor(8, 16).to(META)):
        with pytest.raises(ValueError, match="gemm_ar: residual: "):
            flux.gemm_ar(x, weight, residual=wrong)
    assert launched(known) == 2


def test_lists_of_weights_and_biases_are_not_taken_for_each_other(known: Machine) -> None:
    x, square = tensor(8, 64), tensor(64, 64)
    flux.ag_gemm(x, [square, square])
    flux.ag_gemm(x, [square, square], [None, tensor(64)])
    assert launched(known) == 4
    for weights, biases, words in (
        ([square], [square], "bias: expected shape"),
        ([square, square], [tensor(64)], "bias: expected 2 entries"),
        ([square], [None, tensor(64)], "bias: expected 1 entries"),
        ([square, square], [tensor(64), tensor(63)], r"bias\[1\]: expected shape"),
        ([square, tensor(64, 63)], None, r"weight\[1\]: "),
        ([], None, "weight: expected at least one weight"),
    ):
        with pytest.raises(ValueError, match=f"ag_gemm: {words}"):
            flux.ag_gemm(x, weights, biases)
    flux.ag_gemm(x, [tensor(16, 64)] * 2)
    with pytest.raises(ValueError, match=r"weight\[0\]: .*transpose_weight=True"):
        flux.ag_gemm(x, [tensor(16, 64)] * 2, transpose_weight=True)
    assert launched(known) == 6


@pytest.mark.parametrize("op", OPS)
def test_where_tensors_lie_is_looked_at_each_time(op: str, known: Machine) -> None:
    CALLS[op](tensor(8, 64), tensor(16, 64))
    shifted = torch.arange(8 * 64 + 1).bfloat16()[1:].view(8, 64)
    across = torch.arange(16 * 64).bfloat16().view(64, 16).t()
    for number in (1, 2):  # as neither is known then
        out = torch.zeros(ROWS[op] * 16 + 1).bfloat16()[1:].view(-1, 16)
        CALLS[op](shifted, across, out=out)
        x, weight, _, written = known.dispatched[number][1][:4]
        for given, wanted in ((x, shifted), (weight, across)):
            assert given.data_ptr() % 16 == 0 and given.is_contiguous() and torch.equal(given, wanted)
        assert written.data_ptr() % 16 == 0
    for number in (3, 4):  # x alone, whose columns lie next to each other
        CALLS[op](tensor(64, 8).t(), tensor(16, 64))
        assert known.dispatched[number][1][0].is_contiguous()


def test_a_call_is_made_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks torch about the current stream, such as whether that is captured, is about this device."""
    current = [0]

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(workspace, "turns", {})
    group = mock.Mock(size=lambda: 2, group_name="g")
    seen = [workspace.in_turn(group, torch.device("cuda", i), lambda: current[0]) for i in (0, 1, 0)]
    assert seen == [0, 1, 0] and current == [0]
