"""Calls with scales that C++ repeats (flux.comm.repeat): what kernels are given, and which calls differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repeated import Machine, column_major, fp8, roles, scale, tensor, told
from test_repeated_calls import CPP, PYTHON, count

import flux
from flux.comm import repeat
from flux.comm.cuda import CudaWorkspace
from flux.ops import grouped_gemm, norm_and_quant, quantize

pytest_plugins = ("repeated",)  # fixtures
E5M2 = torch.float8_e5m2


@pytest.fixture
def alone(gemms: Any) -> Any:
    """The known calls of operators without communication."""
    return gemms


KINDS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "tensor": (scale(1), scale(1)),
    "number": (torch.tensor(1.0), torch.tensor(1.0)),
    "row": (scale(8, 1), scale(16)),
    "rows, flat": (scale(8), scale(16, 1)),
    "x by row": (scale(8, 1), scale(1)),
    "block": (column_major(8, 2), scale(1, 2)),
}


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gemm_is_repeated_with_its_own_scales(
    kind: str, transpose: bool, with_out: bool, machine: Machine, alone: Any
) -> None:
    scale_x, scale_w = KINDS[kind]
    if transpose and kind == "block":
        scale_w = scale(2, 1)
    for out_dtype in (torch.bfloat16, torch.float32):
        machine.repeated.clear()
        given: dict[str, Any] = {
            "x": fp8(8, 256),
            "weight": fp8(16, 256),
            "bias": tensor(16, dtype=out_dtype),
        }
        given |= {"scale_x": scale_x.clone(), "scale_w": scale_w.clone()}
        if transpose:
            given["weight"] = given["weight"].t()
        how = {"out_dtype": out_dtype, "transpose_weight": transpose}
        if with_out:
            given["out"] = tensor(8, 16, dtype=out_dtype)
        flux.gemm(**given, **how)
        others = {name: value.clone() for name, value in given.items()}
        result = flux.gemm(**others, **how)
        assert result.shape == (8, 16) and result.dtype == out_dtype
        wanted = ["x", "weight", "bias", "out" if with_out else "result 0", "scale_x", "scale_w"]
        named = roles(others, result)
        assert [told(named, addresses) for _, addresses, _ in machine.repeated] == [wanted]
    assert len(alone) == len(machine.dispatched) == 2


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


@pytest.mark.parametrize(
    ("quant", "static"), [(quant, False) for quant in quantize.QUANTS] + [("tensor", True)]
)
@pytest.mark.parametrize("shape", [(8, 256), (2, 3, 136)])
def test_quantize_is_repeated(
    shape: tuple[int, ...], quant: Any, static: bool, machine: Machine, alone: Any
) -> None:
    x, given_scale = tensor(*shape), scale(1) if static else None
    arguments: tuple[Any, ...] = (x, quant, given_scale, False, torch.float8_e4m3fn)
    q, scales = flux.quantize(x, quant, scale=given_scale)
    given = {"x": x.clone(), "scale": None if given_scale is None else given_scale.clone()}
    results = flux.quantize(**given, quant=quant)
    assert [(t.shape, t.stride(), t.dtype) for t in results] == [
        (t.shape, t.stride(), t.dtype) for t in (q, scales)
    ]
    expected = ["x", "result 0", "result 1", "scale" if static else None]
    expected.append("scratch" if quant == "tensor" and not static else None)
    named = roles(given, results)
    assert [told(named, addresses) for _, addresses, _ in machine.repeated] == [expected]
    for other in (
        (x, quant, None if static else scale(1), False, torch.float8_e4m3fn),
        (x, quant, given_scale, True, torch.float8_e4m3fn),
        (x, quant, given_scale, False, E5M2),
        (x.half(), quant, given_scale, False, torch.float8_e4m3fn),
        (x, quant + "8", given_scale, False, torch.float8_e4m3fn),
    ):
        assert alone.call(quantize.QUANTIZE.number, False, *other) is None
    assert alone.call(quantize.QUANTIZE.number, False, *arguments) is not None


def test_a_strided_x_is_quantised_from_a_copy(machine: Machine, alone: Any) -> None:
    x = tensor(8, 512)[:, ::2]
    flux.quantize(x, "row")
    assert len(machine.dispatched) == 1 and len(alone) == 0


@pytest.mark.parametrize("of_experts", [scale(4), scale(4, 32), scale(4, 32, 1), scale(4, 1, 2), scale(1)])
def test_a_grouped_gemm_of_fp8_is_repeated(of_experts: torch.Tensor, machine: Machine, alone: Any) -> None:
    by_block = of_experts.shape == (4, 1, 2)
    given = {"x": fp8(24, 256), "weight": fp8(4, 32, 256), "offsets": tensor(5, dtype=torch.int32)}
    given |= {"scale_x": column_major(24, 2) if by_block else scale(24, 1), "scale_w": of_experts}
    x, weight, offsets, scale_x, scale_w = given.values()
    grouped_gemm._cuda(x, weight, offsets, None, "silu", scale_x, scale_w)
    if of_experts.numel() == 1:
        assert len(alone) == 0, "the kernel reads a copy, one for each expert"
        return
    given = {name: value.clone() for name, value in given.items()}
    result = flux.grouped_gemm(**given, activation="silu")
    assert result.shape == (24, 32) and result.dtype == torch.bfloat16 and len(machine.dispatched) == 1
    wanted = ["x", "weight", "offsets", None, "result 0", "scratch", "scale_x", "scale_w"]
    named = roles(given, result)
    assert [told(named, addresses) for _, addresses, _ in machine.repeated] == [wanted]
    how = (torch.bfloat16, "promoted")
    for activation, expected in (("silu", True), ("gelu", False), (None, False), ("sil", False)):
        call = (
            grouped_gemm._OP,
            False,
            x,
            weight,
            offsets,
            None,
            activation,
            scale_x,
            scale_w,
            *how,
        )
        assert (alone.call(*call) is not None) == expected


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
