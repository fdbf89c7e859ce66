"""The workspace of CPU ranks: processes of one host, through POSIX shared memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _env, _native
from flux.comm import shm
from flux.comm.group import why_fake
from flux.comm.workspace import HEADER_BYTES, ON_ALL_RANKS, PAGE_BYTES, Call, Met, Same, Workspace, call_facts
from flux.errors import CommTimeoutError

_EPOCHS = 1 << 32


class CpuWorkspace(Workspace):
    """POSIX shared memory, whose header also has a call (epoch, length, JSON) of each parity of the epoch."""

    carrier = "protocol"
    transport = "POSIX shared memory"
    _ENTRY_BYTES = 4096
    _MAX_TOLD = _ENTRY_BYTES - 8

    def __init__(self, met: Met) -> None:
        super().__init__(met)
        self._epoch = 0
        self._op, self._told = "", b""  # of the current call, and its facts, as published to the peers
        self._agreed = False  # whether all peers have begun the current call, and their facts are equal
        self._memory: Any = None
        # Ranks of one host can compare their calls even if no call runs fused.
        if all(fact["shm"] is None and fact["host"] == met.facts[0]["host"] for fact in met.facts):
            # The first call compares its facts through the headers, so these must exist before it.
            try:
                self.grow(PAGE_BYTES, PAGE_BYTES, met.op, {})
            except shm.NoSharedMemory:
                if self.why_not is None:  # unfused calls can do without
                    raise

    @classmethod
    def handshake(cls, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
        off = "FLUX_FUSED=off" if _env.get("FLUX_FUSED") == "off" else None
        host, no_memory, fake = shm.host_id(), shm.why_not(), why_fake(group)
        alone = fake or no_memory or (None if host else "this process cannot tell which host it is on")
        found = {"why_not": off or alone, "host": host, "backend": "shm", "num_sms": 0, "shm": alone}
        return {**found, "error": None if off or fake else no_memory}

    def _allocate(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str) -> None:
        nbytes = HEADER_BYTES + signal_bytes + 2 * slot_bytes
        try:
            self._memory = shm.SharedMemory(nbytes, self.rank, self._rendezvous, op)
        except CommTimeoutError as error:
            self.failure = error
            raise
        self._epoch = 0
        # Every slot has its own signal words, whatever the shape of a call: if a word belonged to source A in
        # call e and to B in e+1, B's signal could pass for A's while the owner is still in call e.
        self._words_per_slot = signal_bytes // 4 // (self.world_size - 1)

    @contextmanager
    def calling(self, call: Call, same: Same) -> Iterator[None]:
        """Publishes the facts of the call, and waits at its end until all peers have begun it, as `agree`."""
        self.raise_if_failed()
        if self._memory is None:
            yield
            return
        facts = call_facts(call, same, self.compares_contents)
        try:
            self._begin(call, facts)
            if not call.by_flux:  # torch's collectives have undefined behaviour if ranks make different calls
                self.agree()
            yield
            self.agree()
        except ON_ALL_RANKS:
            self._finish()
            raise
        self._finish()

    @property
    def _next_epoch(self) -> int:
        return (self._epoch + 1) % _EPOCHS

    def _begin(self, call: Call, facts: dict[str, Any]) -> None:
        self._op, self._told = call.op, json.dumps(facts).encode()
        if len(self._told) > self._MAX_TOLD:
            short = {"op": call.op, "digest": hashlib.sha256(self._told).hexdigest()}
            self._told = json.dumps(short).encode()
        self.turn.open()
        self._announce()
        if call.signal_bytes <= self.signal_bytes and call.slot_bytes <= self.slot_bytes:
            return
        # Growing is a collective, so compare first: ranks with different calls raise here instead of hanging.
        self.agree()
        self.grow(call.signal_bytes, call.slot_bytes, call.op, facts)
        self._announce()

    def _announce(self) -> None:
        self._agreed = False
        start = self._entry(self._next_epoch)
        told = torch.frombuffer(bytearray(self._told), dtype=torch.uint8)
        self._memory.views[self.rank][start + 8 : start + 8 + len(told)] = told
        address = self._memory.peers[self.rank] + start
        _native.core.store_release(address + 4, len(told))
        _native.core.store_release(address, self._next_epoch)

    def agree(self) -> None:
        """Waits until every peer has begun this call, and raises Disagreement on all if any two differ."""
        if self._agreed:
            return
        start = self._entry(self._next_epoch)
        told = []
        for peer in range(self.world_size):
            address = self._memory.peers[peer] + start
            self._wait(peer, address, None)
            length = _native.core.load_acquire(address + 4)
            told.append(bytes(self._memory.views[peer][start + 8 : start + 8 + length].tolist()))
        if any(facts != self._told for facts in told):
            self._raise_if_different(self._op, [json.loads(facts) for facts in told])
        self._agreed = True

    def slot(self, rank: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A matrix in the buffer that this call uses on `rank`. offset: bytes, if elements had 2, as layouts
        count.
        """
        start = HEADER_BYTES + self.signal_bytes + (self._next_epoch & 1) * self.slot_bytes
        start += offset * dtype.itemsize // 2
        nbytes = shape[0] * shape[1] * dtype.itemsize
        matrix: torch.Tensor = self._memory.views[rank][start : start + nbytes].view(dtype).view(shape)
        return matrix

    def signal(self, owner: int, word: int) -> None:
        """Signals to another rank that a piece of this rank's data is complete there."""
        if owner != self.rank:
            _native.core.store_release(self._signal(owner, self.rank, word), self._next_epoch)

    def wait(self, source: int, word: int, tile: int) -> None:
        """Waits for the signal of another rank, in this call, for a piece of its data here, for `tile`."""
        if source != self.rank:
            self.agree()
            self._wait(source, self._signal(self.rank, source, word), tile)

    def _finish(self) -> None:
        self._epoch = self._next_epoch
        _native.core.store_release(self._memory.peers[self.rank], self._epoch)

    def _entry(self, epoch: int) -> int:
        return self._ENTRY_BYTES * (1 + (epoch & 1))

    def _signal(self, owner: int, source: int, word: int) -> Any:
        slot = source - (source > owner)  # an owner has none of its own
        return self._memory.peers[owner] + HEADER_BYTES + 4 * (slot * self._words_per_slot + word)

    def _wait(self, peer: int, address: int, tile: int | None) -> None:
        epoch = self._next_epoch
        seen = _native.core.wait_at_least(address, epoch, self.timeout_s)
        if (seen - epoch) & 0x80000000:
            # The word at `address` has the last call of one parity, or of one tile.
            begun = [_native.core.load_acquire(self._memory.peers[peer] + self._entry(e)) for e in (0, 1)]
            seen = max(begun, key=lambda each: (each - epoch - 1) % _EPOCHS)
            how: dict[str, Any] = {"seen": seen, "tile": tile, "timeout_s": self.timeout_s}
            self.failure = CommTimeoutError(self._op, self.rank, peer, epoch, **how)
            raise self.failure
