"""The workspace of CPU ranks: processes of one host, through POSIX shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _env, _native
from flux.comm import shm
from flux.comm.group import Meeting
from flux.comm.workspace import (
    HEADER_BYTES,
    OP_IDS,
    OP_NAMES,
    PAGE_BYTES,
    Call,
    Workspace,
    call_facts,
    compare_calls,
)
from flux.errors import CommTimeoutError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class CpuWorkspace(Workspace):
    """Shared memory, and the epoch of this rank.

    Besides the epoch, the header of each rank says which call it is making, in one entry for each parity of
    the epoch (words 8..15 and 16..23): ranks that disagree find out where they would wait for each other
    anyway.
    """

    transport = "POSIX shared memory"
    _ENTRY_BYTES = 32

    def __init__(self, group: ProcessGroup, device: torch.device, op: str, meeting: Meeting) -> None:
        super().__init__(group, device, op, meeting)
        self._epoch = 0
        if self.why_not is None:
            # The headers must exist before a first call can compare itself with its peers'.
            self.grow(PAGE_BYTES, PAGE_BYTES, op, {})

    def _facts(self) -> dict[str, Any]:
        off = "FLUX_FUSED=off" if _env.get("FLUX_FUSED") == "off" else None
        return {"why_not": off or shm.why_not(), "host": shm.host_id(), "backend": "shm", "num_sms": 0}

    def _unreachable(self, facts: list[dict[str, Any]]) -> str | None:
        return None

    def _allocate(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str) -> None:
        try:
            self._memory = shm.SharedMemory(
                HEADER_BYTES + signal_bytes + 2 * slot_bytes, self.rank, self._meeting, op
            )
        except CommTimeoutError as error:
            self.failure = error
            raise
        self._epoch = 0
        # Every slot has its own words, whatever the shape of a call: a word that one source wrote in call e
        # and another in e+1 could tell the owner, still in call e, that the wrong one has arrived.
        self._words_per_slot = signal_bytes // 4 // (self.world_size - 1)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a call: one that is broken off leaves peers and epochs in an unknown state, for good."""
        self.raise_if_failed()
        before = self._epoch
        try:
            yield
        except BaseException as error:
            # An epoch that was finished all the same means that all ranks refused the call together.
            if self.failure is None and self._epoch == before:
                self.failure = RuntimeError(
                    f"flux: an earlier call on group {self.group.group_name!r} was broken off by "
                    f"{type(error).__name__}; call flux.release(group) on all ranks"
                )
            raise

    def begin(self, call: Call) -> int:
        """Tells the peers which call this is, makes room for it, and returns its epoch.

        Waits for nobody, unless it must grow.
        """
        epoch = self._announce(call)
        if self.fits(call.signal_bytes, call.slot_bytes):
            return epoch
        # Only ranks that make the same call grow together; the others say so here, and nobody waits for them.
        self.agree(call, epoch)
        self.grow(call.signal_bytes, call.slot_bytes, call.op, call_facts(call))
        return self._announce(call)

    def _announce(self, call: Call) -> int:
        epoch = self._epoch + 1
        entry = self._entry(self.rank, epoch)
        words = (
            OP_IDS[call.op],
            call.m,
            call.n,
            call.k,
            _DTYPES.index(call.dtype),
            int(call.transpose_weight),
            call.config,
        )
        for i, word in enumerate(words, start=1):
            _native.core.store_release(entry + 4 * i, word)
        _native.core.store_release(entry, epoch)
        return epoch

    def agree(self, call: Call, epoch: int) -> None:
        """Waits until every peer has begun call number `epoch`, and compares.

        No extra synchronisation: no rank can finish a call before every peer has begun it.

        Raises:
            ValueError: on all ranks, if any two make different calls. The epoch is spent.
            CommTimeoutError: a peer did not come.
        """
        told = []
        for peer in range(self.world_size):
            entry = self._entry(peer, epoch)
            self._wait(call.op, peer, entry, epoch, None)
            op_id, m, n, k, dtype, transpose_weight, config = (
                _native.core.load_acquire(entry + 4 * i) for i in range(1, 8)
            )
            told.append(
                {
                    "op": OP_NAMES[op_id],
                    "m": m,
                    "n": n,
                    "k": k,
                    "dtype": str(_DTYPES[dtype]),
                    "transpose_weight": bool(transpose_weight),
                    "config": config,
                }
            )
        try:
            compare_calls(call.op, told)
        except ValueError:
            self.finish(epoch)
            raise

    def slot(self, rank: int, epoch: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements at byte `offset` of the buffer that call `epoch` uses on `rank`."""
        start = HEADER_BYTES + self.signal_bytes + (epoch & 1) * self.slot_bytes + offset
        return self._memory.views[rank][start : start + numel * dtype.itemsize].view(dtype)

    def signal(self, rank: int, slot: int, word: int, epoch: int) -> None:
        """Tells `rank` that what this rank wrote to a piece of its slot is complete."""
        _native.core.store_release(self._signal(rank, slot, word), epoch)

    def wait(self, op: str, source: int, slot: int, word: int, epoch: int, tile: int) -> None:
        """Waits until `source` has signalled a piece of this rank's slot, which belongs to `tile`."""
        self._wait(op, source, self._signal(self.rank, slot, word), epoch, tile)

    def finish(self, epoch: int) -> None:
        """Ends a call: its epoch is spent, whether it succeeded or all ranks refused it."""
        self._epoch = epoch
        _native.core.store_release(self._memory.peers[self.rank], epoch)

    def _entry(self, rank: int, epoch: int) -> int:
        return self._memory.peers[rank] + self._ENTRY_BYTES * (1 + (epoch & 1))

    def _signal(self, rank: int, slot: int, word: int) -> int:
        return self._memory.peers[rank] + HEADER_BYTES + 4 * (slot * self._words_per_slot + word)

    def _wait(self, op: str, peer: int, address: int, epoch: int, tile: int | None) -> None:
        seen = _native.core.wait_at_least(address, epoch, self.timeout_s)
        if (seen - epoch) & 0x80000000:
            self.failure = CommTimeoutError(
                op, self.rank, peer, epoch, seen=seen, tile=tile, timeout_s=self.timeout_s
            )
            raise self.failure
