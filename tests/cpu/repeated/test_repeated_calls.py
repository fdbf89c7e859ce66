"""Calls that C++ repeats (flux.comm.repeat): what kernels are given, and which calls it must leave alone."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repeated import (
    CALLS,
    DEVICE,
    STREAM,
    WITH_OUT,
    Machine,
    add_workspace,
    arguments,
    column_major,
    flat,
    fp8,
    roles,
    scale,
    tensor,
    tensors_of,
    told,
)
from torch.autograd import forward_ad

import flux
from flux import moe
from flux.comm import cuda, registry, repeat
from flux.comm import workspace as workspaces
from flux.comm.cuda import CudaWorkspace
from flux.ops import add_norm, grouped_gemm, quantize
from flux.ops import gemm as plain
from flux.ops.ways.gemm_rs import GEMM_RS

pytest_plugins = ("repeated",)  # fixtures


def check_repeats(call: Callable[..., Any], given: dict[str, Any], machine: Machine) -> None:
    """C++ gives kernels what Python has given them: each tensor of the call, or memory of its own."""
    machine.dispatched.clear()
    results = call(**given)
    named = roles(given, results)
    dispatched = [
        (name, told(named, [None if t is None else t.data_ptr() for t in tensors_of(name, given_to)]))
        for name, given_to in machine.dispatched
    ]
    assert dispatched
    for _ in range(3):
        given = {
            name: [None if v is None else v.clone() for v in value]
            if isinstance(value, list)
            else value.clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in given.items()
        }
        machine.repeated.clear()
        again = call(**given)
        named = roles(given, again)
        repeated = [(name, told(named, addresses)) for name, addresses, _ in machine.repeated]
        assert repeated == dispatched
        shapes = [(r.shape, r.dtype, r.stride()) for r in flat(results)]
        assert [(r.shape, r.dtype, r.stride()) for r in flat(again)] == shapes
        assert type(again) is type(results)
        assert given.get("out") is None or again is given["out"]
    assert len(machine.dispatched) == len(dispatched), "Python has launched once"


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("op", CALLS)
def test_kernels_are_given_what_python_gave_them(
    op: str, transpose: bool, with_out: bool, machine: Machine, workspace: CudaWorkspace
) -> None:
    given = arguments(op, transpose)
    if with_out and op in WITH_OUT:
        given["out"] = torch.empty_like(CALLS[op](**given))
    check_repeats(CALLS[op], given, machine)


SCALES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "tensor": (scale(1), scale(1)),
    "number": (torch.tensor(1.0), torch.tensor(1.0)),
    "row": (scale(8, 1), scale(16)),
    "rows, flat": (scale(8), scale(16, 1)),
    "x by row": (scale(8, 1), scale(1)),
    "block": (column_major(8, 2), scale(1, 2)),
}


def without_group() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Calls, with arguments, that no group makes; and routing, of which its kernel is on GPUs only."""
    offsets, x = tensor(5, dtype=torch.int32), tensor(24, 64)
    plain = {"x": tensor(2, 4, 64), "weight": tensor(16, 64), "bias": tensor(16)}
    found: dict[str, Any] = {"gemm": plain, "gemm, out": plain | {"out": tensor(2, 4, 16)}}
    for kind, (scale_x, scale_w) in SCALES.items():
        for out_dtype in (torch.bfloat16, torch.float32):
            how = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}
            of_fp8 = {"x": fp8(8, 256), "weight": fp8(16, 256), "bias": tensor(16, dtype=out_dtype)} | how
            found[f"gemm, {kind} scales, {out_dtype}"] = of_fp8
            of_fp8 = of_fp8 | {"out": tensor(8, 16, dtype=out_dtype), "transpose_weight": True}
            of_fp8 |= {"weight": fp8(16, 256).t(), "scale_w": scale(2, 1) if kind == "block" else scale_w}
            found[f"gemm, {kind} scales, {out_dtype}, out, [K, N]"] = of_fp8
    for shape in ((8, 256), (2, 3, 136)):
        found |= {
            f"quantize {quant} {shape}": {"x": tensor(*shape), "quant": quant} for quant in quantize.QUANTS
        }
        found[f"quantize, static {shape}"] = {"x": tensor(*shape), "quant": "tensor", "scale": scale(1)}
    experts = {"x": x, "weight": tensor(4, 32, 64), "offsets": offsets, "activation": "swiglu"}
    found["grouped_gemm"] = experts
    found["grouped_gemm, rows"] = experts | {"rows": torch.zeros(24, dtype=torch.int32)}
    for scale_w in (scale(4), scale(4, 32), scale(4, 32, 1), scale(4, 1, 2)):
        scale_x = column_major(24, 2) if scale_w.shape == (4, 1, 2) else scale(24, 1)
        of_fp8 = {"x": fp8(24, 256), "weight": fp8(4, 32, 256), "offsets": offsets, "activation": "silu"}
        of_fp8 |= {"scale_x": scale_x, "scale_w": scale_w}
        found[f"grouped_gemm, scales {list(scale_w.shape)}"] = of_fp8
    calls = {name: (getattr(flux, re.match(r"\w+", name)[0]), given) for name, given in found.items()}  # type: ignore[index]
    norm = {"total": tensor(4, 16), "residual": tensor(4, 16), "weight": tensor(16), "eps": 1e-5}
    calls["add_norm"] = (add_norm.add_norm_, norm)
    calls["route"] = (moe.route, arguments("moe.route"))
    calls["route of int64"] = (
        moe.route,
        arguments("moe.route") | {"topk_ids": tensor(8, 2, dtype=torch.int64)},
    )
    return calls


