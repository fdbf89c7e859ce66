"""The host side of a CUDA workspace, on what torch.cuda would say: growth, capture, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flux
from flux._native import core
from flux.calls.checks import Product
from flux.comm import cuda, symm_mem
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import Met, expecting_graphs, made
from flux.measured.times import Fact, Tuning
from flux.ops import gemm_rs_with_gather as beside
from flux.ops import workspaces
from flux.ops.ways import ag_gemm, all_gather, gemm_rs
from flux.plan.choose import Plan, PlanInput, plan_gemm_rs, workspace_plan
from flux.plan.gather import plan_ag_gemm, plan_all_gather


class Echo:
    """A rendezvous whose other rank says what this one says, from another GPU."""

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        return [facts, {**facts, "uuid": "B"} if "uuid" in facts else facts]

    def leave(self, op: str, wait: bool) -> None:
        self.left = wait


class Group(SimpleNamespace):
    """A process group, which can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Machine:
    """What the replaced torch.cuda says, and what was asked of it."""

    def __init__(self) -> None:
        self.capturing = False
        self.stream = 7
        self.waits: list[tuple[int, int]] = []
        self.allocated: list[int] = []
        self.foreign: set[int] = set()  # streams that torch does not own
        self.destroyed: set[int] = set()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    state = Machine()

    class Memory:
        def __init__(self, nbytes: int, group: Any, device: torch.device, counts: list[int]) -> None:
            state.allocated.append(nbytes)
            self.peers = [4096, 8192]

    def external_stream(raw: int, device: torch.device) -> Any:
        assert raw not in state.destroyed, "undefined behaviour"
        return SimpleNamespace(record_event=lambda: raw)

    def current_stream(device: torch.device) -> Any:
        # Ids of torch's own streams are odd.
        stream_id = 2 * state.stream + (state.stream not in state.foreign)
        return SimpleNamespace(
            wait_event=lambda event: state.waits.append((getattr(event, "behind", event), state.stream)),
            stream_id=stream_id,
        )

    def event() -> Any:
        made = SimpleNamespace(behind=None)
        made.record = lambda stream: setattr(made, "behind", state.stream)
        return made

    zeros = torch.zeros
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, uuid="A")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", external_stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **rest: zeros(*size, **rest))
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    monkeypatch.setattr(symm_mem, "why_not", lambda group, device: None)
    monkeypatch.setattr(symm_mem, "SymmetricMemory", Memory)
    monkeypatch.setattr(torch.ops.flux, "_prepare", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(cuda, "_orders", {})
    yield state


def make() -> CudaWorkspace:
    group: Any = Group(rank=lambda: 0, size=lambda: 2, group_name="g")
    rendezvous: Any = Echo()
    device = torch.device("cuda", 0)
    facts = CudaWorkspace.meet(group, device, "gemm_rs", rendezvous)
    return CudaWorkspace(Met(group, device, "gemm_rs", rendezvous, core.CallTurn(()), facts))


def enter(workspace: CudaWorkspace, plan: Plan) -> int:
    with workspace.enter(plan) as (address, epoch):
        assert epoch == 0, "the device counts"
        return address


def entered(workspace: CudaWorkspace, plan: Plan) -> tuple[int, int, int]:
    with workspace.enter(plan) as (address, epoch):
        return address, epoch, plan.chunk_rows if epoch else 0


def plan(rows: int) -> Plan:
    return plan_gemm_rs(PlanInput("cuda", 2 * rows, 1024, 512, torch.bfloat16, world_size=2, num_sms=132))


def test_it_grows_when_it_must_and_geometrically(machine: Machine) -> None:
    workspace = make()
    assert (workspace.why_not, workspace.num_sms, machine.allocated) == (None, 132, [])
    small, large, larger = plan(128), plan(4096), plan(4200)
    address = enter(workspace, small)
    assert address == workspace._symm_buffer.address != 0
    assert enter(workspace, small) == address and len(machine.allocated) == 1
    enter(workspace, large)
    assert workspace._symm_buffer.slot_bytes == workspace.slot_bytes >= large.slot_bytes
    assert workspace._symm_buffer.signal_bytes == workspace.signal_bytes >= large.signal_bytes
    enter(workspace, larger)
    assert workspace.slot_bytes >= 3 * large.slot_bytes // 2
    expected = core.HEADER_BYTES + workspace.signal_bytes + 2 * workspace.slot_bytes
    assert machine.allocated[-1] == expected and len(machine.allocated) == 3
    assert workspace.signal_bytes % 4096 == workspace.slot_bytes % 4096 == 0
    enter(workspace, small)
    assert len(machine.allocated) == 3, "never shrinks"


def test_a_capture_cannot_grow_it_but_keeps_what_it_used(machine: Machine) -> None:
    workspace = make()
    machine.capturing = True
    with pytest.raises(RuntimeError, match=r"gemm_rs: group 'g' .* flux.expect_graphs.* flux.reserve"):
        enter(workspace, plan(128))
    machine.capturing = False
    enter(workspace, plan(128))
    enter(workspace, plan(512))
    assert workspace._kept == [], "no graph knows the first buffers"
    machine.capturing = True
    captured = enter(workspace, plan(512))
    memory = workspace._memory
    machine.capturing = False
    assert enter(workspace, plan(8192)) != captured
    assert [kept[0] for kept in workspace._kept] == [memory]


def test_a_stream_that_may_be_destroyed_is_not_recorded_on_later(machine: Machine) -> None:
    """Calls on another stream wait for the last one, but in a graph."""
    workspace = make()
    machine.foreign = {8}
    for stream in (7, 7, 8):
        machine.stream = stream
        enter(workspace, plan(128))
    machine.destroyed = {8}
    for stream in (9, 9, 7):
        machine.stream = stream
        enter(workspace, plan(128))
    assert machine.waits == [(7, 8), (8, 9), (9, 7)]
    # A new stream may have the address of the destroyed one.
    machine.destroyed = set()
    machine.stream = 8
    enter(workspace, plan(128))
    enter(workspace, plan(128))
    assert machine.waits[3:] == [(7, 8), (8, 8)]
    machine.capturing, machine.stream = True, 9
    enter(workspace, plan(128))
    assert len(machine.waits) == 5, "a graph must not wait for work outside of it"


def test_no_copy_engines_where_launches_block(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1024, 4096, dtype=torch.bfloat16)
    assert all_gather.gather_plan(make(), x).copied
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    workspace = make()
    chosen = all_gather.gather_plan(workspace, x)
    assert not chosen.copied and "CUDA_LAUNCH_BLOCKING=1" in chosen.transport
    assert entered(workspace, chosen) == (workspace._symm_buffer.address, 0, 0)
    rows = workspace_plan(workspace, "gemm_rs", 16384, 8192, 8192, torch.bfloat16, False)
    assert rows.by_flux and not rows.copied


def test_no_copy_engines_for_calls_that_graphs_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a call makes the room that the captured one needs; also if the workspace exists already."""
    x = torch.zeros(1024, 4096, dtype=torch.bfloat16)
    workspace = make()
    key: Any = (workspace.group, workspace.device)
    monkeypatch.setitem(made, key, workspace)
    assert all_gather.gather_plan(workspace, x).copied
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(workspaces, "resolve_group", lambda group, op: group)
    try:
        flux.expect_graphs(group=workspace.group)
        chosen = all_gather.gather_plan(workspace, x)
        again = CudaWorkspace.meet(workspace.group, workspace.device, "gemm_rs", Echo())  # type: ignore[arg-type]
    finally:
        expecting_graphs.clear()
    assert not chosen.copied and "CUDA graphs capture" in chosen.transport
    enter(workspace, chosen)
    machine.capturing = True
    assert entered(workspace, chosen) == (workspace._symm_buffer.address, 0, 0)
    machine.capturing = False
    met = Met(workspace.group, workspace.device, "gemm_rs", Echo(), core.CallTurn(()), again)  # type: ignore[arg-type]
    later = CudaWorkspace(met)
    assert not all_gather.gather_plan(later, x).copied


def gathering(rows: int, k: int = 4096, world_size: int = 2) -> Plan:
    m = rows * world_size
    return plan_ag_gemm(PlanInput("cuda", m, 1024, k, torch.bfloat16, False, world_size, None, 132, "pushed"))


def test_large_shards_go_by_copy_engine_but_not_in_graphs(machine: Machine) -> None:
    workspace = make()
    small, large = gathering(1023), gathering(1024)
    assert (small.copied, small.chunk_rows, small.transport) == (False, 0, "pushed")
    assert (large.copied, large.chunk_rows) == (True, 1024)
    assert large.transport == "copy engines; in CUDA graphs pushed"
    address, epoch, chunk_rows = entered(workspace, small)
    assert (address, epoch, chunk_rows) == (workspace._symm_buffer.address, 0, 0)
    copied = [entered(workspace, large) for _ in range(3)]
    assert [call[1:] for call in copied] == [(1, 1024), (2, 1024), (3, 1024)]
    assert len({call[0] for call in copied} - {address}) == 1
    machine.capturing = True
    with pytest.raises(RuntimeError, match="ag_gemm: group 'g' .* flux.expect_graphs.* flux.reserve"):
        entered(workspace, gathering(4096))
    machine.capturing = False
    enter(workspace, replace(large, copied=False))
    machine.capturing = True
    assert entered(workspace, large) == (workspace._symm_buffer.address, 0, 0)


def test_a_list_of_weights_is_one_gather_and_several_launches(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ag_gemm, "_kernel", lambda *args: launched.append(args))
    monkeypatch.setattr(ag_gemm, "_collect", lambda *args: launched.append(args))
    workspace = make()
    x = torch.zeros(1024, 4096, dtype=torch.bfloat16)
    weights = [torch.zeros(n, 4096, dtype=torch.bfloat16) for n in (64, 16)]
    outs = [torch.empty(2048, n, dtype=torch.bfloat16) for n in (64, 16)]
    # A result that the kernels can't write where it lies.
    storage = torch.empty(2048 * 16 + 1, dtype=torch.bfloat16)
    outs[1] = storage[1:].view(2048, 16)
    gathered = torch.empty(2048, 4096, dtype=torch.bfloat16)
    plan = ag_gemm.plan_of(workspace, 2048, (64, 16), 4096, torch.bfloat16)
    plans = plan.parts
    assert (plan.n, [p.n for p in plans], plan.copied) == (80, [64, 16], True)
    for number in (1, 2):
        call = ag_gemm.Call(x.t().contiguous().t(), weights, (None, None), False, True, [*outs, gathered])
        ag_gemm.kernel(workspace, plan, call)
        first, second, collect = launched[-3:]
        address = first[5]
        assert first[1] is weights[0] and first[3] is outs[0] and first[0].is_contiguous()
        assert second[1] is weights[1] and second[3] is not outs[1]
        assert [first[i] for i in (4, 6, 7, 8, 9, 10)] == [False, plans[0].choice, 0, number, 1024, False]
        assert [second[i] for i in (0, 5, 6, 8, 9, 10)] == [
            first[0],
            address,
            plans[1].choice,
            number,
            1024,
            True,
        ]
        assert collect == (first[0], gathered, address, number)
    machine.capturing = True
    workspace.grow(plan.signal_bytes, plan.slot_bytes, "test", {})
    ag_gemm.kernel(workspace, plan, call._replace(x=x, out=outs))
    assert [[launch[i] for i in (5, 8, 9, 10)] for launch in launched[-2:]] == [
        [workspace._address, 0, 0, False],
        [workspace._address, 0, 0, True],
    ]


def test_copies_begin_before_gemm_rs_and_end_after_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, tuple[Any, ...]]] = []
    for module, name in ((beside, "_begin"), (beside, "_finish"), (gemm_rs, "_kernel")):
        record = partial(lambda name, *args: launched.append((name, args)), name)
        monkeypatch.setattr(module, name, record)
    workspace = make()
    x, weight = (torch.zeros(size, 512, dtype=torch.bfloat16) for size in (256, 64))
    rows, few = (torch.zeros(count, 4096, dtype=torch.bfloat16) for count in (1024, 1023))
    plan = beside._planned(workspace, 256, 64, 512, False, rows)
    assert len(plan.parts) == 2
    for number in (1, 2):
        out = torch.empty(128, 64, dtype=torch.bfloat16)
        gathered = torch.empty(2048, 4096, dtype=torch.bfloat16)
        beside._beside(workspace, plan, Product(x, weight, None, False, out), rows, gathered)
        names = [name for name, _ in launched[-3:]]
        begin, kernel, finish = (args for _, args in launched[-3:])
        assert names == ["_begin", "_kernel", "_finish"]
        # Each in the workspace of its kind; of gemm_rs the device counts the calls.
        assert begin[1:] == (finish[2], number, 256) and finish[3:] == (number, 256, True)
        assert (kernel[5], kernel[8], kernel[10]) == (workspace._address, 0, None) and begin[1] != kernel[5]
        assert begin[0].data_ptr() == finish[0].data_ptr() == rows.data_ptr()
        assert gathered.shape == (2048, 4096) and finish[1].data_ptr() == gathered.data_ptr()
    assert not beside._planned(workspace, 256, 64, 512, False, few).parts, "SMs send them"
    assert not beside._planned(workspace, 256, 63, 512, False, rows).parts, "gemm_rs runs unfused"
    # What "auto" of column_linear's save_gathered asks: of 64 columns of all weights, and of 63.
    asked = [beside._backward_beside(workspace, *call) for call in ((rows, 64), (few, 64), (rows, 63))]
    assert asked == [True, False, False]
    machine.capturing = True
    assert not beside._planned(workspace, 256, 64, 512, False, rows).parts[1].copied_now(), (
        "a graph holds no copies"
    )
    assert not beside._backward_beside(workspace, rows, 64)


def test_rows_go_beside_the_gemm_also_where_torch_gathers_sooner_alone(machine: Machine) -> None:
    workspace = make()
    rows = torch.zeros(1024, 4096, dtype=torch.bfloat16)
    workspace.tuning = Tuning(
        (Fact("all_gather", 2, 2, 2 * rows.numel(), 0, 0, {"kernel": 99.0, "torch": 50.0}),)
    )
    assert all_gather.gather_plan(workspace, rows).way == "torch"
    plans = beside._planned(workspace, 256, 64, 512, False, rows).parts
    assert len(plans) == 2 and plans[1].copied_now(), "a gather that a GEMM hides takes no time"


def test_one_weight_that_cannot_run_fused_makes_all_run_unfused(machine: Machine) -> None:
    plan = ag_gemm.plan_of(make(), 256, (64, 9, 8), 64, torch.bfloat16)
    assert not plan.by_flux and plan.n == 81 and "n = 9" in plan.reason


def test_what_a_gather_needs() -> None:
    plan = gathering(300, k=1000, world_size=4)
    assert plan.slot_bytes == -(-3 * 300 * 1000 * 2 // 4096) * 4096
    assert plan.signal_bytes == 4096
    bytes_moved = plan_all_gather(PlanInput("cuda", 4 * 300, 0, 500, torch.float32, world_size=4))
    assert (bytes_moved.by_flux, bytes_moved.slot_bytes) == (True, plan.slot_bytes)
    assert "weight" not in str(bytes_moved) and "x [300, 500], float32" in str(bytes_moved)
    assert "x [300, 1000], weight [1024, 1000]" in str(plan)
    most = core.MAX_PUSH_BLOCKS * 128
    assert gathering(most, k=8).by_flux
    too_many = gathering(most + 1, k=8)
    assert not too_many.by_flux and f"{most + 1} rows of one rank" in too_many.reason


def test_a_kernels_timeout_is_raised_by_every_later_call(machine: Machine) -> None:
    workspace = make()
    enter(workspace, plan(128))
    workspace.check()
    # code, op, rank, peer, tile, expected, seen
    workspace._error[:7] = torch.tensor([1, 1, 0, 1, 5, 42, 41])
    for attempt in (lambda: enter(workspace, plan(128)), lambda: workspace.check()):
        with pytest.raises(flux.CommTimeoutError) as caught:
            attempt()
        error = caught.value
        told = (error.op, error.rank, error.peer, error.tile, error.epoch, error.seen)
        assert told == ("gemm_rs", 0, 1, 5, 42, 41)
    workspace.release()
    assert workspace._rendezvous.left is False, "after a failure nobody is waited for"  # type: ignore[attr-defined]


def test_a_failure_that_is_no_timeout_says_what_it_is(machine: Machine) -> None:
    workspace = make()
    workspace._error[:7] = torch.tensor([2, 1, 0, 1, 5, 42, 42])
    with pytest.raises(flux.CommTimeoutError, match="Rank 1 has given up waiting"):
        workspace.check()
    workspace = make()
    workspace._error[:7] = torch.tensor([3, 0, 0, 0, 0, 42, 42])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="two launches used the workspace of .* at the same time"):
            workspace.check()


def test_ranks_on_one_gpu_run_unfused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "exchange", lambda self, op, facts: [facts, facts])
    assert make().why_not == "rank 0: ranks 0 and 1 share one GPU"
