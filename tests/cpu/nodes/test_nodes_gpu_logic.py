"""What groups of several nodes do on GPUs, on stand-ins: NCCL's calls by gloo, events and workspaces by
objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux
from flux._native import core
from flux.calls import checks
from flux.comm.nodes.rail import NcclRail, NcclTransfer, Rail, shifts
from flux.comm.nodes.watch import Watch
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.rendezvous import Rendezvous
from flux.comm.topology import Links, Topology
from flux.comm.workspace import Met, Workspace
from flux.measured import files
from flux.measured.times import NO_FACTS
from flux.ops import gemm
from flux.ops.ways import two_level
from flux.plan.choose import Plan
from flux.plan.network_model import TwoLevel
from flux.testing import spawn

_c10d: Any = dist.distributed_c10d


def through_a_backend(rank: int, world_size: int) -> list[bool]:
    """The calls that NcclRail makes, by a backend that has the same ones."""
    kept = dist.PrefixStore("rail", _c10d._get_default_store())
    started: list[NcclTransfer] = []
    rail = NcclRail(dist.ProcessGroupGloo(kept, rank, world_size), world_size, rank)  # type: ignore[attr-defined]
    rail.on_start = started.append
    told = []
    for step, (to, source) in enumerate(shifts(world_size, rank)):
        send = torch.full((3, 5), float(10 * rank + step), dtype=torch.bfloat16)
        receive = torch.zeros(3, 5, dtype=torch.bfloat16)
        rail.swap(send, to, receive, source).wait()
        told.append(bool((receive == 10 * source + step).all()))
    told.append(rail.bytes_sent == (world_size - 1) * 30)
    everybody = torch.zeros(world_size, 4)
    rail.gather(torch.full((4,), float(rank)), everybody).wait()
    told.append(everybody[:, 0].tolist() == list(range(world_size)))
    send = torch.arange(2.0 * world_size).view(world_size, 2) + 100 * rank
    receive = torch.zeros(world_size, 2)
    rail.alltoall(send, receive).wait()
    told.append(receive[:, 0].tolist() == [100 * source + 2 * rank for source in range(world_size)])
    told.append(rail.bytes_sent == (world_size - 1) * (30 + 16 + 8))
    before = len(started)
    rail.gather(send[:0], send[:0]).wait()  # nothing to send
    return [*told, len(started) == before == world_size + 1, all(each.has_finished() for each in started)]


def test_calls_of_nccl_rails() -> None:
    for told in spawn(through_a_backend, 3):
        assert all(told), told


class Transfer:
    """A transfer in any state."""

    started = finished = poisoned = False

    def has_started(self) -> bool:
        return self.started

    def has_finished(self) -> bool:
        return self.finished

    def poison(self) -> None:
        self.poisoned = True


class Watched:
    """A watch whose thread does not run, and what it did."""

    def __init__(self, *transfers: Transfer) -> None:
        self.failed_rank: int | None = None
        self.gave_up: list[str] = []
        self.asked = 0
        self.watch = Watch(10.0, self._someone_failed, self.gave_up.append)
        self.watch._thread = SimpleNamespace(join=lambda: None)  # type: ignore[assignment]
        for transfer in transfers:
            self.watch.started(transfer)

    def _someone_failed(self) -> int | None:
        self.asked += 1
        return self.failed_rank


def test_a_transfer_is_late_only_once_the_stream_has_come_to_it() -> None:
    watched = Watched(late := Transfer(), next_one := Transfer())
    assert not watched.watch.look(1000.0)  # the GPU computes: kernels have deadlines of their own
    late.started = True
    assert not watched.watch.look(2000.0) and not watched.watch.look(2009.0)
    assert watched.gave_up == []
    assert watched.watch.look(2010.0)
    assert watched.gave_up == ["exchange number 1"]
    assert late.poisoned and next_one.poisoned  # both were to be received


def test_each_transfer_has_a_deadline_of_its_own() -> None:
    watched = Watched(first := Transfer(), second := Transfer())
    first.started = True
    assert not watched.watch.look(0.0) and not watched.watch.look(9.0)
    first.finished = second.started = True
    assert not watched.watch.look(9.5) and not watched.watch.look(19.0)
    assert watched.watch.look(19.5) and watched.gave_up == ["exchange number 2"]
    assert not first.poisoned and second.poisoned


def test_a_rank_that_gave_up_ends_what_waits_for_it() -> None:
    watched = Watched(waiting := Transfer())
    watched.failed_rank = 3
    assert watched.watch.look(0.0)
    assert watched.gave_up == ["exchange number 1"] and waiting.poisoned


def test_nothing_is_asked_and_kept_without_transfers() -> None:
    watched = Watched(done := Transfer())
    done.finished = True
    assert not watched.watch.look(0.0) and watched.asked == 0
    for _ in range(100):
        watched.watch.started(done)
    assert len(watched.watch._transfers) == 1  # each drops those before it


class Recorder(Rail):
    """A rail that records, in the order of launches and transfers, and brings what is known."""

    engine, sms = "NCCL", 4

    def __init__(self, nodes: int, node: int, log: list[str]) -> None:
        super().__init__(nodes, node)
        self._log = log

    def swap(self, send: torch.Tensor, to: int, receive: torch.Tensor, source: int) -> Any:
        self._log.append(f"swap {to} {source}")
        receive.fill_(float(source))
        return SimpleNamespace(wait=lambda: self._log.append(f"wait {source}"))

    def close(self) -> None:
        self._log.append("close")


class Alone(Workspace):
    """A workspace of a node that can be made without peers, on a GPU of 132 SMs."""

    handshake = _allocate = _unreachable = calling = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.num_sms, self.plans, self._plans_left_free = 132, {}, {}


def stand_in(schedule: str, parts: int, nodes: int, log: list[str]) -> tuple[NodesWorkspace, Plan]:
    workspace: Any = NodesWorkspace.__new__(NodesWorkspace)
    workspace.topology, workspace.node, workspace.local = Topology(nodes, 2), 1, 0
    workspace.rail, workspace.inner = Recorder(nodes, 1, log), Alone()
    workspace.rank = 2
    levels = TwoLevel(workspace.topology, "NCCL", schedule, parts, 4, 0, 1.0, 2.0, SimpleNamespace())  # type: ignore[arg-type]
    plan = Plan(
        "gemm_rs", 8, 4, 4, torch.bfloat16, 2 * nodes, False, True, "", "", way="two-level", levels=levels
    )
    return workspace, plan


def test_launches_and_transfers_of_a_scatter() -> None:
    """Other nodes' rows first. The first launch has all SMs; while a transfer is on its way, launches leave
    some.
    """
    log: list[str] = []
    workspace, plan = stand_in("blocks", 1, 3, log)
    assert workspace.inner is not None
    inner = workspace.inner

    def inside(some: Callable[[torch.Tensor], torch.Tensor], node_sum: torch.Tensor) -> None:
        log.append(f"launch {int(some(x)[0, 0])} on {inner.num_sms} SMs")
        node_sum.fill_(100.0)

    x = torch.arange(3).repeat_interleave(4)[:, None].float()  # the node that owns each row
    out = torch.empty(2, 4)
    two_level.scatter(workspace, plan, len(x), inside, out, [torch.full((4,), 0.5)])
    sent = ["launch 2 on 132 SMs", "swap 2 0", "launch 0 on 128 SMs", "swap 0 2"]
    assert log == [*sent, "launch 1 on 128 SMs", "wait 0", "wait 2"]
    assert (out == 0 + 100.0 + 2 + 0.5).all() and inner.num_sms == 132


def test_launches_and_transfers_of_a_gather() -> None:
    """All transfers first, then own rows; the last launch has all SMs again."""
    log: list[str] = []
    workspace, plan = stand_in("blocks", 1, 3, log)
    assert workspace.inner is not None
    inner = workspace.inner

    def inside(rows: torch.Tensor, outs: Any) -> None:
        log.append(f"launch {int(rows[0, 0])} on {inner.num_sms} SMs")
        outs[0].fill_(rows[0, 0])

    out = torch.empty(12, 4)
    two_level.gather(workspace, plan, torch.full((2, 4), 1.0), inside, [out])
    arrived = ["wait 0", "launch 0 on 128 SMs", "wait 2", "launch 2 on 132 SMs"]
    assert log == ["swap 2 0", "swap 0 2", "launch 1 on 128 SMs", *arrived]
    assert out[:, 0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


def test_rows_of_a_part_are_those_of_every_rank_of_the_node() -> None:
    log: list[str] = []
    workspace, plan = stand_in("blocks", 2, 2, log)
    seen: list[list[float]] = []

    def inside(some: Callable[[torch.Tensor], torch.Tensor], node_sum: torch.Tensor) -> None:
        seen.append(some(torch.arange(16.0)[:, None])[:, 0].tolist())
        assert some(torch.arange(16.0)).tolist() == seen[-1]  # such as scales of rows
        node_sum.zero_()

    two_level.scatter(workspace, plan, 16, inside, torch.empty(4, 1))
    # Node 0 has rows 0 to 7: its first rank 0 to 3, its second 4 to 7.
    assert seen == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]


def test_launches_that_leave_sms_free_have_plans_of_their_own() -> None:
    workspace = Alone()
    workspace.plans["a problem"] = "on all SMs"
    with workspace.leaving_free(4):
        assert (workspace.num_sms, workspace.left_free) == (128, 4) and workspace.plans == {}
        workspace.plans["a problem"] = "on 128"
    assert (workspace.num_sms, workspace.left_free) == (132, 0)
    assert workspace.plans == {"a problem": "on all SMs"}
    with workspace.leaving_free(4):
        assert workspace.plans == {"a problem": "on 128"}


def test_a_plain_gemm_of_a_node_of_one_rank_leaves_sms_free(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    plan = Plan("gemm", 8, 8, 8, torch.bfloat16, 1, False, True, "", "", choice=3)
    monkeypatch.setattr(gemm, "_kernel", lambda *arguments, **_: launched.append(arguments[-1]))
    monkeypatch.setattr(gemm.cuda, "num_sms", lambda device: 132)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(gemm, "plan_without_workspace", lambda *_: plan)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    call = checks.Product(x, x, None, False, torch.empty_like(x))
    gemm.launch(call)
    with gemm.leaving_free(4):
        gemm.launch(call)
    assert launched == [0, 128]


@pytest.mark.parametrize("extra", [(), (1,), (1, 3), (3,)])
def test_the_kernel_that_adds_nodes_gets_the_right_rows(
    extra: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its positions and weights, by the reference of that kernel."""
    from flux.moe import reference

    def combine(
        rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert positions.dtype == torch.int32 and (weights == 1).all()
        out.copy_(reference.weighted_sum(rows, positions, weights))

    monkeypatch.setattr(two_level, "_combine", combine)
    out = torch.empty(3, 8, dtype=torch.bfloat16)
    addends = [torch.full((8,), 7.0) if count == 1 else 0.5 * torch.ones(3, 8) for count in extra]
    sums = two_level.Sums(4, out, [addend.to(out.dtype) for addend in addends])
    for node in range(4):
        sums.parts[node] = torch.arange(3.0)[:, None] + 10 * node
    sums._by_kernel()
    added = sum(7.0 if count == 1 else 0.5 for count in extra)
    want = 4 * torch.arange(3.0)[:, None] + 60 + added
    assert torch.equal(out, want.expand(3, 8).bfloat16())


def on_gpus(opened: Callable[[], object]) -> Any:
    """The workspace of a group on 2 nodes of 8 GPUs. opened: what happens when peers hear of a call."""
    workspace: Any = NodesWorkspace.__new__(NodesWorkspace)
    workspace.failure, workspace.rail, workspace._calls = None, object(), 0
    workspace.turn = SimpleNamespace(broken_by=None, open=opened)
    workspace.device, workspace.topology = torch.device("cuda", 0), Topology(2, 8)
    workspace._largest, workspace.compares_contents = {}, False
    return workspace


def test_calls_are_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = on_gpus(lambda: pytest.fail("peers have heard of the call"))
    workspace.group = SimpleNamespace(group_name="tp")
    monkeypatch.setattr("flux.comm.nodes.workspace.groups.name_of", lambda group: "tp")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call: Any = SimpleNamespace(op="gemm_rs")
    refused = pytest.raises(RuntimeError, match="group 'tp' has 2 nodes x 8, and a CUDA graph cannot capture")
    with refused, workspace.calling(call, {}):
        pytest.fail("was launched")


def compared(workspace: Any, *rows: int) -> list[int]:
    """Which calls a workspace of GPUs compares over its store, of calls with these rows."""
    found: list[int] = []
    workspace._meet = lambda op, facts: found.append(facts["m"]) or [facts]
    for m in rows:
        call = Plan("gemm_rs", m, 8, 8, torch.bfloat16, 4, False, True, "", "")
        with workspace.calling(call, {}):
            pass
    return found


def test_gpus_compare_calls_that_may_grow_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = on_gpus(lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert compared(workspace, 64, 64, 32, 128, 64) == [64, 128]
    workspace.compares_contents = True  # FLUX_DEBUG=compare
    assert compared(workspace, 64, 32) == [64, 32]


class OnCpu:
    """A workspace of GPUs, whose tensors are on the CPU and whose NCCL is gloo."""

    def __init__(self, rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.aborted: list[bool] = []
        self.poisoned: list[NcclTransfer] = []
        backends: list[Any] = []

        def make_backend(store: Any, nodes: int, node: int, timeout_s: float) -> Any:
            backends.append(dist.ProcessGroupGloo(store, node, nodes))  # type: ignore[attr-defined]
            return backends[-1]

        NcclRail.make_backend = staticmethod(make_backend)  # type: ignore[method-assign]
        NcclRail.close = lambda rail: self.aborted.append(True)  # type: ignore[method-assign]
        NcclTransfer.poison = lambda transfer: self.poisoned.append(transfer)  # type: ignore[method-assign]
        NodesWorkspace._warm_up = lambda workspace: None  # type: ignore[method-assign]
        torch.cuda.is_current_stream_capturing = lambda: False
        facts = {
            **{"why_not": None, "backend": "cuda", "num_sms": 132, "compare": False, "nodes": "auto"},
            **{"tuning": files.to_tell(NO_FACTS), "links": vars(Links())},
        }
        everybody = [{**facts, "node": str(node)} for node in range(world_size)]
        rendezvous, turn = Rendezvous.of(group, "cuda"), core.CallTurn(())
        rendezvous.begin("gemm_rs")
        files.local = lambda device: NO_FACTS
        device = torch.device("cuda", 0)
        self.workspace = NodesWorkspace(Met(group, device, "gemm_rs", rendezvous, turn, everybody))
        self.workspace.join("gemm_rs", no_workspace, lambda group: None)
        self.call = Plan("gemm_rs", 8, 8, 8, torch.bfloat16, world_size, False, True, "", "")


def no_workspace(*_: Any) -> Any:
    raise AssertionError("nodes of one rank have no workspace")


def late_on_a_gpu(rank: int, world_size: int) -> list[str]:
    """A deadline through rail, watch, board and workspace. Rank 1 does not come to the second exchange."""
    gpu = OnCpu(rank, world_size)
    workspace = gpu.workspace
    assert workspace.engine == "NCCL" and workspace.why_not is None
    other, receive = 1 - rank, torch.zeros(4)
    with workspace.calling(gpu.call, {}):
        workspace.wait(
            workspace.rail.swap(torch.full((4,), 1.0 + rank), other, receive, other), "exchange 1 of 1"
        )
    assert (receive == 1 + other).all()
    workspace.check()
    dist.barrier()
    if rank == 0:
        with workspace.calling(gpu.call, {}):
            workspace.rail.swap(torch.ones(4), other, receive, other)  # the host does not wait
        late = time.monotonic()
        while workspace.failure is None and time.monotonic() - late < 20:
            time.sleep(0.05)
        assert gpu.poisoned and gpu.aborted
    dist.barrier()
    told = []
    for raises in (workspace.check, lambda: workspace.calling(gpu.call, {}).__enter__()):
        try:
            raises()
            told.append("no error")
        except flux.CommTimeoutError as error:
            told.append(str(error))
    return told


def test_a_late_exchange_on_a_gpu_fails_on_all_ranks() -> None:
    for rank, told in enumerate(spawn(late_on_a_gpu, 2, env={"FLUX_TIMEOUT_S": "1"})):
        assert len(set(told)) == 1 and f"rank {rank} waited" in told[0], told
        # Rank 0 saw nothing of rank 1; rank 1 learns that rank 0 has given up.
        assert f"Behind is node {1 - rank}, rank {1 - rank}, in " in told[0]