@pytest.mark.parametrize("name", without_group())
def test_kernels_are_given_the_same_without_a_group(
    name: str, machine: Machine, workspace: CudaWorkspace, gemms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add_norm, "_fits", lambda *tensors: True)
    call, given = without_group()[name]
    check_repeats(call, given, machine)
    assert len(gemms) + len(workspace.known) == 1


def count(machine: Machine, call: Callable[[], object]) -> tuple[int, int]:
    """How many kernels a call launches from Python, and how many C++ repeats."""
    before = len(machine.dispatched), len(machine.repeated)
    call()
    return len(machine.dispatched) - before[0], len(machine.repeated) - before[1]


PYTHON, CPP = (1, 0), (0, 1)


def test_a_gemm_on_some_of_the_sms_goes_through_python(machine: Machine, gemms: Any) -> None:
    given = (plain.GEMM.number, False, tensor(2, 4, 64), tensor(16, 64), tensor(16), False, None)
    flux.gemm(*given[2:5])
    with plain.leaving_free(4):
        assert gemms.call(*given) is None
        with plain.leaving_free(0):
            assert gemms.call(*given) is not None
    assert gemms.call(*given) is not None


def test_launches_on_some_of_the_sms_go_through_python(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    call = lambda: flux.gemm_rs(x, weight)  # noqa: E731
    assert [count(machine, call), count(machine, call)] == [PYTHON, CPP]
    with workspace.leaving_free(16):
        assert [count(machine, call), count(machine, call)] == [PYTHON, PYTHON]
        assert machine.dispatched[-1][1][7] == 132 - 16
    assert count(machine, call) == CPP and len(workspace.known) == 1


def test_what_grouped_gemm_copies_is_not_repeated(machine: Machine, gemms: Any) -> None:
    x, weight, offsets = fp8(24, 256), fp8(4, 32, 256), tensor(5, dtype=torch.int32)
    rows = torch.zeros(24, dtype=torch.int64)
    flux.grouped_gemm(tensor(24, 64), tensor(4, 32, 64), offsets, rows=rows, activation="swiglu")
    of_one = {"scale_x": scale(24, 1), "scale_w": scale(1)}  # the kernel reads one for each expert
    flux.grouped_gemm(x, weight, offsets, activation="silu", **of_one)
    assert len(machine.dispatched) == 2 and len(gemms) == 0
    scaling = (scale(24, 1), scale(4), torch.bfloat16, "promoted")
    flux.grouped_gemm(x, weight, offsets, activation="silu", scale_x=scaling[0], scale_w=scaling[1])
    for activation, expected in (("silu", True), ("gelu", False), (None, False), ("sil", False), (0, False)):
        call = (grouped_gemm.GROUPED_GEMM.number, False, x, weight, offsets, None, activation, *scaling, None)
        assert (gemms.call(*call) is not None) == expected


def test_layers_of_experts_keep_no_promise_about_batches(machine: Machine, workspace: CudaWorkspace) -> None:
    given = arguments("moe.ag_scatter_gemm")
    moe.ag_scatter_gemm(**given)
    with flux.batch_invariant(), pytest.raises(ValueError, match="batch"):
        moe.ag_scatter_gemm(**given)


X, W = tensor(8, 64), tensor(16, 64)
SCALED = {"x": fp8(8, 256), "weight": fp8(16, 256), "scale_x": scale(8, 1), "scale_w": scale(16)}
# A call of gemm_rs, and changes that make another call of it.
CHANGES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"x": X, "weight": W},
        [
            {"x": tensor(16, 64)},
            {"x": tensor(2, 4, 64)},
            {"x": tensor(8, 128)[:, ::2]},  # other strides
            {"x": X.half(), "weight": W.half()},
            {"x": tensor(8, 32), "weight": tensor(16, 32)},
            {"weight": tensor(24, 64)},
            {"weight": tensor(64, 16), "transpose_weight": True},
            {"bias": tensor(16)},
            {"out": tensor(4, 16)},
        ],
    ),
    (
        SCALED,
        [
            {"scale_x": scale(1)},
            {"scale_x": scale(8)},
            {"scale_w": scale(1)},
            {"scale_w": scale(1, 16)},
            {"scale_x": column_major(8, 2), "scale_w": scale(1, 2)},
            {"x": SCALED["x"].to(torch.float8_e5m2)},
            {"out_dtype": torch.float16},
            {"accumulate": "fast"},
            {"bias": tensor(16)},
            {"out": tensor(4, 16)},
        ],
    ),
]


