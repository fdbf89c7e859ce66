"""The workspace of a group with several nodes: a group and workspace of the own node, and the own rail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from flux.comm import group as groups
from flux.comm import topology
from flux.comm.nodes.rail import GlooRail, NcclRail, RailError, Transfer
from flux.comm.nodes.watch import Watch
from flux.comm.topology import Topology
from flux.comm.workspace import MAX_WORLD_SIZE, Call, Met, Same, Workspace, agreed, call_facts, unfit
from flux.errors import CommTimeoutError
from flux.measured.times import NO_FACTS

_dist: Any = torch.distributed  # parts of it are not typed
# How long a rank that gives up waits for its peers to say whom they wait for.
_GRACE_S = 5.0


class NodesWorkspace(Workspace):
    """Has no memory. `node` and `local` are this node, and this rank's number in it; `way` is FLUX_NODES."""

    carrier = "nodes"
    topology: Topology

    def __init__(self, met: Met) -> None:
        group, _, op, _, _, facts = met
        found, _ = topology.of_nodes([fact["node"] for fact in facts])
        assert found is not None
        self.topology = found
        self.node, self.local = divmod(group.rank(), found.ranks)
        links = [topology.links_of(fact["links"], f"{op}: rank {rank}") for rank, fact in enumerate(facts)]
        agreed(op, [{"links": each} for each in links], "links", "FLUX_LINKS")
        self.links, self.way = links[0], agreed(op, facts, "nodes", "FLUX_NODES")
        self.rail: Any = None  # a Rail, while the group can run fused
        self.node_group: Any = None  # the ranks of this node
        self.inner: Workspace | None = None  # that of the node; None for nodes of one rank
        self._release_inner: Callable[[ProcessGroup], None] = lambda _: None
        self._watch: Watch | None = None
        self._where = ""  # what the call waits for
        self._calls = 0
        self._largest: dict[str, tuple[int, ...]] = {}  # m, n and k that calls of each operator have had
        self._board = _Board(groups.store_of(group), met.rendezvous.place)
        super().__init__(met)

    @property
    def transport(self) -> str:  # type: ignore[override]
        inside = self.inner.transport if self.inner is not None else "none (one rank)"
        return f"inside a node {inside}; between nodes {self.engine}"

    @property
    def engine(self) -> str:
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
        """Collective: makes the groups of node and rail. get, release: makes and ends a group's workspace."""
        if self.why_not is not None:
            return
        token = hashlib.sha256(self._rendezvous.place.encode()).hexdigest()[:16]
        name = f"nodes-{token}-{self.node}"
        first = self.rank - self.local
        self.node_group = groups.part_of(self.group, range(first, first + self.topology.ranks), name)
        self._release_inner = release
        why_not = None
        with self.naming(op):
            self.inside("the first call inside the node")
            if self.topology.ranks > 1:
                self.inner = get(self.node_group, self.device, op)
                self.inner.compares_contents = self.compares_contents
                self.inner.tuning = NO_FACTS  # torch could run no call: a part of a group has no backend
                why_not = self.inner.why_not
        self.why_not = self._settle(op, why_not)
        if self.why_not is None:
            self._join_rail(op, token)
        self._say_why_not()

    def _join_rail(self, op: str, token: str) -> None:
        why_not, nodes = None, self.topology.nodes
        kept: Any = _dist.PrefixStore(f"flux/rail-{token}-{self.local}", groups.store_of(self.group))
        try:
            if self.device.type == "cuda":
                backend = NcclRail.make_backend(kept, nodes, self.node, self.timeout_s)
                self.rail = NcclRail(backend, nodes, self.node)
                self._watch = Watch(self.timeout_s, self._board.first, self._give_up)
                self.rail.on_start = self._watch.started
            else:
                self.rail = GlooRail(kept, nodes, self.node, self.timeout_s)
            with self.naming(op):
                self._warm_up()
        except CommTimeoutError:
            raise
        except RuntimeError as error:
            why_not = f"no rail: {str(error).strip().splitlines()[0]}"
        self.why_not = self._settle(op, why_not)
        if self.why_not is not None and self.rail is not None:
            self.rail.close()
            self.rail = None

    def _warm_up(self) -> None:
        """A first exchange, in which engines connect."""
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        everybody = word.new_empty(self.topology.nodes, 1)
        self.wait(self.rail.gather(word, everybody), "the first exchange")
        if word.is_cuda:
            torch.cuda.synchronize(self.device)
        self.rail.bytes_sent = 0

    @contextmanager
    def calling(self, call: Call, same: Same) -> Iterator[None]:
        """Compares on CPUs every call; on GPUs with FLUX_DEBUG=compare, and where the node's may grow."""
        self.raise_if_failed()
        if self.rail is None:
            yield
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{call.op}: group {groups.name_of(self.group)!r} has {self.topology}, and a CUDA graph "
                "cannot capture its calls: the host keeps the deadlines of exchanges between nodes, and does "
                "not see those of a replay. Capture calls on groups of one node only."
            )
        self._calls += 1
        self.turn.open()
        before = self._largest.get(call.op, (-1, -1, -1))
        self._largest[call.op] = tuple(map(max, (call.m, call.n, call.k), before))
        # The largest call of its operator so far may make the node's workspace grow.
        compares = self.compares_contents or self._largest[call.op] != before or self.device.type == "cpu"
        with self.naming(call.op):
            if compares:
                self._compare(call.op, call_facts(call, same, self.compares_contents))
            yield

    def wait(self, transfer: Transfer, where: str) -> None:
        """transfer.wait(), and tells where the call is, should it not end in time."""
        self._where = where
        transfer.wait()

    def inside(self, where: str) -> None:
        self._where = where

    @contextmanager
    def naming(self, op: str) -> Iterator[None]:
        """Turns timeouts inside the node and on the rail into one of the group, which names who is behind."""
        try:
            yield
        except RailError as error:
            peer = self.topology.rank_of(error.node, self.local)
            raise self._failed(op, peer, self._where, str(error)) from error
        except CommTimeoutError as error:
            if error is self.failure:  # of a rendezvous of the whole group
                self.failure = None
                raise self._failed(op, error.peer, "the comparison of calls", error.detail) from error
            peer = self.topology.rank_of(self.node, error.peer)
            raise self._failed(op, peer, self._where, error.detail) from error

    def _failed(self, op: str, peer: int, where: str, why: str = "", waits: bool = True) -> CommTimeoutError:
        """Gives up: tells the other ranks, closes the rail, finds out who is behind. waits: for `peer`."""
        if isinstance(self.failure, CommTimeoutError):
            return self.failure
        if waits:
            self._board.write(self.rank, Place(peer, where))
        if self.rail is not None:
            self.rail.close()
        behind, seen = self._board.follow(self.rank, peer, where, min(_GRACE_S, self.timeout_s))
        told = f"Behind is node {self.topology.node_of(behind)}, rank {behind}, in {seen}."
        if behind != peer and waits:
            told += f" Rank {self.rank} itself waited for rank {peer} in {where}."
        how: dict[str, Any] = {"timeout_s": self.timeout_s, "detail": told + (f" ({why})" if why else "")}
        self.failure = error = CommTimeoutError(op, self.rank, behind, max(self._calls, 1), **how)
        if self.inner is not None:
            self.inner.failure = self.inner.failure or error
        return error

    def _give_up(self, where: str) -> None:
        """What the watch of a GPU calls: a transfer is late, or another rank has given up."""
        gave_up = self._board.first()
        # The transfer is with all nodes of the rail: the next one stands for them.
        late = self.topology.rank_of((self.node + 1) % self.topology.nodes, self.local)
        self._failed("check", late if gave_up is None else gave_up, where, waits=gave_up is None)

    def check(self) -> None:
        """As of Workspace; also raises that the node's has failed, or that another rank has given up."""
        self.raise_if_failed()
        if self.rail is None:
            return
        with self.naming("check"):
            self.inside("a call inside the node")
            if self.inner is not None:
                self.inner.check()
        gave_up = self._board.first()
        if gave_up is not None:
            raise self._failed("check", gave_up, "a call", waits=False)

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


class Place(NamedTuple):
    waits_for: int
    where: str


class _Board:
    """What ranks that give up tell each other, in the store of the group: whom they wait for, and where."""

    def __init__(self, store: Any, place: str) -> None:
        self._store = store
        self._place = f"{place}/gave-up"

    def write(self, rank: int, place: Place) -> None:
        with contextlib.suppress(RuntimeError):  # the process that holds the store may have died
            self._store.set(f"{self._place}/{rank}", json.dumps(place))
            self._store.set(self._place, str(rank))

    def first(self) -> int | None:
        """A rank that has given up, or None."""
        with contextlib.suppress(RuntimeError, ValueError):
            return int(self._store.get(self._place)) if self._store.check([self._place]) else None
        return None

    def follow(self, rank: int, peer: int, where: str, grace_s: float) -> tuple[int, str]:
        """The end of the chain of ranks that wait for each other, and where; of a circle `peer`."""
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
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
            waits_for, where = json.loads(self._store.get(key))
            return Place(int(waits_for), str(where)[:200])
        return None
