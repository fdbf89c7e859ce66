"""A model of exchanges without signals and of transport by copy engines: calls of several ranks as events
with an order, and a proof that no order of execution that this permits deadlocks or mixes up data.

An event touches one place in memory and comes after others: those before it in its thread, CTA or copy queue,
and those of the call before it on its rank. What is not ordered may happen in any order, as stores to a peer
do. Beyond that, an event that waits comes after the events that it is meant to wait for. :func:`prove` shows
that

1. this relation has no cycle, so somebody can always go on;
2. of two events at one place it orders all that disturb each other, so that everybody finds what it is meant
   to find if everybody waits for what it is meant to wait for;
3. no wait can end before that: whatever its place may hold until then does not end it.

By induction over the events of any execution, all executions then find the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flux._native import core

Place = tuple[Any, ...]
ABSENT = None  # what a place of an exchange area holds where nothing has arrived
FAULTS = (
    "no put-back",
    "one buffer",
    "no reset",
    "reset before wait",
    "signal before copy",
    "no join",
    "own tiles first",
    "words by call",
)


class Chunks:
    """How copy engines divide a call's pieces."""

    def __init__(self, call: Call) -> None:
        chunks, self.of = core.gemm_rs_chunks(call.chunks, call.pieces)
        self.pieces = [range(first, first + size) for first, size in chunks]


class Wrong(AssertionError):
    """The protocol permits an order that it must not."""


class Deadlock(Wrong):
    """Events wait for each other."""


class Unordered(Wrong):
    """Two events may touch one place in either order."""


class WrongData(Wrong):
    """Somebody finds what it is not meant to find."""