@pytest.mark.parametrize(("given", "changes"), CHANGES, ids=["16 bits", "fp8"])
def test_another_call_is_not_taken_for_a_known_one(
    given: dict[str, Any], changes: list[dict[str, Any]], machine: Machine, workspace: CudaWorkspace
) -> None:
    def made(**change: Any) -> tuple[int, int]:
        return count(machine, lambda: flux.gemm_rs(**{**given, **change}))

    assert [made(), made()] == [PYTHON, CPP]
    for change in changes:
        assert made(**change) == PYTHON, change
        # Strides that kernels cannot take are copied in every call.
        assert made(**change) == (CPP if change.get("x", X).is_contiguous() else PYTHON), change
        assert made() == CPP
    assert made(out_dtype=torch.bfloat16) == CPP, "the default"
    with flux.batch_invariant():
        assert [made(), made()] == [PYTHON, CPP]


def test_another_eps_is_another_call(machine: Machine, workspace: CudaWorkspace) -> None:
    x, residual, norm_weight = tensor(8, 64), tensor(8, 64), tensor(64)
    for eps in (1e-5, 1e-6):
        for expected in (PYTHON, CPP):
            call = lambda eps=eps: flux.all_reduce(x, residual=residual, norm_weight=norm_weight, eps=eps)  # noqa: E731
            assert count(machine, call) == expected


