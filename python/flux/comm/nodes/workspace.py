"""The workspace of a group with several nodes: a group and workspace of the own node, and the own rail."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from flux.comm import group as groups
from flux.comm import topology
from flux.comm.nodes.rail import GlooRail, NcclRail, Rail, RailError, Transfer
from flux.comm.nodes.watch import Watch
from flux.comm.topology import Links, Topology
from flux.comm.workspace import (
    MAX_WORLD_SIZE,
    Call,
    Disagreement,
    Met,
    Same,
    Workspace,
    agreed,
    call_facts,
    compare_calls,
    unfit,
)
from flux.errors import CommTimeoutError
from flux.measured.times import NO_FACTS

_dist: Any = torch.distributed  # parts of it are not typed
# How long a rank that gives up waits for its peers to say whom they wait for.
_GRACE_S = 5.0
# What a node tells the others of its calls: a message of fixed size, because sizes are what ranks may
# disagree on.
_TOLD_BYTES = 8192


@dataclass(frozen=True)
class Place:
    """Where a rank is in a call: what it waits for."""

    waits_for: int
    where: str


class NodesWorkspace(Workspace):
    """Has no memory of its own. Calls run on the workspaces of nodes, and exchange on rails.

    Attributes:
        node_group: the ranks of this node. Of one rank, it has no workspace.
        inner: the workspace of the node; None for nodes of one rank.
        rail: the ranks with this one's number in their nodes.
        node, local: this node, and this rank's number in it.
        links: rates by which plans choose.
        way: "auto", "two-level" or "flat" (FLUX_NODES).
    """

    carrier = "nodes"
    topology: Topology

    def __init__(self, met: Met) -> None:
        group, _, op, _, _, facts = met
        found, _ = topology.of_nodes([fact["node"] for fact in facts])
        assert found is not None
        self.topology = found
        self.node, self.local = found.node_of(group.rank()), found.local_of(group.rank())
        self.links, self.way = _agreed_links(op, facts), agreed(op, facts, "nodes", "FLUX_NODES")
        self.rail: Any = None  # a Rail, while the group can run fused
        self.node_group: Any = None
        self.inner: Workspace | None = None
        self._release_inner: Callable[[ProcessGroup], None] = lambda _: None
        self._watch: Watch | None = None
        self._place = Place(-1, "")
        self._calls = 0
        self._largest: dict[str, tuple[int, ...]] = {}  # m, n and k that calls of each operator have had
        super().__init__(met)

    @classmethod
    def handshake(cls, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
        raise NotImplementedError  # a rank does not know yet that there are several nodes

    @property
    def transport(self) -> str:  # type: ignore[override]
        inside = self.inner.transport if self.inner is not None else "none (one rank)"
        return f"inside a node {inside}; between nodes {self.engine}"

    @property
    def engine(self) -> str:
        """Of the exchange between nodes, for users."""
        return "none" if self.rail is None else str(self.rail.engine)

    def _verdict(self, op: str, facts: list[dict[str, Any]]) -> str | None:
        if self.topology.ranks > MAX_WORLD_SIZE:
            return f"a node has {self.topology.ranks} ranks, fused operators serve at most {MAX_WORLD_SIZE}"
        return unfit(facts, "backend")

    def join(
        self,
        op: str,
        get: Callable[[ProcessGroup, torch.device, str], Workspace],
        release: Callable[[ProcessGroup], None],
    ) -> None:
        """Collective: makes the groups of node and rail, in this order on all ranks, and warms the rail up.

        Args:
            get, release: the workspace of a group and a device, and the end of a group's workspaces.
        """
        if self.why_not is not None:
            return
        token = hashlib.sha256(self._rendezvous.place.encode()).hexdigest()[:16]
        name = f"nodes-{token}-{self.node}"
        self.node_group = groups.part_of(self.group, self.topology.node_ranks(self.node), name)
        self._release_inner = release
        why_not = None
        with self.naming(op):
            self._waits_for(self.rank, "the first call inside the node")
            if self.topology.ranks > 1:
                self.inner = get(self.node_group, self.device, op)
                self.inner.compares_contents = self.compares_contents
                self.inner.tuning = (
                    NO_FACTS  # a part of a group has no backend by which torch could run a call
                )
                why_not = self.inner.why_not
        told = self._tell(op, {"why_not": why_not})
        self.why_not = _first("node", told, self.topology.node_of)
        if self.why_not is None:
            self._join_rail(op, token)
        if self.why_not is not None:
            self._say_why_not()

    def _join_rail(self, op: str, token: str) -> None:
        why_not = None
        try:
            self.rail = self._make_rail(f"flux/rail-{token}-{self.local}")
            if self.device.type == "cuda":
                self._watch = Watch(self.timeout_s, self._someone_failed, self._give_up)
                self.rail.on_start = self._watch.started
            with self.naming(op):
                self._warm_up()
        except CommTimeoutError:
            raise
        except RuntimeError as error:
            why_not = f"no rail: {str(error).strip().splitlines()[0]}"
        told = self._tell(op, {"why_not": why_not})
        self.why_not = _first("rank", told, lambda rank: rank)
        if self.why_not is not None and self.rail is not None:
            self.rail.close()
            self.rail = None

    def _make_rail(self, prefix: str) -> Rail:
        nodes = self.topology.nodes
        kept: Any = _dist.PrefixStore(prefix, groups.store_of(self.group))
        if self.device.type == "cuda":
            backend = NcclRail.make_backend(kept, nodes, self.node, self.timeout_s)
            return NcclRail(backend, nodes, self.node)
        return GlooRail(kept, nodes, self.node, self.timeout_s)

    def _warm_up(self) -> None:
        """A first exchange, in which engines connect."""
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        everybody = word.new_empty(self.topology.nodes, 1)
        self.wait(self.rail.gather(word, everybody), "the first exchange")
        if word.is_cuda:
            torch.cuda.synchronize(self.device)
        self.rail.bytes_sent = 0

    def _unreachable(self, facts: list[dict[str, Any]]) -> str | None:
        return None

    def _allocate(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str) -> None:
        raise NotImplementedError  # there is no memory of its own

    @contextmanager
    def calling(self, call: Call, same: Same) -> Iterator[int]:
        """On CPUs compares every call of all ranks of all nodes; on GPUs with FLUX_DEBUG=compare, and where
        the node's workspace has to grow. Names who is behind if the call does not end in time.
        """
        self.raise_if_failed()
        if self.rail is None:
            yield 0
            return
        self._refuse_capture(call.op)
        self._calls += 1
        self.turn.open()
        with self.naming(call.op):
            facts = call_facts(call, same, self.compares_contents)
            if self.device.type == "cpu":
                self._compare_on_rails(call, same, facts)
            elif self.compares_contents or self._is_larger(call):
                compare_calls(call.op, self._meet(call.op, facts))
            yield self._calls

    def _is_larger(self, call: Call) -> bool:
        """Whether a call is the largest of its operator so far, so that the node's workspace may grow."""
        sizes = (call.m, call.n, call.k)
        largest = self._largest.get(call.op, (-1, -1, -1))
        self._largest[call.op] = tuple(map(max, sizes, largest))
        return self._largest[call.op] != largest

    def _refuse_capture(self, op: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: group {groups.name_of(self.group)!r} has {self.topology}, and a CUDA graph cannot "
                "capture its calls: the host keeps the deadlines of exchanges between nodes, and does not "
                "see those of a replay. Capture calls on groups of one node only."
            )

    def grow(
        self, signal_bytes: int, slot_bytes: int, op: str, facts: dict[str, Any], exchange_bytes: int = 0
    ) -> None:
        raise NotImplementedError  # the node's workspace grows

    def _compare_on_rails(self, call: Call, same: Same, facts: dict[str, Any]) -> None:
        """Every rank learns the calls of all ranks, so that all raise alike: those of the node in its
        workspace, those of others from the rail.
        """
        calls: Sequence[dict[str, Any]] = [facts] * self.topology.ranks
        if self.inner is not None:
            self._waits_for(self.rank, f"the beginning of the call inside node {self.node}")
            try:
                with self.inner.calling(call, same):
                    pass
            except Disagreement as error:
                calls = error.calls
        told = _message(call.op, calls)
        everybody, sent = told.new_empty(self.topology.nodes, _TOLD_BYTES), self.rail.bytes_sent
        self.wait(self.rail.gather(told, everybody), "the comparison of calls")
        self.rail.bytes_sent = sent  # those of results are counted
        if (everybody == told).all() and len(calls) == calls.count(calls[0]):
            return
        compare_calls(call.op, [one for message in everybody for one in _read(message, self.topology.ranks)])

    def wait(self, transfer: Transfer, where: str) -> None:
        """transfer.wait(), and tells where the call is, should it not end in time."""
        self._place = Place(-1, where)
        transfer.wait()

    def inside(self, where: str) -> None:
        """Tells that the call goes on inside the node."""
        self._waits_for(self.rank, where)

    def _waits_for(self, rank: int, where: str) -> None:
        self._place = Place(rank, where)

    @contextmanager
    def naming(self, op: str) -> Iterator[None]:
        """Turns timeouts inside the node and on the rail into one of the group, which names who is behind."""
        try:
            yield
        except RailError as error:
            peer = self.topology.rank_of(error.node, self.local)
            raise self._failed(op, peer, self._place.where, str(error)) from error
        except CommTimeoutError as error:
            if error is self.failure:  # a rendezvous of the whole group
                raise
            peer = self.topology.rank_of(self.node, error.peer)
            raise self._failed(op, peer, self._place.where, error.detail) from error

    def _failed(self, op: str, peer: int, where: str, why: str, waits: bool = True) -> CommTimeoutError:
        """Gives up: tells the other ranks, closes the rail, and finds out who is behind. waits: for `peer`,
        and not only because that has given up.
        """
        if isinstance(self.failure, CommTimeoutError):
            return self.failure
        board = _Board(groups.store_of(self.group), self._rendezvous.place)
        if waits:
            board.write(self.rank, Place(peer, where))
        if self.rail is not None:
            self.rail.close()
        behind, seen = board.follow(self.rank, peer, where, min(_GRACE_S, self.timeout_s))
        node = self.topology.node_of(behind)
        detail = f"Behind is node {node}, rank {behind}, in {seen}."
        if behind != peer and waits:
            detail += f" Rank {self.rank} itself waited for rank {peer} in {where}."
        if why:
            detail += f" ({why})"
        error = CommTimeoutError(
            op, self.rank, behind, max(self._calls, 1), timeout_s=self.timeout_s, detail=detail
        )
        self.failure = error
        if self.inner is not None:
            self.inner.failure = self.inner.failure or error
        return error

    def _someone_failed(self) -> int | None:
        """A rank that has given up, or None. Does not raise."""
        return _Board(groups.store_of(self.group), self._rendezvous.place).first()

    def _give_up(self, where: str) -> None:
        """What the watch of a GPU calls: a transfer is late, or another rank has given up."""
        peer = self._someone_failed()
        if peer is not None:
            self._failed("check", peer, where, "", waits=False)
            return
        # The transfer is with all nodes of the rail: the next one stands for them.
        peer = self.topology.rank_of((self.node + 1) % self.topology.nodes, self.local)
        self._failed("check", peer, where, "")

    def check(self) -> None:
        """Raises the failure of the workspace, if any: its own, its node's, or that another rank has given
        up.
        """
        self.raise_if_failed()
        if self.rail is None:
            return
        with self.naming("check"):
            self.inside("a call inside the node")
            if self.inner is not None:
                self.inner.check()
        gave_up = self._someone_failed()
        if gave_up is not None:
            raise self._failed("check", gave_up, "a call", "", waits=False)

    def release(self) -> None:
        failed = self.failure is not None or self.turn.broken_by is not None
        try:
            self._rendezvous.leave("release", wait=not failed)
        finally:
            if self._watch is not None:
                self._watch.stop()
            if self.rail is not None:
                self.rail.close()
            if self.node_group is not None:
                if failed and self.inner is not None:  # as the group's: without waiting for peers
                    self.inner.failure = self.inner.failure or RuntimeError("the group has failed")
                self._release_inner(self.node_group)
                groups.forget_part(self.node_group)


