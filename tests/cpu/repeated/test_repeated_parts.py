"""Calls that run in parts are repeated by C++ as a whole (flux.comm.repeat.Recipe)."""

from __future__ import annotations

import ctypes
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from repeated import CALLS, WITH_OUT, Machine, arguments, flat, roles, tensor, told

import flux
from flux.calls import front
from flux.comm.cuda import CudaWorkspace
from flux.measured import files
from flux.measured.times import Tuning
from flux.ops import gemm as plain
from flux.ops import norm_and_quant
from flux.ops.norm_and_quant import End, Made
from flux.ops.ways import exchange
from flux.ops.ways.all_reduce import ALL_REDUCE
from flux.plan import sums
from flux.plan.choose import plan_without_workspace, workspace_plan

pytest_plugins = ("repeated",)  # fixtures


@pytest.fixture
def in_parts(machine: Machine, workspace: CudaWorkspace, gemms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators that can run in parts do so, on tensors that pass for a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    workspace.tuning = Tuning(forced="parts")


# The kernels of a call in parts, and what each of them is given. "scratch": memory of the call's own.
SUM = {"gemm": ["x", "weight", None, "scratch"], "all_reduce": ["scratch", "result 0"]}
WITH_RESIDUAL = SUM | {"all_reduce": ["scratch", "result 0", "residual"]}
COMPOSED = {"gemm_rs": ["x", "weight", None, "scratch"], "all_gather": ["scratch", "result 0"]}
PARTS: dict[tuple[str, str], dict[str, list[str | None]]] = {
    ("parts", "gemm_rs"): SUM,
    ("parts", "ag_gemm"): {"all_gather": ["x", "scratch"], "gemm": ["scratch", "weight", None, "result 0"]},
    ("parts", "ag_gemm gathered"): {
        "all_gather": ["x", "result 1"],
        "gemm": ["result 1", "weight", None, "result 0"],
    },
    ("parts", "gemm_ar"): SUM,
    ("parts", "gemm_ar bias"): WITH_RESIDUAL | {"gemm": ["x", "weight", "bias", "scratch"]},
    ("parts", "gemm_ar residual"): WITH_RESIDUAL,
    ("parts", "gemm_ar norm"): SUM
    | {"all_reduce": ["scratch", "result 0", "residual", "norm_weight", "result 1"]},
    ("composed", "gemm_ar"): COMPOSED,
    ("composed", "gemm_ar alone bias"): COMPOSED | {"gemm_rs": ["x", "weight", "bias", "scratch"]},
}
MORE = {
    "ag_gemm gathered": {"return_gathered": True},
    "gemm_ar bias": {"bias": tensor(16), "residual": tensor(8, 16)},
    "gemm_ar alone bias": {"bias": tensor(16)},
    "gemm_ar residual": {"residual": tensor(8, 16)},
    "gemm_ar norm": {"residual": tensor(8, 16), "norm_weight": tensor(16), "eps": 1e-5},
}


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize(("way", "op"), PARTS)
def test_a_call_in_parts_is_repeated_as_a_whole(
    way: str, op: str, with_out: bool, machine: Machine, in_parts: None, workspace: CudaWorkspace
) -> None:
    workspace.tuning = Tuning(forced=way)
    call, given = CALLS[op.split()[0]], arguments(op.split()[0]) | MORE.get(op, {})
    if with_out and (op in WITH_OUT or way == "composed"):
        given["out"] = call(**given)
    # A part that is known by itself already.
    if way == "parts":
        flux.all_gather(given["x"])
    else:
        flux.gemm_rs(given["x"], given["weight"], given.get("bias"))
    machine.dispatched.clear()
    call(**given)
    for _ in range(2):
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        machine.repeated.clear()
        result = call(**given)
        assert len(machine.dispatched) == 2, "Python has launched once"
        named = roles({name: value for name, value in given.items() if name != "out"}, result)
        assert [name.split("::_")[1] for name, _, _ in machine.repeated] == list(PARTS[way, op])
        for (_, addresses, _), expected in zip(machine.repeated, PARTS[way, op].values(), strict=True):
            assert told(named, addresses)[: len(expected)] == expected
        everything = {address for _, addresses, _ in machine.repeated for address in addresses}
        scratch = everything - {None, *named}
        assert len(scratch) == (op != "ag_gemm gathered"), "the second kernel reads what the first one wrote"


def test_parts_are_repeated_only_if_they_are_all_of_the_call(machine: Machine, in_parts: None) -> None:
    weight = tensor(16, 64)
    odd = tensor(8 * 64 + 1)[1:].view(8, 64)  # kernels read a copy
    both = tensor(64, 64)
    for call in (
        lambda: flux.gemm_rs(odd, weight),
        lambda: flux.ag_gemm(odd, weight),
        lambda: flux.ag_gemm(both, both),  # which of the two a kernel reads
    ):
        for _ in range(2):
            machine.dispatched.clear()
            call()
            assert len(machine.dispatched) == 2 and not machine.repeated


def test_one_rank_adds_the_bias(
    machine: Machine, in_parts: None, monkeypatch: pytest.MonkeyPatch, workspace: CudaWorkspace
) -> None:
    monkeypatch.setattr(type(workspace.group), "rank", lambda self: 1)
    flux.gemm_ar(tensor(8, 64), tensor(16, 64), tensor(16))
    (_, operands), _ = machine.dispatched
    assert operands[2] is None


def test_each_part_by_copy_engines_has_an_epoch_of_its_own(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    workspace.tuning, rows = Tuning(forced="composed"), 16384
    x, weight = tensor(rows, 512), tensor(4096, 512)
    plans = workspace_plan(workspace, "gemm_rs", rows, 4096, 512, x.dtype, False)
    assert plans.copied, "large enough for copy engines"
    flux.gemm_ar(x, weight)
    begun, counted = [epoch for *_, epoch in machine.repeated], workspace.known.copy_epoch
    assert begun == [] and counted == 2
    for _ in range(2):
        machine.repeated.clear()
        flux.gemm_ar(x, weight)
        assert [epoch for *_, epoch in machine.repeated] == [counted + 1, counted + 2]
        counted = workspace.known.copy_epoch
    flux.gemm_rs(x, weight)
    assert workspace.known.copy_epoch == counted + 1


class Ranks:
    """Kernels of two equal ranks, whose products are given: they write what the sum and its gather are."""

    def __init__(self, machine: Machine, product: torch.Tensor) -> None:
        self.machine, self.product = machine, product
        machine.during = self.write

    def write(self) -> None:
        name, *_ = self.machine._kept[self.machine.running - 1]
        addresses, half = self.machine.addresses, self.product.nbytes // 2
        if name == "flux::_gemm_rs":
            ctypes.memmove(addresses[3], self.product.data_ptr(), half)
        elif name == "flux::_all_reduce":  # of which a reduce-scatter is a mode
            ctypes.memmove(addresses[1], self.product.data_ptr(), half)
        elif name == "flux::_all_gather":
            for rank in range(2):
                ctypes.memmove(addresses[1] + rank * half, addresses[0], half)


MORE_COMPOSED: dict[str, dict[str, Any]] = {
    "residual": {"residual": tensor(8, 16)},
    "norm": {"norm_weight": tensor(16)},
    "both": {"residual": tensor(8, 16), "norm_weight": tensor(16), "bias": tensor(16)},
    "rows": {"residual": tensor(2, 4, 16), "norm_weight": tensor(16)},
    "quant": {"residual": tensor(8, 16), "norm_weight": tensor(16), "quant": "row"},
    "static": {
        "norm_weight": tensor(16),
        "quant": "tensor",
        "quant_scale": torch.ones(1),
        "return_norm": True,
    },
}


@pytest.mark.parametrize("how", MORE_COMPOSED)
def test_torch_does_its_part_of_a_known_composed_call(
    how: str, machine: Machine, workspace: CudaWorkspace
) -> None:
    workspace.tuning = Tuning(forced="composed")
    product = torch.arange(8 * 16).view(8, 16).remainder(7).bfloat16()
    product[4:] = product[:4]
    Ranks(machine, product)
    weight = tensor(16, 64)
    for number in range(3):
        given = {
            name: torch.full_like(value, 1 + number) if isinstance(value, torch.Tensor) else value
            for name, value in MORE_COMPOSED[how].items()
        }
        x = tensor(2, 4, 64) if how == "rows" else tensor(8, 64)
        machine.repeated.clear()
        eps = {"eps": 1e-6} if "norm_weight" in given else {}
        results = flux.gemm_ar(x, weight, **given, **eps)
        if number == 0:
            continue
        assert [name for name, *_ in machine.repeated] == ["flux::_gemm_rs", "flux::_all_gather"]
        shape = (*x.shape[:-1], 16)
        total = product.view(shape) + given.get("residual", 0)
        options = {name: given[name] for name in (*norm_and_quant.NAMES, "norm_weight") if name in given}
        expected = End(eps=1e-6)._replace(**options).of(total)
        assert len(flat(results)) == len(flat(expected))
        for found, wanted in zip(flat(results), flat(expected), strict=True):
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            assert torch.equal(found.float(), wanted.float())
    assert len(machine.dispatched) == 2 and len(workspace.known) == 1, "Python has launched once"


@pytest.mark.parametrize(
    ("op", "kernels"),
    [
        ("gemm", []),
        ("gemm rows", []),
        ("gemm bias", []),
        ("gemm_rs", ["flux::_all_reduce"]),
        ("ag_gemm", ["flux::_all_gather"]),
        ("gemm_ar", ["flux::_all_reduce"]),
        ("gemm_ar bias", ["flux::_all_reduce"]),
    ],
)
@pytest.mark.parametrize("with_out", [False, True])
def test_a_product_of_torch_is_a_step_of_a_known_call(
    op: str, kernels: list[str], with_out: bool, machine: Machine, in_parts: None, monkeypatch: Any
) -> None:
    """A measurement may say that torch's product is sooner: the call is repeated none the less."""
    monkeypatch.setattr(files, "local", lambda device: Tuning(forced="torch"))
    plan_without_workspace.cache_clear()
    products = mock.Mock(side_effect=plain.unfused)
    monkeypatch.setattr(plain, "unfused", products)
    for number in range(3):
        x = torch.full((2, 4, 64) if op == "gemm rows" else (8, 64), 1.0 + number).bfloat16()
        weight = (torch.arange(16 * 64).view(16, 64) % 3 - 1).bfloat16()
        given: dict[str, Any] = {"bias": torch.full((16,), 2.0).bfloat16()} if "bias" in op else {}
        wanted = x @ weight.t() + given.get("bias", 0)
        if with_out:
            rows = {"gemm_rs": 4, "ag_gemm": 16}.get(op, 8)
            given["out"] = torch.empty_like(wanted) if x.dim() == 3 else tensor(rows, 16)
        machine.repeated.clear()
        result = getattr(flux, op.split()[0])(x, weight, **given)
        assert result is given.get("out", result) and products.call_count == number + 1
        if number:
            assert [name for name, *_ in machine.repeated] == kernels
        if not kernels:
            assert torch.equal(result, wanted)
        elif op != "ag_gemm":
            assert torch.equal(products.call_args.args[0].out, wanted)
    assert len(machine.dispatched) == len(kernels), "Python has launched once"


def test_torch_adds_the_bias_of_a_known_scatter_in_parts(machine: Machine, in_parts: None) -> None:
    product = torch.arange(8 * 16).view(8, 16).remainder(7).bfloat16()
    Ranks(machine, product)
    for number in range(3):
        machine.repeated.clear()
        bias = torch.full((16,), 1.0 + number).bfloat16()
        rows = flux.gemm_rs(tensor(8, 64), tensor(16, 64), bias)
        if number:
            assert len(machine.repeated) == 2 and torch.equal(rows, product[:4] + bias)


def test_an_error_of_torch_ends_a_known_call(machine: Machine, workspace: CudaWorkspace) -> None:
    workspace.tuning = Tuning(forced="composed")
    given = {"x": tensor(8, 64), "weight": tensor(16, 64), "norm_weight": tensor(16)}
    flux.gemm_ar(**given)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="no room"):
        patch.setattr(norm_and_quant, "row_norm", raise_no_room)
        flux.gemm_ar(**given)
    flux.gemm_ar(**given)
    assert len(machine.dispatched) == 2, "the group works on"


def raise_no_room(*_: Any) -> None:
    raise MemoryError("no room")


def test_composed_calls_of_two_calls_of_gemm_ar_are_not_a_whole(
    machine: Machine, workspace: CudaWorkspace, in_parts: None
) -> None:
    workspace.tuning = Tuning(forced="composed")
    x, weight = tensor(9, 64), tensor(16, 64)  # ranks do not divide the rows
    for _ in range(3):
        machine.repeated.clear()
        flux.gemm_ar(x, weight)
    assert [name for name, *_ in machine.repeated][:2] == ["flux::_gemm_rs", "flux::_all_gather"]
    calls = len(workspace.known)
    workspace.known.clear()
    flux.gemm_ar(x, weight)
    assert len(workspace.known) == calls == 3, "parts are known alone"


EMPTY = [
    *product(("gemm", "gemm_rs", "ag_gemm", "gemm_ar"), [(0, 16, 64), (8, 0, 64), (8, 16, 0), (0, 0, 0)]),
    *product(("all_gather", "reduce_scatter", "all_reduce"), [(0, 16, 64), (8, 16, 0)]),
]


@pytest.mark.parametrize(("op", "sizes"), EMPTY)
def test_nothing_to_compute_launches_nothing(
    op: str, sizes: tuple[int, int, int], machine: Machine, workspace: CudaWorkspace, in_parts: None
) -> None:
    m, n, k = sizes
    for leading in ((m,), (m, 3), (2, m)):
        x, more = tensor(*leading, k), {"weight": tensor(n, k)} if "gemm" in op else {}
        for _ in range(2):
            [result] = flat(getattr(flux, op)(x, **more))
            assert result.shape[-1] == (n if more else k) and not result.any()
            assert workspace.turn.broken_by is None
    assert not machine.dispatched and not machine.repeated


@pytest.mark.parametrize(("quant", "parts"), [(None, 1), (None, 3), ("tensor", 1), ("tensor", 3)])
def test_norms_of_kernels_are_of_whole_rows(
    quant: str | None, parts: int, machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel makes of each part is the result; several parts are quantised behind it, as one."""
    x, weight = torch.arange(7 * 16.0).view(7, 16).bfloat16(), torch.full((16,), 2.0).bfloat16()
    ends = []

    def kernel(at: Any, plan: Any, call: exchange.Call, recipe: Any) -> Made:
        ends.append(call.end)
        call.out.copy_(call.x)
        return Made(call.x * weight)

    monkeypatch.setitem(ALL_REDUCE.ways, "kernel", kernel)
    monkeypatch.setattr(sums, "MAX_EXCHANGE_BYTES", -(-7 // parts) * 16 * x.itemsize)
    out, end = torch.empty_like(x), End(weight, 1e-6, quant, return_norm=True)
    with flux.batch_invariant():
        made = front.run(ALL_REDUCE, exchange.Call(x, None, end, out), workspace.group)
    assert torch.equal(made[0 if quant is None else -1], x * weight) and torch.equal(out, x)
    assert [each.quant for each in ends] == [quant if parts == 1 else None] * parts
    assert all(each.norm_weight is weight for each in ends)