def test_an_output_that_overlaps_is_refused_when_the_call_is_known(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    whole, weight = tensor(16, 64), tensor(16, 64)
    for _ in range(2):
        flux.all_gather(tensor(8, 64), out=tensor(16, 64))
        flux.gemm_rs(tensor(8, 64), weight, out=tensor(4, 16))
    with pytest.raises(ValueError, match="all_gather: out: expected memory of its own"):
        flux.all_gather(whole[4:12], out=whole)
    with pytest.raises(ValueError, match="gemm_rs: out: expected memory of its own"):
        flux.gemm_rs(tensor(8, 64), weight, out=weight[:1].view(4, 16))
    x = tensor(8, 64)
    for _ in range(2):  # in place is allowed, through Python
        assert flux.all_reduce(x, out=x) is x


class Sub(torch.Tensor):
    pass


def test_what_torch_must_see_is_left_to_torch(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    number = repeat.operator()
    workspace.known.remember((number, x, weight), [((4,), None, 1, None, None)], [], [-1], True)

    def is_known(x: Any = x, weight: Any = weight) -> bool:
        return workspace.known.call(number, x, weight) is not None

    assert is_known()
    assert is_known(torch.nn.Parameter(x, requires_grad=False))
    for other in (
        x.as_subclass(Sub),
        torch.nn.Parameter(x),
        x.to_sparse(),
        torch._neg_view(x),
        x.to("meta"),
        torch.nested.nested_tensor([x]),
        [x],
        None,
        "x",
    ):
        assert not is_known(other), other
    with torch.no_grad():
        assert is_known(torch.nn.Parameter(x))
    with torch.autocast("cpu"):
        assert not is_known()
    with torch.profiler.profile():
        assert not is_known()
    with forward_ad.dual_level():
        assert not is_known()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not is_known()
    seen = []
    torch.vmap(lambda x: seen.append(is_known(x)) or x)(x)
    torch.func.functionalize(lambda x: seen.append(is_known(x)) or x)(x)
    assert seen == [False, False] and is_known()
    for wrong in (
        (number,),
        (number, x),
        (number, x, weight, 1),
        (number + 1, x, weight),
        (2**70, x, weight),
    ):
        assert workspace.known.call(*wrong) is None


def test_a_call_that_cannot_be_repeated_now_goes_through_python(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    call = lambda: flux.gemm_rs(x, weight)  # noqa: E731
    assert [count(machine, call), count(machine, call)] == [PYTHON, CPP]
    machine.is_ready = False  # a capture, or another device
    assert count(machine, call) == PYTHON
    machine.is_ready = True
    workspace._order.event = "event"
    assert workspace.known.call(GEMM_RS.number, False, x, weight, None, False, None) is None
    workspace._order.event = None
    assert count(machine, call) == CPP


def test_streams_that_alternate_wait_for_each_other(
    machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    waits: list[object] = []

    def on(stream: int, owned_by_torch: bool = True) -> tuple[int, int]:
        current = SimpleNamespace(stream_id=1 if owned_by_torch else 2, wait_event=waits.append)
        machine.stream = stream
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        return count(machine, lambda: flux.gemm_rs(x, weight))

    recorded = SimpleNamespace(record_event=lambda: "event")
    monkeypatch.setattr(cuda._cuda, "ExternalStream", lambda stream, device: recorded)
    monkeypatch.setattr(cuda._cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    workspace._order.lasts(STREAM)
    assert [on(STREAM), on(STREAM), on(0)] == [PYTHON, CPP, PYTHON], "a stream that nobody has seen"
    assert [on(STREAM), on(STREAM), on(0), on(STREAM)] == [CPP] * 4
    assert machine.follows == [(0, STREAM), (STREAM, 0), (0, STREAM)] and waits == ["event"]
    # The stream of the last call is being captured, or somebody may destroy one of the streams.
    machine.is_captured = True
    assert [on(STREAM), on(0)] == [CPP, PYTHON]
    machine.is_captured = False
    assert [on(9, owned_by_torch=False), on(9, owned_by_torch=False), on(STREAM)] == [PYTHON] * 3
    assert len(machine.follows) == 3 and len(waits) == 5
    assert [on(0), on(STREAM)] == [CPP, CPP]


def test_calls_of_other_threads_are_waited_for(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    flux.gemm_rs(x, weight)
    given = (GEMM_RS.number, False, x, weight, None, False, None)
    tried: list[Any] = []

    def from_another_thread() -> None:
        thread = threading.Thread(target=lambda: tried.append(workspace.known.call(*given)))
        thread.start()
        thread.join(10)

    machine.during = from_another_thread  # the launch gives the GIL away
    flux.gemm_rs(x, weight)
    machine.during = lambda: None
    assert tried == [None], "the group is busy"
    workspace._order.acquire()
    from_another_thread()
    workspace._order.release()
    assert tried == [None, None], "another thread launches on this device"
    from_another_thread()
    assert tried[-1] is not None


def test_failures(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    flux.gemm_rs(x, weight)
    machine.error = b"no such kernel"
    with pytest.raises(RuntimeError, match="no such kernel"):
        flux.gemm_rs(x, weight)
    machine.error = b""
    with pytest.raises(RuntimeError, match="was broken off by RuntimeError"):
        flux.gemm_rs(x, weight)
    workspace.turn.forget()
    assert count(machine, lambda: flux.gemm_rs(x, weight)) == CPP
    code: Any = workspace._error
    code[:7] = torch.tensor([1, 1, 0, 1, 5, 42, 41])
    for _ in range(2):
        with pytest.raises(flux.CommTimeoutError):
            flux.gemm_rs(x, weight)


def test_a_hook_that_raises_breaks_no_call_off(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64).requires_grad_(), tensor(16, 64).requires_grad_()

    def pack(saved: torch.Tensor) -> torch.Tensor:
        raise error("of a hook")

    for error, launches in ((ValueError, PYTHON), (ValueError, CPP), (KeyboardInterrupt, CPP)):
        before = len(machine.dispatched), len(machine.repeated)
        with pytest.raises(error), torch.autograd.graph.saved_tensors_hooks(pack, pack):
            flux.gemm_rs(x, weight)
        made = len(machine.dispatched) - before[0], len(machine.repeated) - before[1]
        assert made == launches, "the call was made"
        assert workspace.turn.broken_by == (None if error is ValueError else "KeyboardInterrupt")


def test_no_memory_for_the_result(
    machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    flux.gemm_rs(x, weight)

    def full(*size: object, **options: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        flux.gemm_rs(x, weight)
    monkeypatch.undo()
    assert workspace.turn.broken_by is None, "before peers have heard of the call"


def test_copies_are_counted_together(machine: Machine, workspace: CudaWorkspace) -> None:
    x = tensor(1024, 4096)
    epochs = []
    for ready in (True, True, True, False, True):
        machine.is_ready = ready
        before = len(machine.dispatched)
        flux.all_gather(x)
        python = len(machine.dispatched) > before
        epochs.append(machine.dispatched[-1][1][3] if python else machine.repeated[-1][2])
    assert epochs == [1, 2, 3, 4, 5] and len(machine.dispatched) == 2


def test_a_workspace_that_grows_or_fails_forgets(
    machine: Machine, workspace: CudaWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    call = lambda: flux.gemm_rs(x, weight)  # noqa: E731
    regions = iter(((None, workspace._symm_buffer), (None, workspace._symm_buffer)))
    monkeypatch.setattr(workspace, "_make_region", lambda *sizes: next(regions))
    call()
    workspace._allocate(0, 0, 0, "gemm_rs")
    assert [count(machine, call), count(machine, call)] == [PYTHON, CPP], "its address is another one"
    monkeypatch.setattr(workspace, "_meet", lambda *told: [{}])
    monkeypatch.setattr(workspace, "_copy_room", (0, 0))
    workspace.known.copy_epoch = 7
    workspace.reserve_copy(1, 1, "gemm_rs", {})
    assert workspace.known.copy_epoch == 0
    assert [count(machine, call), count(machine, call)] == [PYTHON, CPP]
    monkeypatch.undo()

    class Gone:
        def exchange(self, op: str, facts: object) -> None:
            raise flux.CommTimeoutError(op, 0, 1, 0, timeout_s=1)

    workspace._rendezvous = Gone()  # type: ignore[assignment]
    with pytest.raises(flux.CommTimeoutError):
        workspace._meet("gemm_rs", {})
    assert len(workspace.known) == 0


def test_with_debug_compare_every_call_is_compared(machine: Machine, workspace: CudaWorkspace) -> None:
    workspace.compares_contents = True
    met: list[str] = []
    workspace._meet = lambda op, facts: met.append(op) or [facts]  # type: ignore[method-assign,func-returns-value]
    for number in (1, 2, 3):
        flux.gemm_rs(tensor(8, 64), tensor(16, 64))
        assert len(met) == number


def test_a_group_that_is_released_or_destroyed_is_not_found(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    world = dist.group.WORLD
    assert repeat.of(None) is repeat.of(world) is repeat.of(world.group_name) is workspace.known
    for other in (7, "no such group", [], object()):
        assert repeat.of(other) is None  # type: ignore[arg-type]
    pair = dist.new_group([0, 1])
    made = add_workspace(pair)
    assert repeat.of(pair) is made.known
    dist.destroy_process_group(pair)
    assert repeat.of(pair) is None and pair in repeat.of_groups
    registry._forget_destroyed_groups()
    assert pair not in repeat.of_groups
    workspace.release = lambda: None  # type: ignore[method-assign]
    workspaces.turn(world, DEVICE)
    registry.release(world)
    assert repeat.of(world) is None


def test_launches_are_freed_and_the_number_of_calls_is_limited(
    machine: Machine, workspace: CudaWorkspace
) -> None:
    weight = tensor(16, 64)
    for rows in range(2, 20, 2):
        flux.gemm_rs(tensor(rows, 64), weight)
    assert len(workspace.known) == 9 and machine.dropped == []
    for rows in range(2, 20, 2):
        flux.gemm_rs(tensor(rows, 64), weight)
    workspace.known.clear()
    assert sorted(machine.dropped) == list(range(1, 10))
    number = repeat.operator()
    for i in range(1025):
        workspace.known.remember((number, i), [], [], [1], True)
    assert len(workspace.known) == 1


def test_results_belong_to_the_caller(machine: Machine, workspace: CudaWorkspace) -> None:
    x, weight = tensor(8, 64), tensor(16, 64)
    flux.gemm_rs(x, weight)
    references = sys.getrefcount(x), sys.getrefcount(weight)
    for _ in range(3):
        result = weakref.ref(flux.gemm_rs(x, weight))
        assert result() is None
    assert (sys.getrefcount(x), sys.getrefcount(weight)) == references
    first, second = flux.gemm_rs(x, weight), flux.gemm_rs(x, weight)
    assert first.data_ptr() != second.data_ptr()
