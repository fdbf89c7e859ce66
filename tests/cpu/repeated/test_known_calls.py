"""Calls that a GPU workspace knows are not checked and planned again: whatever differs must be seen."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flux
from flux._native import core
from flux.calls import checks, front
from flux.comm import registry, repeat
from flux.comm.cuda import CudaWorkspace, Launch
from flux.measured.times import Tuning
from flux.ops.ways import ag_gemm, all_gather, gemm_ar, gemm_rs
from flux.plan import sums

DEVICE = torch.device("cpu")  # where the tensors are; their workspace plans for GPUs
ROOM = 1 << 30
Launches = list[tuple[str, tuple[Any, ...]]]


class Group:
    group_name = "g"

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def size(self) -> int:
        return self._world_size


def make_workspace(group: Any) -> CudaWorkspace:
    """One that has room for every call, and nobody to meet."""
    workspace = CudaWorkspace.__new__(CudaWorkspace)
    turn, order = registry.turn(group, DEVICE), core.LaunchOrder()
    error = torch.zeros(16, dtype=torch.int32)
    symm_buffer = core.SymmBuffer(
        0, group.size(), [4096] * group.size(), ROOM, ROOM, ROOM, error.data_ptr(), 1
    )
    vars(workspace).update(
        group=group,
        device=torch.device("cuda", 0),
        rank=0,
        world_size=group.size(),
        timeout_s=30.0,
        why_not=None,
        num_sms=132,
        tuning=Tuning(forced="kernel"),
        plans={},
        _plans_left_free={},
        failure=None,
        signal_bytes=ROOM,
        slot_bytes=ROOM,
        exchange_bytes=ROOM,
        _symm_buffer=symm_buffer,
        _address=int(symm_buffer.address),
        _index=0,
        _launch=Launch(workspace, copies=False),
        _copy_launch=Launch(workspace, copies=True),
        _captured=False,
        _copy_room=(ROOM, ROOM),
        _copy_address=int(symm_buffer.address),
        _order=order,
        known=repeat.make(turn, order, error.data_ptr(), str(group.group_name)),
        turn=turn,
        _error=error,
        _error_address=error.data_ptr(),
        _error_code=ctypes.c_uint32.from_address(error.data_ptr()),
    )
    return workspace


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """What the kernels are given, on workspaces that are there already."""
    told: Launches = []

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments: told.append((name, arguments))

    for name, module in {
        "gemm_rs": gemm_rs,
        "gemm_ar": gemm_ar,
        "ag_gemm": ag_gemm,
        "all_gather": all_gather,
    }.items():
        monkeypatch.setattr(module, "_kernel", record(name))
    monkeypatch.setattr(sums, "KERNEL_ROWS", range(1, 257))  # also of calls with eight
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=1))
    monkeypatch.setattr(registry, "_workspaces", {})
    monkeypatch.setattr(registry, "_turns", {})
    yield told


@pytest.fixture
def group(launches: Launches) -> Any:
    made = Group(2)
    registry._workspaces[made, DEVICE] = make_workspace(made)
    return made


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def call(group: Any, op: str, **change: Any) -> Any:
    """A call of x [8, 64] and weight [16, 64], or what `change` makes of it."""
    given = {
        "x": tensor(8, 64),
        "weight": tensor(16, 64),
        "bias": None,
        "transpose_weight": False,
        "out": None,
    }
    given |= change
    x, weight, bias, out = given["x"], given["weight"], given["bias"], given["out"]
    transpose_weight = given["transpose_weight"]
    if op == "gemm_rs":
        return front.below(gemm_rs.GEMM_RS, gemm_rs.Call(x, weight, bias, transpose_weight, out), group)
    if op == "gemm_ar":
        residual = given.get("residual")
        of_call = gemm_ar.Call(x, weight, bias, transpose_weight, residual, out=out)
        return front.below(gemm_ar.GEMM_AR, of_call, group)
    weights = weight if isinstance(weight, list) else [weight]
    biases = bias if isinstance(bias, list) else [] if bias is None else [bias]
    outs = None if out is None else [out]
    of_call = ag_gemm.Call(x, weights, biases, transpose_weight, False, outs)
    return front.below(ag_gemm.AG_GEMM, of_call, group)[0]


OPS = ("gemm_rs", "gemm_ar", "ag_gemm")
ROWS = {"gemm_rs": 4, "gemm_ar": 8, "ag_gemm": 16}  # of the result


@pytest.mark.parametrize("op", OPS)
def test_an_equal_call_is_checked_and_planned_once(
    op: str, group: Any, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    whole = checks.gemm_args
    monkeypatch.setattr(checks, "gemm_args", lambda *args, **how: checked.append(args) or whole(*args, **how))
    for _ in range(3):
        assert call(group, op).shape == (ROWS[op], 16)
    assert call(group, op, x=tensor(4, 2, 64)).shape == (ROWS[op] // 2, 2, 16)
    assert call(group, op, x=tensor(4, 2, 64)).shape == (ROWS[op] // 2, 2, 16)
    assert len(checked) == 2 and [name for name, _ in launches] == [op] * 5
    assert {arguments[0].shape for _, arguments in launches} == {(8, 64)}
    assert {arguments[6] for _, arguments in launches} == {launches[0][1][6]}, "one choice"


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "x dtype": ({"x": tensor(8, 64, dtype=torch.float16)}, r"weight\b.*float16, that of x"),
    "both dtypes": ({"x": tensor(8, 64).int(), "weight": tensor(16, 64).int()}, "x: .*dtype bfloat16"),
    "k of x": ({"x": tensor(8, 56)}, r"weight\b.*k = 56"),
    "weight dtype": ({"weight": tensor(16, 64, dtype=torch.float16)}, r"weight\b.*bfloat16, that of x"),
    "weight device": ({"weight": tensor(16, 64, device="meta")}, r"weight\b.*device cpu, that of x"),
    "weight dimensions": ({"weight": tensor(1, 16, 64)}, r"weight\b.*2 dimensions"),
    "layout": ({"transpose_weight": True}, r"weight\b.*transpose_weight=True"),
    "bias shape": ({"bias": tensor(15)}, r"bias\b.*shape \[16\]"),
    "bias dtype": ({"bias": tensor(16, dtype=torch.float16)}, r"bias\b.*dtype torch.bfloat16"),
    "bias device": ({"bias": tensor(16, device="meta")}, r"bias\b.*device cpu"),
    "out shape": ({"out": tensor(3, 16)}, r"out\b.*shape \[3, 16\]"),
    "out dtype": ({"out": torch.float16}, r"out\b.*dtype torch.bfloat16"),
    "out strides": ({"out": "strided"}, r"out\b.*contiguous"),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_after_calls_that_did(
    misfit: str, op: str, group: Any, launches: Launches
) -> None:
    change, words = MISFITS[misfit]
    change = dict(change)
    if change.get("out") is torch.float16:
        change["out"] = tensor(ROWS[op], 16, dtype=torch.float16)
    elif isinstance(change.get("out"), str):
        change["out"] = tensor(16, ROWS[op]).t()
    for bias in (None, tensor(16)):  # calls that fit
        call(group, op, bias=bias)
        call(group, op, bias=bias, out=tensor(ROWS[op], 16))
    with pytest.raises(ValueError, match=f"{op}: .*{words}"):
        call(group, op, **change)
    assert len(launches) == 4


def test_a_residual_is_checked_each_time(group: Any, launches: Launches) -> None:
    call(group, "gemm_ar", residual=tensor(8, 16))
    call(group, "gemm_ar")
    for wrong in (tensor(8, 15), tensor(8, 16, dtype=torch.float16), tensor(8, 16, device="meta")):
        with pytest.raises(ValueError, match="gemm_ar: residual: "):
            call(group, "gemm_ar", residual=wrong)
    assert len(launches) == 2


def test_lists_of_weights_and_biases_are_not_taken_for_each_other(group: Any, launches: Launches) -> None:
    square = tensor(64, 64)
    call(group, "ag_gemm", weight=[square, square])
    call(group, "ag_gemm", weight=[square, square], bias=[None, tensor(64)])
    assert len(launches) == 4
    for weights, biases, words in (
        ([square], [square], "bias: expected shape"),
        ([square, square], [tensor(64)], "bias: expected 2 entries"),
        ([square], [None, tensor(64)], "bias: expected 1 entries"),
        ([square, square], [tensor(64), tensor(63)], r"bias\[1\]: expected shape"),
        ([square, tensor(64, 63)], None, r"weight\[1\]: "),
        ([], None, "weight: expected at least one weight"),
    ):
        with pytest.raises(ValueError, match=f"ag_gemm: {words}"):
            call(group, "ag_gemm", weight=weights, bias=biases)
    call(group, "ag_gemm", weight=[tensor(16, 64)] * 2)
    with pytest.raises(ValueError, match=r"weight\[0\]: .*transpose_weight=True"):
        call(group, "ag_gemm", weight=[tensor(16, 64)] * 2, transpose_weight=True)
    assert len(launches) == 6


@pytest.mark.parametrize("op", OPS)
def test_where_tensors_lie_is_looked_at_each_time(op: str, group: Any, launches: Launches) -> None:
    call(group, op)
    shifted = torch.arange(8 * 64 + 1).bfloat16()[1:].view(8, 64)
    across = torch.arange(16 * 64).bfloat16().view(64, 16).t()
    call(group, op, x=shifted, weight=across, out=torch.zeros(ROWS[op] * 16 + 1).bfloat16()[1:].view(-1, 16))
    x, weight, _, out = launches[1][1][:4]
    for given, wanted in ((x, shifted), (weight, across)):
        assert given.data_ptr() % 16 == 0 and given.is_contiguous() and torch.equal(given, wanted)
    assert out.data_ptr() % 16 == 0


def test_another_group_of_the_same_name_knows_nothing(group: Any, launches: Launches) -> None:
    x = tensor(6, 64)
    call(group, "gemm_rs", x=x)
    four = Group(4)
    with pytest.raises(ValueError, match="gemm_rs: x: .*divisible by the 4 ranks"):
        call(four, "gemm_rs", x=x)
    registry._workspaces[four, DEVICE] = make_workspace(four)
    with pytest.raises(ValueError, match="gemm_rs: x: .*divisible by the 4 ranks"):
        call(four, "gemm_rs", x=x)
    assert call(four, "gemm_rs").shape == (2, 16)
    addresses = {arguments[5] for _, arguments in launches}
    assert addresses == {workspace._address for workspace in registry._workspaces.values()}  # type: ignore[attr-defined]


def test_a_workspace_that_is_made_anew_plans_anew(
    group: Any, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfused = []
    monkeypatch.setitem(gemm_rs.GEMM_RS.ways, "torch", lambda *arguments: unfused.append(arguments))
    call(group, "gemm_rs")
    again = make_workspace(group)
    again.why_not = "FLUX_FUSED=off"
    registry._workspaces[group, DEVICE] = again
    for count in (1, 2):
        call(group, "gemm_rs")
        assert (len(launches), len(unfused)) == (1, count)


@pytest.mark.parametrize("op", OPS)
def test_a_timeout_is_raised_by_a_known_call(op: str, group: Any, launches: Launches) -> None:
    call(group, op)
    workspace: Any = registry.find(group, DEVICE)
    workspace._error[:7] = torch.tensor([1, 1, 0, 1, 5, 42, 41])
    for _ in range(2):
        with pytest.raises(flux.CommTimeoutError):
            call(group, op)
    assert len(launches) == 1


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
    monkeypatch.setattr(registry, "_turns", {})
    group: Any = Group(2)
    seen = [registry.in_turn(group, torch.device("cuda", i), lambda: current[0]) for i in (0, 1, 0)]
    assert seen == [0, 1, 0] and current == [0]
