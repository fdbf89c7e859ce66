"""Facts that ranks' hosts exchange through stores, which serve every backend, need no GPU, have a deadline,
and show which rank is missing.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from flux import _env
from flux.comm.group import members_of, name_of, store_of, why_fake
from flux.errors import CommTimeoutError

# The value that replaces a rank's token when the rank stops waiting for the others.
_GAVE_UP = "gave up"
# Limit for the facts of a rank. They are sizes, reasons and names, at most some KiB.
_MAX_FACTS_BYTES = 1 << 16


class Rendezvous:
    """Exchanges of small facts between all ranks of a group. Keys contain the kind of workspace, and a number
    on which ranks agree in begin(): some may have failed more often than others.
    """

    def __init__(self, store: Any, base: str, rank: int, world_size: int) -> None:
        """store: None for a fake group, where there are no other ranks."""
        self._store, self._base, self._rank, self._world_size = store, base, rank, world_size
        self._count = 0
        self.place = ""  # a prefix for keys, equal on all ranks, which no other rendezvous has, after begin()

    @classmethod
    def of(cls, group: ProcessGroup, tag: str) -> Rendezvous:
        if why_fake(group) is not None:
            return cls(None, "", group.rank(), group.size())
        # Groups may share one store (a FileStore given to init_process_group), so keys contain the members.
        members = "-".join(str(r) for r in members_of(group))
        base = f"flux/{tag}/{name_of(group)}/{members}"
        return cls(store_of(group), base, group.rank(), group.size())

    def begin(self, op: str) -> None:
        """A barrier that agrees on a number. A rank that gives up withdraws its token: all may try again."""
        if self._store is None:
            return
        number = token = uuid.uuid4().hex
        place, left = f"{self._base}/join", _GAVE_UP
        try:
            self._set(op, f"{place}/{self._rank}", token)
            deadline = time.monotonic() + _patience_s()
            if self._rank == 0:
                joined = range(1, self._world_size)
                refuse = ("", _GAVE_UP)
                tokens = [self._wait(op, peer, f"{place}/{peer}", deadline, refuse) for peer in joined]
                for peer, theirs in zip(joined, tokens, strict=True):
                    self._set(op, f"{self._base}/begin/{peer}/{theirs}", token)
            else:
                number = self._await_number(op, place, token, deadline)
            left = ""
        finally:
            # The store itself may have failed.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{place}/{self._rank}", left)
        self.place = f"{self._base}/{number}"

    def _await_number(self, op: str, place: str, token: str, deadline: float) -> str:
        try:
            return self._wait(op, 0, f"{self._base}/begin/{self._rank}/{token}", deadline)
        except CommTimeoutError:
            # Rank 0 may itself be waiting for another rank, so name a rank whose token is missing.
            for peer in range(self._world_size):
                key = f"{place}/{peer}"
                if not self._store.check([key]) or not self._store.get(key):
                    raise CommTimeoutError(op, self._rank, peer, 0, timeout_s=_patience_s()) from None
            raise

    def exchange(self, op: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """The facts of all ranks, in rank order, unless one comes too late (CommTimeoutError)."""
        self._count += 1
        return self._gather(op, str(self._count), facts)

    def leave(self, op: str, wait: bool) -> None:
        """Announces that this rank makes no more exchanges; with `wait`, waits until all have done so."""
        if wait or self._store is None:
            self._gather(op, "leave", {})
        else:
            self._set(op, f"{self.place}/leave/{self._rank}", "{}")

    def _gather(self, op: str, place: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        if self._store is None:
            return [facts] * self._world_size
        prefix, deadline = f"{self.place}/{place}", time.monotonic() + _patience_s()
        self._set(op, f"{prefix}/{self._rank}", json.dumps(facts))
        values = [self._wait(op, peer, f"{prefix}/{peer}", deadline) for peer in range(self._world_size)]
        with contextlib.suppress(RuntimeError):  # all ranks have read what came before
            self._store.delete_key(f"{self.place}/{self._count - 1}/{self._rank}")
        return [_parse(op, peer, value) for peer, value in enumerate(values)]

    def _set(self, op: str, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise self._store_failed(op, self._rank, error) from error

    def _wait(self, op: str, peer: int, key: str, deadline: float, refuse: Sequence[str] = ()) -> str:
        """Polls a key that `peer` sets, or causes to be set, until it has a value that is not refused."""
        pause_s = 0.0005
        while True:  # polling, unlike Store.wait, can be interrupted from the keyboard
            try:
                value = self._store.get(key).decode(errors="replace") if self._store.check([key]) else None
            except RuntimeError as error:
                raise self._store_failed(op, peer, error) from error
            if value is not None and value not in refuse:
                return str(value)
            if time.monotonic() > deadline:
                raise CommTimeoutError(op, self._rank, peer, 0, timeout_s=_patience_s())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def _store_failed(self, op: str, peer: int, error: RuntimeError) -> CommTimeoutError:
        # The store is hosted by one of the job's processes, which may have died.
        detail = f"The store of the group failed: {error}."
        return CommTimeoutError(op, self._rank, peer, 0, timeout_s=_patience_s(), detail=detail)


def _patience_s() -> float:
    """The deadline of a rendezvous. Of a malformed one ranks tell each other (Workspace.meet), all raise."""
    try:
        return _env.timeout_s()
    except ValueError:
        return float(_env.default("FLUX_TIMEOUT_S"))


def _parse(op: str, peer: int, value: str) -> dict[str, Any]:
    """Parses the facts of a rank. Checks the value, because any client of the store can write it."""
    if len(value) <= _MAX_FACTS_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(facts := json.loads(value), dict):
                return facts
    raise RuntimeError(
        f"flux.{op}: rendezvous: expected the facts of rank {peer}, a JSON object of at most "
        f"{_MAX_FACTS_BYTES} bytes, got {len(value)} bytes that begin with {value[:60]!r}"
    )


def check_alike(op: str, facts: Sequence[dict[str, Any]], mine: dict[str, Any]) -> None:
    """Raises RuntimeError if a rank told facts of other types than this rank's own. A reason may be None."""
    for rank, told in enumerate(facts):
        if problem := _unlike(told, mine):
            raise RuntimeError(f"flux.{op}: rendezvous: rank {rank}: {problem}")


def _unlike(told: dict[str, Any], mine: dict[str, Any]) -> str | None:
    for name, own in mine.items():
        kinds = (str, type(None)) if own is None or isinstance(own, str) else (type(own),)
        if name not in told or type(told[name]) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            return f"{name}: expected {expected}, got {told.get(name, 'nothing')!r:.80}"
        if isinstance(own, dict) and (problem := _unlike(told[name], own)):
            return f"{name}: {problem}"
    return None