class _Board:
    """What ranks that give up tell each other, in the store of the group: whom they wait for, and where."""

    def __init__(self, store: Any, place: str) -> None:
        self._store = store
        self._place = f"{place}/gave-up"

    def write(self, rank: int, place: Place) -> None:
        try:
            told = json.dumps({"waits_for": place.waits_for, "where": place.where})
            self._store.set(f"{self._place}/{rank}", told)
            self._store.set(self._place, str(rank))
        except RuntimeError:
            pass  # the process that holds the store may be the one that has died

    def first(self) -> int | None:
        try:
            return int(self._store.get(self._place)) if self._store.check([self._place]) else None
        except (RuntimeError, ValueError):
            return None

    def follow(self, rank: int, peer: int, where: str, grace_s: float) -> tuple[int, str]:
        """The rank at the end of the chain of ranks that wait for each other, and where it is waited for. A
        chain that comes back to `rank` ends at `peer`, which has given up before this rank came.
        """
        behind, seen, visited = peer, where, {rank}
        deadline = time.monotonic() + grace_s
        while behind not in visited:
            visited.add(behind)
            told = self._read(behind, deadline)
            if told is None:
                return behind, seen
            behind, seen = told.waits_for, told.where
        return peer, f"{where}, which it has given up"

    def _read(self, rank: int, deadline: float) -> Place | None:
        key = f"{self._place}/{rank}"
        try:
            while True:
                if self._store.check([key]):
                    told = json.loads(self._store.get(key))
                    return Place(int(told["waits_for"]), str(told["where"])[:200])
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
        except (RuntimeError, ValueError, KeyError, TypeError):
            return None