@dataclass(frozen=True)
class Event:
    """kind: put a value, add one to it, take what has arrived, wait for an epoch or a count, read, or step,
    which touches nothing. value: what is put, taken or read; the epoch; of add and count the epoch, and of
    count also what it counts to.
    """

    name: str
    kind: str
    place: Place
    value: Any
    after: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call, the same on all ranks. op: exchange, stored (tiles or rows that SMs send and signal), staged
    (gemm_rs by copy engine) or gathered (ag_gemm by copy engine).

    m, n, mode: of an exchange. pieces: tiles of a slot or rows of a shard. chunks: of these, signalled at a
    time. ctas: of the launch.
    """

    op: str
    m: int = 1
    n: int = 8
    mode: int = 0
    pieces: int = 2
    chunks: int = 1
    ctas: int = 1


class Protocol:
    """The events of some calls on all ranks, in the order of `csrc`, with or without a fault planted."""

    def __init__(self, world_size: int, calls: Iterable[Call], fault: str = "") -> None:
        assert fault in ("", *FAULTS)
        self.world_size = world_size
        self.fault = fault
        self.events: list[Event] = []
        for rank in range(world_size):
            self._stream: list[int] = []  # what the next launch on the rank's stream comes after
            self._queue: list[int] = []  # the same for what its copy queue does next
            epochs: dict[bool, int] = defaultdict(int)
            for call in calls:
                # Copy engines have buffers, and epochs, of their own.
                copied = call.op in ("staged", "gathered")
                epochs[copied] += 1
                getattr(self, f"_{call.op}")(call, rank, epochs[copied])

    def _add(self, name: str, kind: str, place: Place, value: Any, after: Iterable[int]) -> int:
        self.events.append(Event(f"{name} {place}", kind, place, value, tuple(after)))
        return len(self.events) - 1

    def _begin(self, rank: int, epoch: int) -> list[int]:
        return [self._add(f"rank {rank}, call {epoch}", "step", (), None, self._stream)]

    def _end(self, rank: int, epoch: int, after: Iterable[int]) -> None:
        self._stream = [self._add(f"rank {rank}, end of call {epoch}", "step", (), None, after)]

    def _buffer(self, epoch: int) -> int:
        return 0 if self.fault == "one buffer" else epoch & 1

    # csrc/runtime/device/exchange.cuh and gemm/finish.cuh

    def _exchange(self, call: Call, rank: int, epoch: int) -> None:
        layout = core.exchange(call.m, call.n, self.world_size, core.ExchangeMode(call.mode))
        begin, done = self._begin(rank, epoch), []
        who, buffer, ranks = f"rank {rank}, call {epoch},", self._buffer(epoch), range(self.world_size)
        two_shot, scatter = call.mode == 1, call.mode == 2
        vectors = [(row, column) for row in range(call.m) for column in range(0, call.n, 8)]

        def owners(row: int, column: int) -> Iterable[int]:
            if not two_shot and not scatter:
                return ranks
            return [(column if two_shot else row) // layout.shard]

        def take(place: Place, value: Any, after: list[int]) -> list[int]:
            taken = self._add(f"{who} takes", "take", place, value, after)
            if self.fault == "no put-back":
                return [taken]
            return [taken, self._add(f"{who} puts back", "put", place, ABSENT, [taken])]

        for row, column in vectors:
            for owner in owners(row, column):
                place = ("exchange", owner, buffer, layout.contribution(rank, owner, row, column))
                done.append(self._add(f"{who} sends", "put", place, (epoch, rank, row, column), begin))
        for row, column in vectors:
            if rank not in owners(row, column):
                continue
            # One thread, one source after the other.
            summed = begin
            for source in ranks:
                place = ("exchange", rank, buffer, layout.contribution(source, rank, row, column))
                summed = take(place, (epoch, source, row, column), summed)
            done += summed
            if two_shot:
                for peer in ranks:
                    place = ("exchange", peer, buffer, layout.result(row, column))
                    value = (epoch, "sum", row, column)
                    done.append(self._add(f"{who} sends a sum", "put", place, value, summed))
        if two_shot:
            for row, column in vectors:
                place = ("exchange", rank, buffer, layout.result(row, column))
                done += take(place, (epoch, "sum", row, column), begin)
        self._end(rank, epoch, done)

    # csrc/gemm_rs/store.cuh and ag_gemm/gather.cuh, as far as other calls on the same workspace notice

    def _stored(self, call: Call, rank: int, epoch: int) -> None:
        begin, who = self._begin(rank, epoch), f"rank {rank}, call {epoch},"
        done: list[int] = []
        for peer in self._peers(rank):
            for piece in range(call.pieces):
                place = self._slot("stored", call, rank, peer, epoch, piece)
                sent = self._add(f"{who} stores", "put", place, (epoch, rank, piece), begin)
                word = self._word(call, rank, peer, piece)
                done.append(self._add(f"{who} signals", "put", word, epoch, [sent]))
                word = self._word(call, peer, rank, piece)
                here = self._add(f"{who} waits", "epoch", word, epoch, begin)
                place = self._slot("stored", call, peer, rank, epoch, piece)
                done.append(self._add(f"{who} reads", "read", place, (epoch, peer, piece), [here]))
        self._end(rank, epoch, done)

    def _word(self, call: Call, source: int, owner: int, piece: int) -> Place:
        """A word belongs to one source for ever; by the shape of each call, it would change its source."""
        number = source - (source > owner)
        if self.fault == "words by call":
            return ("stored signal", owner, number * call.pieces + piece)
        return ("stored signal", owner, number, piece)

    # csrc/gemm_rs/gemm_rs.cu: send_staged, beside the launch

    def _staged(self, call: Call, rank: int, epoch: int) -> None:
        chunks = Chunks(call)
        begin, who = self._begin(rank, epoch), f"rank {rank}, call {epoch},"
        early = self.fault == "reset before wait"
        queue, ends = self._queue, []
        for peer in self._peers(rank):
            for chunk in range(call.chunks):
                counter = ("pieces_staged", rank, peer, chunk)
                pieces = chunks.pieces[chunk]
                if early:
                    queue = [self._add(f"{who} resets", "put", counter, 0, queue)]
                count = (epoch, len(pieces))
                queue = [self._add(f"{who} waits for a chunk", "count", counter, count, queue)]
                queue = self._copied_chunk(
                    call, rank, peer, epoch, chunk, pieces, ("staging", rank, peer), queue
                )
                if not early and self.fault != "no reset":
                    queue = [self._add(f"{who} resets", "put", counter, 0, queue)]
        self._queue = queue
        for cta in range(call.ctas):
            mine = range(cta, call.pieces, call.ctas)
            steps = begin
            if self.fault == "own tiles first":
                steps = self._read(call, rank, epoch, mine, chunks, steps)
            sent = steps
            for peer in self._peers(rank):
                for piece in mine:
                    place = ("staging", rank, peer, piece)
                    stored = self._add(f"{who} stages", "put", place, (epoch, rank, piece), steps)
                    counter = ("pieces_staged", rank, peer, chunks.of[piece])
                    sent = [*sent, self._add(f"{who} counts", "add", counter, epoch, [stored])]
            ends += sent
            if self.fault != "own tiles first":
                # A CTA has sent all that it sends before it waits for others.
                ends += self._read(call, rank, epoch, mine, chunks, sent)
        self._end(rank, epoch, [*ends, *self._joined()])

    # csrc/ag_gemm/all_gather.cu: push_by_copy_engine, before the launch

    def _gathered(self, call: Call, rank: int, epoch: int) -> None:
        chunks = Chunks(call)
        who = f"rank {rank}, call {epoch},"
        begin = self._begin(rank, epoch)
        # The user's x, in a buffer that every call uses again.
        rows = [
            self._add(f"{who} writes x", "put", ("x", rank, piece), (epoch, rank, piece), begin)
            for piece in range(call.pieces)
        ]
        queue = [*self._queue, *rows]
        for peer in self._peers(rank):
            for chunk in range(call.chunks):
                pieces = chunks.pieces[chunk]
                queue = self._copied_chunk(call, rank, peer, epoch, chunk, pieces, ("x", rank), queue)
        self._queue = queue
        ends = self._read(call, rank, epoch, range(call.pieces), chunks, rows)
        self._end(rank, epoch, [*ends, *self._joined()])

    def _peers(self, rank: int) -> list[int]:
        return [(rank + i) % self.world_size for i in range(1, self.world_size)]

    def _joined(self) -> list[int]:
        return [] if self.fault == "no join" else self._queue

    def _slot(self, area: str, call: Call, source: int, owner: int, epoch: int, piece: int) -> Place:
        """Where a piece travels; with the number of pieces its place changes the source."""
        number = source - (source > owner)
        return (f"{area} slot", owner, self._buffer(epoch), number * call.pieces + piece)

    def _copied_chunk(
        self,
        call: Call,
        rank: int,
        peer: int,
        epoch: int,
        chunk: int,
        pieces: Iterable[int],
        source: Place,
        queue: list[int],
    ) -> list[int]:
        """A chunk from `source` to a peer's slots, and its signal; returns what is behind it in the queue."""
        who = f"rank {rank}, call {epoch},"
        copies = []
        for piece in pieces:
            value = (epoch, rank, piece)
            read = self._add(f"{who} copies from", "read", (*source, piece), value, queue)
            place = self._slot("copied", call, rank, peer, epoch, piece)
            copies.append(self._add(f"{who} copies to", "put", place, value, [read]))
        after = queue if self.fault == "signal before copy" else copies
        signal = self._add(f"{who} signals", "put", ("copied signal", peer, rank, chunk), epoch, after)
        return [*copies, signal]

    def _read(
        self, call: Call, rank: int, epoch: int, pieces: Iterable[int], chunks: Any, after: list[int]
    ) -> list[int]:
        """A CTA of a launch waits for pieces of all peers, and reads them."""
        who = f"rank {rank}, call {epoch},"
        for piece in pieces:
            for peer in self._peers(rank):
                word = ("copied signal", rank, peer, chunks.of[piece])
                here = self._add(f"{who} waits", "epoch", word, epoch, after)
                place = self._slot("copied", call, peer, rank, epoch, piece)
                after = [self._add(f"{who} reads", "read", place, (epoch, peer, piece), [here])]
        return after


