"""The memory through which ranks exchange tiles: a header (u32: calls finished; on GPUs CTAs done, aborted),
signals (epochs, never reset), two slot and two exchange buffers, of even and odd epochs. It only grows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed import ProcessGroup

from flux import _env, _invariance, _native
from flux._log import say_once
from flux.comm import topology
from flux.comm.group import name_of
from flux.comm.rendezvous import Rendezvous, check_alike
from flux.comm.shm import WAY_OUT, NoSharedMemory, raise_if_any
from flux.comm.topology import Topology
from flux.errors import CommTimeoutError
from flux.measured import files
from flux.measured.times import NO_FACTS

T = TypeVar("T")
HEADER_BYTES: int = _native.core.HEADER_BYTES
PAGE_BYTES = 4096
MAX_WORLD_SIZE: int = _native.core.MAX_WORLD_SIZE

# Ids of operators in headers and in the timeout records of kernels.
OP_IDS: dict[str, int] = _native.core.OP_IDS
OP_NAMES = {op_id: op for op, op_id in OP_IDS.items()}

_LAYOUT = repr(
    (HEADER_BYTES, PAGE_BYTES, MAX_WORLD_SIZE, sorted(OP_IDS.items()), _native.core.tile_configs())
)
# Ranks must have equal ones to use each other's memory.
BUILD = f"{_native.core.VERSION} with layout {hashlib.sha256(_LAYOUT.encode()).hexdigest()[:8]}"


# A flux.plan.Plan, of a module above this one: a call has its op, m, n, k, by_flux and bytes of each buffer.
Call: TypeAlias = Any


def round_up(value: int, to: int = PAGE_BYTES) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to


# Arguments of a call, besides its plan, that must be equal on all ranks. For a tensor, ranks compare only
# whether it is given; with FLUX_DEBUG=compare, also its contents.
Same: TypeAlias = Mapping[str, torch.Tensor | float | str | None]
NOTHING: Same = {}


class Disagreement(ValueError):
    """Ranks made different calls, or differ in settings, builds of flux or measurements. All raise it."""


class NotInvariant(ValueError):
    """A call that must be batch invariant cannot be. Raised on all ranks alike, whose plans are equal."""


# Groups for whose calls no copy engines are used (flux.expect_graphs).
expecting_graphs: set[ProcessGroup] = set()
# Exceptions that all ranks raise at the same point of the same call, after which the group remains usable.
ON_ALL_RANKS = (Disagreement, NoSharedMemory, NotInvariant)


def call_facts(call: Call, same: Same, contents: bool) -> dict[str, Any]:
    """Facts of a call that must be equal on all ranks, as JSON values. contents: with digests of tensors."""
    names = ("op", "m", "n", "k", "dtype", "transpose_weight", "config", "scaling")
    facts: dict[str, Any] = {name: getattr(call, name) for name in names}
    facts["dtype"] = str(facts["dtype"])
    if (scaling := facts.pop("scaling")) is not None:
        facts["scaling"] = str(scaling)
    if _invariance.active():
        facts["batch_invariant"] = True
    for name, value in same.items():
        if not isinstance(value, torch.Tensor):
            facts[name] = "none" if value is None else value
            continue
        facts[name] = "given"
        if contents:  # synchronises with the GPU
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            told = f"{list(value.shape)} {value.dtype}".encode() + data
            facts[f"digest of {name}"] = hashlib.sha256(told).hexdigest()[:16]
    return facts


def agreed(op: str, facts: Sequence[dict[str, Any]], name: str, what: str) -> str:
    """A fact that all ranks must have told alike. Raises Disagreement, on every rank, if they did not."""
    first = facts[0].get(name)
    for rank, fact in enumerate(facts):
        if (value := fact.get(name)) != first:
            both = f"{first} on rank 0, {value} on rank {rank}"
            raise Disagreement(f"{op}: {what}: expected the same on all ranks of the group, got {both}")
    return str(first)


class Met(NamedTuple):
    """Ranks that have met, of which a workspace is made: at which call, and what each has told."""

    group: ProcessGroup
    device: torch.device
    op: str
    rendezvous: Rendezvous
    turn: Any
    facts: list[dict[str, Any]]


class Workspace(ABC):
    """Buffers, plans, failure, and the lock of calls (`turn`, a CallTurn) of one group on one device."""

    carrier: str  # what runs fused calls here, as ways have it (flux.calls.front)
    transport: str  # how tiles are sent, as text for users
    why_not: str | None  # the group cannot run fused on this device; equal on all ranks
    compares_contents = False  # ranks compare the contents of tensors (FLUX_DEBUG=compare on any rank)
    copies = True  # calls may use copy engines; equal on all ranks
    tuning = NO_FACTS  # the measurements by which plans choose; equal on all ranks
    known: Any = None  # the calls that C++ makes again (flux._core.KnownCalls), or None
    topology: Topology | None = None  # the nodes of a group that has several
    recorded_in = ""  # of rank 0: a file for the problems that are planned
    left_free = 0  # SMs that launches leave to others, inside `leaving_free`

    @classmethod
    def meet(
        cls, group: ProcessGroup, device: torch.device, op: str, rendezvous: Rendezvous
    ) -> list[dict[str, Any]]:
        """The facts of all ranks by which workspaces are made; Disagreement, if builds of flux differ."""
        cause: Exception | None = None
        told: dict[str, Any] = {"build": BUILD, "wrong": None}
        try:
            _env.check()
            told |= cls.handshake(group, device)
            told |= {
                "node": topology.node_id(),
                "links": vars(topology.links()),
                "nodes": _env.get("FLUX_NODES"),
                "compare": _env.get("FLUX_DEBUG") == "compare",
                "graphs": group in expecting_graphs,
                "tuning": files.to_tell(files.local(device)),
            }
        # Peers would wait until the deadline for a rank that raises here.
        except ValueError as error:
            told["wrong"] = str(error)
        except Exception as error:
            cause, told["wrong"] = error, f"{type(error).__name__}: {error}"
        facts = rendezvous.exchange(op, told)
        agreed(op, facts, "build", "flux")
        if wrong := [f"rank {rank}: {fact['wrong']}" for rank, fact in enumerate(facts) if fact.get("wrong")]:
            raise Disagreement(f"{op}: {'; '.join(wrong)}") from cause
        check_alike(op, facts, told)
        raise_if_any(op, [fact.get("error") or "" for fact in facts], f". Mount a tmpfs there {WAY_OUT}")
        return facts

    def __init__(self, met: Met) -> None:
        self.group, self.device, op, self._rendezvous, self.turn, facts = met
        self.rank, self.world_size = met.group.rank(), met.group.size()
        self.timeout_s = _env.timeout_s()
        if self.rank == 0:
            self.recorded_in = _env.get("FLUX_RECORD_SHAPES")
        self.signal_bytes = self.slot_bytes = self.exchange_bytes = 0
        self.plans: dict[Any, Any] = {}  # of operators, by all that they depend on besides the group
        self._plans_left_free: dict[int, dict[Any, Any]] = {}
        self.failure: Exception | None = None  # that made the workspace unusable
        self.tuning, wrong = files.agreed([f["tuning"] for f in facts], files.local(met.device))
        if wrong is not None:
            raise Disagreement(f"{op}: {wrong}")
        self.num_sms = min(f["num_sms"] for f in facts)  # of the smallest GPU of the group (CPU: 0)
        self.copies = all(f.get("copies", True) and not f.get("graphs", False) for f in facts)
        self.compares_contents = any(f["compare"] for f in facts)
        self.why_not = self._verdict(op, facts)
        self._say_why_not()

    def _say_why_not(self) -> None:
        if self.why_not is not None:
            say_once(f"group {name_of(self.group)!r} on {self.device} runs unfused: {self.why_not}")

    def _verdict(self, op: str, facts: list[dict[str, Any]]) -> str | None:
        _, uneven = topology.of_nodes([fact["node"] for fact in facts])
        if uneven is not None:
            return uneven
        if self.world_size > MAX_WORLD_SIZE:
            return f"the group has {self.world_size} ranks, fused operators serve at most {MAX_WORLD_SIZE}"
        if why_not := unfit(facts, "host", "backend"):
            return why_not
        # A rank knows only whether it can write to its peers.
        return self._settle(op, self._unreachable(facts))

    def _settle(self, op: str, why_not: str | None) -> str | None:
        """Why the first rank that has a reason runs unfused: then all do."""
        told = self._tell(op, {"why_not": why_not})
        return next((f"rank {rank}: {f['why_not']}" for rank, f in enumerate(told) if f["why_not"]), None)

    @classmethod
    def handshake(cls, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
        """why_not, host, backend and num_sms of this rank; `copies` if it is False."""
        raise NotImplementedError

    def _unreachable(self, facts: list[dict[str, Any]]) -> str | None:
        """Why this rank cannot write to a peer's memory, or None."""
        return None

    def _allocate(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str) -> None:
        """Collective: replaces the buffers by new ones of these sizes."""
        raise NotImplementedError

    @abstractmethod
    def calling(self, call: Call, same: Same) -> AbstractContextManager[None]:
        """Of a call, which ranks may compare."""

    @contextmanager
    def leaving_free(self, sms: int) -> Iterator[None]:
        """Launches inside leave that many SMs to others, such as NCCL, and have plans of their own."""
        if not sms or not self.num_sms:
            yield
            return
        kept = self.plans, self.num_sms, self.left_free
        self.plans = self._plans_left_free.setdefault(sms, {})
        self.num_sms -= sms
        self.left_free = sms
        if self.known is not None:
            self.known.paused = True  # its launches take all SMs
        try:
            yield
        finally:
            self.plans, self.num_sms, self.left_free = kept
            if self.known is not None:
                self.known.paused = bool(self.left_free)

    def stop_copying(self) -> None:
        self.copies = False
        for plans in (self.plans, *self._plans_left_free.values()):
            plans.clear()
        if self.known is not None:
            self.known.clear()

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.turn.broken_by is not None:
            raise broken_off(self.group, self.turn.broken_by)

    def check(self) -> None:
        """As raise_if_failed; on GPUs also a timeout that a kernel has recorded. Waits for no stream."""
        self.raise_if_failed()

    def fits(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int = 0) -> bool:
        fits = signal_bytes <= self.signal_bytes and slot_bytes <= self.slot_bytes
        return fits and exchange_bytes <= self.exchange_bytes

    def grow(
        self, signal_bytes: int, slot_bytes: int, op: str, facts: dict[str, Any], exchange_bytes: int = 0
    ) -> None:
        """Collective: grows the buffers if they are too small for a call, which all ranks must make."""
        if self.fits(signal_bytes, slot_bytes, exchange_bytes):
            return
        self._compare(op, facts)
        have = (self.signal_bytes, self.slot_bytes, self.exchange_bytes)
        signals, slots, exchange = map(grown, have, (signal_bytes, slot_bytes, exchange_bytes))
        self._allocate(signals, slots, exchange, op)
        self.signal_bytes, self.slot_bytes, self.exchange_bytes = signals, slots, exchange

    def _compare(self, op: str, facts: dict[str, Any]) -> None:
        self.turn.open()
        self._raise_if_different(op, self._meet(op, facts))

    def _raise_if_different(self, op: str, calls: list[dict[str, Any]]) -> None:
        """Raises Disagreement, on every rank alike, if the ranks of a group did not make the same call."""
        if any(call != calls[0] for call in calls):
            facts = [", ".join(f"{key}={value}" for key, value in call.items()) for call in calls]
            told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(facts))
            raise Disagreement(f"{op}: expected the same call on all ranks of the group, got {told}")

    def _meet(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._rendezvous.exchange(op, facts)
        except CommTimeoutError as error:
            self.failure = error
            if self.known is not None:
                self.known.clear()  # all further calls raise the failure
            raise

    def _tell(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        told = self._meet(op, facts)
        check_alike(op, told, facts)
        return told

    def release(self) -> None:
        """Waits until no rank uses the buffers; after a failure, only announces that this rank does not."""
        self._rendezvous.leave("release", wait=self.failure is None and self.turn.broken_by is None)


def unfit(facts: list[dict[str, Any]], *alike: str) -> str | None:
    """Why ranks that told such facts cannot run fused, or None. alike: facts that must be equal."""
    for rank, fact in enumerate(facts):
        if fact["why_not"] is not None:
            return f"rank {rank}: {fact['why_not']}"
        for key in alike:
            if fact[key] != facts[0][key]:
                return f"ranks 0 and {rank} differ in {key}: {facts[0][key]!r}, {fact[key]!r}"
    return None


def broken_off(group: ProcessGroup, by: str) -> RuntimeError:
    """The error of all calls after an exception ended a call that was already visible to peers."""
    return RuntimeError(
        f"flux: an earlier call on group {name_of(group)!r} was broken off by {by}, and peers may have "
        "seen half of it; call flux.release(group=group) on all ranks"
    )


def grown(have: int, need: int) -> int:
    """Bytes to allocate: geometric, so that slowly growing shapes do not reallocate at every step."""
    return have if need <= have else round_up(max(need, 3 * have // 2))


Key = tuple[ProcessGroup, torch.device]
# Of this process, by group and device; flux.comm.registry makes them, and frees them.
made: dict[Key, Workspace] = {}
turns: dict[Key, Any] = {}


def find(group: ProcessGroup, device: torch.device) -> Workspace | None:
    return made.get((group, device))


def in_turn(
    group: ProcessGroup, device: torch.device, fn: Callable[..., T], *arguments: Any, holds: bool = False
) -> T:
    """Runs fn(*arguments), a whole call on a group, in turn. holds: with work that is not flux's."""
    its_turn = turns.get((group, device))
    if its_turn is None:
        if group.size() == 1:
            return fn(*arguments)
        its_turn = turn(group, device)
    run = its_turn.hold if holds else its_turn.call
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # torch functions without a device argument use the current device.
        with torch.cuda.device(device):
            return run(fn, *arguments)  # type: ignore[no-any-return]
    return run(fn, *arguments)  # type: ignore[no-any-return]


def turn(group: ProcessGroup, device: torch.device) -> Any:
    key = (group, device)
    return turns.get(key) or turns.setdefault(key, _native.core.CallTurn(ON_ALL_RANKS))