def _agreed_links(op: str, facts: Sequence[dict[str, Any]]) -> Links:
    told = [topology.links_of(fact["links"], f"{op}: rank {rank}") for rank, fact in enumerate(facts)]
    agreed(op, [{"links": links} for links in told], "links", "FLUX_LINKS")
    return told[0]


def _first(what: str, told: Sequence[dict[str, Any]], number: Callable[[int], int]) -> str | None:
    return next((f"{what} {number(r)}: {f['why_not']}" for r, f in enumerate(told) if f["why_not"]), None)


def _message(op: str, calls: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The calls of a node's ranks as bytes [_TOLD_BYTES]; a digest, if they are too many."""
    told = calls[:1] if len(calls) == calls.count(calls[0]) else calls
    data = json.dumps(list(told)).encode()
    if len(data) > _TOLD_BYTES:
        digest = hashlib.sha256(data).hexdigest()
        data = json.dumps([{"op": op, "digest of the node's calls": digest}]).encode()
    return torch.frombuffer(bytearray(data.ljust(_TOLD_BYTES)), dtype=torch.uint8)


def _read(message: torch.Tensor, ranks: int) -> list[dict[str, Any]]:
    told = json.loads(bytes(message.tolist()))
    return told * ranks if len(told) == 1 else told  # type: ignore[no-any-return]


def unsupported(op: str, reason: str) -> NoReturn:
    """Raises ValueError for a call that groups of several nodes do not have."""
    raise ValueError(f"{op}: group: expected a group of one node, got one of several: {reason}")