def may_go_on(event: Event, held: Any) -> bool:
    """Whether an event may happen when its place holds `held`."""
    if event.kind == "take":
        return held is not ABSENT
    if event.kind == "epoch":
        return (held or 0) - event.value in (0, 1)  # csrc/runtime/device/sync.cuh: reached
    return event.kind != "count" or (held or 0) >= event.value[1]


def held_after(event: Event, held: Any) -> Any:
    """What the place of an event holds when it has happened."""
    if event.kind in ("take", "read") and held != event.value:
        raise WrongData(f"{event.name}: found {held}, expected {event.value}")
    if event.kind == "put":
        return event.value
    return (held or 0) + 1 if event.kind == "add" else held


def prove(events: list[Event]) -> None:
    """Raises Wrong unless every execution of the events ends, and finds what it is meant to find."""
    touching: dict[Place, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.kind != "step":
            touching[event.place].append(i)
    awaited = [_awaited(events, touching, event) for event in events]
    order = _sorted(events, awaited)
    # As bits: what comes before an event in its thread, queue and stream; and what does if waits count.
    before, ordered = [0] * len(events), [0] * len(events)
    for i in order:
        for j in events[i].after:
            before[i] |= before[j] | 1 << j
        for j in (*events[i].after, *awaited[i]):
            ordered[i] |= ordered[j] | 1 << j
    position = {i: number for number, i in enumerate(order)}
    for place in touching.values():
        place.sort(key=position.__getitem__)
        for number, late in enumerate(place):
            for early in place[:number]:
                if _disturb(events[early], events[late]) and not ordered[late] >> early & 1:
                    raise Unordered(f"{events[early].name} and {events[late].name}")
        held: list[Any] = [ABSENT]  # what the place holds, before each event
        for i in place:
            if not may_go_on(events[i], held[-1]):
                raise WrongData(f"{events[i].name}: found {held[-1]}")
            held.append(held_after(events[i], held[-1]))
        for i in place:
            # What the place may hold from the last event that surely lies behind, until all that are waited
            # for have happened.
            behind = [number + 1 for number, j in enumerate(place) if before[i] >> j & 1]
            last = max((place.index(j) for j in awaited[i]), default=-1)
            if any(may_go_on(events[i], held[at]) for at in range(max(behind, default=0), last + 1)):
                raise WrongData(f"{events[i].name}: may not wait")


def _disturb(one: Event, other: Event) -> bool:
    """Whether it matters which of two events at one place comes first."""
    kinds = {one.kind, other.kind}
    if kinds == {"epoch", "put"}:
        wait, put = (one, other) if one.kind == "epoch" else (other, one)
        return bool(put.value != wait.value + 1)  # the next epoch ends a wait too
    return kinds != {"add"} and bool(kinds & {"put", "add"})


def _awaited(events: list[Event], touching: dict[Place, list[int]], event: Event) -> list[int]:
    """The events that a wait is meant to wait for."""
    kind = {"take": "put", "epoch": "put", "count": "add"}.get(event.kind)
    if kind is None:
        return []
    value = event.value[0] if event.kind == "count" else event.value
    found = [i for i in touching[event.place] if events[i].kind == kind and events[i].value == value]
    if not found:
        raise Deadlock(f"{event.name}: nobody brings {event.value}")
    return found


def _sorted(events: list[Event], awaited: list[list[int]]) -> list[int]:
    """The events in an order in which each comes after those that it follows or waits for."""
    after = [{*event.after, *others} for event, others in zip(events, awaited, strict=True)]
    followers: dict[int, list[int]] = defaultdict(list)
    for i, others in enumerate(after):
        for j in others:
            followers[j].append(i)
    left = [len(others) for others in after]
    order = [i for i, count in enumerate(left) if count == 0]
    for i in order:  # grows
        for j in followers[i]:
            left[j] -= 1
            if left[j] == 0:
                order.append(j)
    if len(order) < len(events):
        stuck = next(events[i].name for i, count in enumerate(left) if count)
        raise Deadlock(f"{len(events) - len(order)} events wait for each other, such as: {stuck}")
    return order
