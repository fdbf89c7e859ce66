"""Calls with scales that C++ repeats (flux.comm.repeat): what kernels are given, and which calls differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repeated import Machine, column_major, fp8, scale, tensor
from test_repeated_calls import CPP, PYTHON, count

import flux
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.ops import norm_and_quant, quantize

pytest_plugins = ("repeated",)  # fixtures
E5M2 = torch.float8_e5m2


def strided(rows: int, columns: int, strides: tuple[int, int]) -> torch.Tensor:
    return torch.ones(1024).as_strided((rows, columns), strides)


COPIED: dict[str, dict[str, torch.Tensor]] = {
    "blocks, row by row": {"scale_x": scale(8, 2), "scale_w": scale(1, 2)},
    "blocks, columns too close": {"scale_x": strided(6, 2, (1, 6)), "scale_w": scale(1, 2)},
    "blocks of the weight": {"scale_x": column_major(8, 2), "scale_w": strided(2, 2, (1, 2))},
    "powers of two": {"scale_x": scale(8, 1).to(torch.float8_e8m0fnu), "scale_w": scale(16)},
    "rows with gaps": {"scale_x": strided(8, 1, (2, 1)), "scale_w": scale(16)},
}


@pytest.mark.parametrize("case", COPIED)
def test_scales_that_are_copied_are_copied_in_every_call(
    case: str, machine: Machine, workspace: CudaWorkspace
) -> None:
    scales = {name: value.clone(memory_format=torch.preserve_format) for name, value in COPIED[case].items()}
    if case == "rows with gaps" or "columns" in case:  # clones have no gaps
        scales["scale_x"] = COPIED[case]["scale_x"]
    m, n = scales["scale_x"].shape[0], 256 if case == "blocks of the weight" else 16
    x, weight = fp8(m, 256), fp8(n, 256)
    for value in (1.0, 2.0, 4.0):
        for each in scales.values():
            each.copy_(torch.full(each.shape, value))
        assert count(machine, lambda: flux.gemm_rs(x, weight, **scales)) == PYTHON
        of_kernel = machine.dispatched[-1][1][-3:-1]
        assert [each.dtype for each in of_kernel] == [torch.float32] * 2
        assert all((each == value).all() for each in of_kernel)
    assert len(workspace.known) == 0


def test_scales_may_lie_at_any_address(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight, many = fp8(8, 64), fp8(16, 64), scale(9)
    for first in (1, 2):
        for expected in (PYTHON, CPP):
            call = lambda first=first: flux.gemm_rs(x, weight, scale_x=many[first], scale_w=many[0])  # noqa: E731
            assert count(machine, call) == expected
    call = lambda: flux.gemm_rs(x, weight, scale_x=many[5], scale_w=many[4])  # noqa: E731
    assert count(machine, call) == CPP, "as far from a multiple of 16 bytes"
    assert machine.repeated[-1][1][5:] == [many[5].data_ptr(), many[4].data_ptr()]


def test_wrong_calls_are_refused_when_the_right_one_is_known(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    x, weight, memory = fp8(8, 64), fp8(16, 64), torch.zeros(64)
    scales: dict[str, Any] = {"scale_x": memory[:1], "scale_w": scale(1)}
    for out in (None, tensor(4, 16)):
        for _ in range(2):
            flux.gemm_rs(x, weight, **scales, out=out)
    overlapping = memory.view(torch.bfloat16)[:64].view(4, 16)
    trained = {"scale_x": scale(1).requires_grad_()}
    for change, message in (
        ({"out": overlapping}, "out: expected memory of its own"),
        ({"scale_w": None}, "scale_w: expected a tensor"),
        ({"scale_w": scale(3)}, "scale_w: expected one entry"),
        ({"accumulate": "faster"}, "accumulate: expected 'promoted' or 'fast'"),
        ({"out_dtype": torch.int8}, "out_dtype: expected bfloat16"),
        (trained, "scale_x: expected a tensor that needs no gradient"),
    ):
        with pytest.raises(ValueError, match=f"gemm_rs: {message}"):
            flux.gemm_rs(x, weight, **{**scales, **change})
    with torch.no_grad():
        assert count(machine, lambda: flux.gemm_rs(x, weight, **{**scales, **trained})) == CPP


def test_another_quantisation_is_not_taken_for_a_known_one(machine: Machine, gemms: Any) -> None:
    x, e4m3 = tensor(8, 256), torch.float8_e4m3fn
    for quant, given in (("row", None), ("tensor", scale(1))):
        flux.quantize(x, quant, scale=given)  # type: ignore[call-overload]
        for other in (
            (x, quant, None if given is not None else scale(1), False, e4m3),
            (x, quant, given, True, e4m3),
            (x, quant, given, False, E5M2),
            (x.half(), quant, given, False, e4m3),
            (x, quant + "8", given, False, e4m3),
        ):
            assert gemms.call(quantize.QUANTIZE.number, False, *other, None) is None
        assert gemms.call(quantize.QUANTIZE.number, False, x, quant, given, False, e4m3, None) is not None


def test_a_strided_x_is_quantised_from_a_copy(machine: Machine, gemms: Any) -> None:
    x = tensor(8, 512)[:, ::2]
    flux.quantize(x, "row")
    assert len(machine.dispatched) == 1 and len(gemms) == 0


def test_a_launch_that_cannot_quantise_is_not_repeated(
    machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_and_quant, "takes", lambda op, name: False)
    call = lambda: flux.all_reduce(tensor(8, 64), norm_weight=tensor(64), quant="row")  # noqa: E731
    assert [count(machine, call) for _ in range(2)] == [PYTHON] * 2 and len(workspace.known) == 0


def test_options_are_compared_whole(machine: Machine, workspace: CudaWorkspace) -> None:
    number, x = repeat.operator(), tensor(8, 64)
    workspace.known.remember(
        (number, x, "group128", torch.half), [((4,), None, 1, None, None)], [], [-1], True
    )

    def is_known(*options: object) -> bool:
        return workspace.known.call(number, x, *options) is not None

    assert is_known("group128", torch.half) and is_known("".join(("group", "128")), torch.float16)
    for wrong in (
        ("group12", torch.half),
        ("group128\0", torch.half),
        ("group1280", torch.half),
        ("gröup128", torch.half),
        ("group128", torch.bfloat16),
        ("group128", "half"),
        ("group128", None),
        (b"group128", torch.half),
        ("group128" * 300, torch.half),
    ):
        assert not is_known(*wrong), wrong
