"""Rails through POSIX shared memory: nodes that are processes of one host, for CPU tensors.

Stands in for an engine that puts data into symmetric memory of another node, followed by a signal, as NVSHMEM
does. It tests the algorithm of such an engine, not its transport.

Every rank of a rail holds the same layout:

    u32 arrived[nodes]    puts of each source so far; written by the source
    u32 taken[nodes]      own puts that each receiver has taken; written by the receiver
    then nodes * MAX_IN_FLIGHT slots: put number q of a source goes to its slot (q - 1) % MAX_IN_FLIGHT
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from flux import _native
from flux.comm.group import Rendezvous
from flux.comm.nodes.rail import MAX_IN_FLIGHT, Rail, RailError, Transfer
from flux.comm.shm import NoSharedMemory, SharedMemory
from flux.comm.workspace import round_up
from flux.errors import CommTimeoutError

_WORD = 4
_FIRST_SLOT_BYTES = 1 << 16


class SymmetricRail(Rail):
    """CPU tensors, through shared memory. Making one is a collective of the rail."""

    engine = "symmetric memory"

    def __init__(self, rendezvous: Rendezvous, nodes: int, node: int, timeout_s: float, op: str) -> None:
        super().__init__(nodes, node)
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._op = op
        rendezvous.begin(op)
        self._memory = _Memory(rendezvous, nodes, node, _FIRST_SLOT_BYTES, op)
        self._closed = False

    def swap(self, send: Tensor, to: int, receive: Tensor, source: int) -> Transfer:
        if self._closed:
            raise RailError(source, "the rail is closed")
        if send.nbytes > self._memory.slot_bytes:
            # All ranks of the rail come here in the same swap. Transfers on their way keep the old memory.
            room = round_up(max(send.nbytes, 3 * self._memory.slot_bytes // 2))
            try:
                self._memory = _Memory(self._rendezvous, self.nodes, self.node, room, self._op)
            except CommTimeoutError as error:
                raise RailError(error.peer, "it did not come to the rail") from error
            except NoSharedMemory as error:
                raise RailError(self.node, str(error)) from error
        self._memory.put(send, to, self._timeout_s)
        self.bytes_sent += send.nbytes
        return self._memory.expect(receive, source, self._timeout_s)

    def close(self) -> None:
        self._closed = True


class _Memory:
    """The segments of a rail's ranks, and the puts and receipts counted in them."""

    def __init__(self, rendezvous: Rendezvous, nodes: int, node: int, slot_bytes: int, op: str) -> None:
        self.slot_bytes = slot_bytes
        self._nodes = nodes
        self._node = node
        self._first = round_up(2 * nodes * _WORD)
        self._shared: Any = SharedMemory(
            self._first + nodes * MAX_IN_FLIGHT * slot_bytes, node, rendezvous, op
        )
        self._puts = [0] * nodes
        self._expected = [0] * nodes
        self._coming: list[deque[_Receipt]] = [deque() for _ in range(nodes)]

    def put(self, data: Tensor, to: int, timeout_s: float) -> None:
        self._puts[to] += 1
        number = self._puts[to]
        if number > MAX_IN_FLIGHT:
            _wait(self._taken(self._node, to), number - MAX_IN_FLIGHT, to, timeout_s)
        if data.nbytes:
            self._slot(to, self._node, number, data.nbytes).copy_(data.view(-1).view(torch.uint8))
        _native.core.store_release(self._arrived(to, self._node), number)

    def expect(self, receive: Tensor, source: int, timeout_s: float) -> Transfer:
        self._expected[source] += 1
        receipt = _Receipt(self, receive, source, self._expected[source], timeout_s)
        self._coming[source].append(receipt)
        return receipt

    def take(self, receipt: _Receipt) -> None:
        """Receives all that a source has sent up to a receipt, in order, so that its slots become free in
        order.
        """
        coming = self._coming[receipt.source]
        while not receipt.taken:
            first = coming[0]
            _wait(self._arrived(self._node, first.source), first.number, first.source, first.timeout_s)
            out = first.receive
            if out.nbytes:
                data = self._slot(self._node, first.source, first.number, out.nbytes)
                out.view(-1).view(torch.uint8).copy_(data)
            _native.core.store_release(self._taken(first.source, self._node), first.number)
            first.taken = True
            coming.popleft()

    def _arrived(self, owner: int, source: int) -> int:
        return int(self._shared.peers[owner]) + _WORD * source

    def _taken(self, owner: int, receiver: int) -> int:
        return int(self._shared.peers[owner]) + _WORD * (self._nodes + receiver)

    def _slot(self, owner: int, source: int, number: int, nbytes: int) -> Tensor:
        index = source * MAX_IN_FLIGHT + (number - 1) % MAX_IN_FLIGHT
        start = self._first + index * self.slot_bytes
        view: Tensor = self._shared.views[owner][start : start + nbytes]
        return view


class _Receipt:
    """What will have arrived after wait()."""

    def __init__(self, memory: _Memory, receive: Tensor, source: int, number: int, timeout_s: float) -> None:
        self._memory = memory
        self.receive = receive
        self.source = source
        self.number = number
        self.timeout_s = timeout_s
        self.taken = False

    def wait(self) -> None:
        self._memory.take(self)


def _wait(address: int, number: int, node: int, timeout_s: float) -> None:
    seen = _native.core.wait_at_least(address, number, timeout_s)
    if (seen - number) & 0x80000000:
        raise RailError(node, f"{seen} of {number} messages have come")
