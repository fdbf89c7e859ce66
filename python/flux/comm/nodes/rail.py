"""Rails: ranks with the same number in their nodes, which exchange data by NCCL (GPUs) or gloo (CPUs)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
from torch import Tensor

# Parts of these are not typed.
_c10d: Any = torch.distributed.distributed_c10d
_dist: Any = dist
_cuda: Any = torch.cuda
_torch_c: Any = torch._C

# CTAs of an exchange by NCCL, and so the SMs that launches leave free while one is on its way. Four move the
# bytes of a 400 Gbit/s NIC.
NCCL_CTAS = 4
# torch's watchdog ends the process when NCCL's own timeout passes, so that is far beyond flux's deadline.
_WATCHDOG_MARGIN = 20


class RailError(RuntimeError):
    """An exchange did not finish: `node` did not come in time, or its connection broke."""

    def __init__(self, node: int, detail: str) -> None:
        self.node = node
        super().__init__(detail)


class Transfer(Protocol):
    """Data on its way between nodes."""

    def wait(self) -> None:
        """After this, received data may be read and sent data overwritten: on a GPU by what is enqueued on
        the current stream from now on. On CPUs RailError if a node did not come in time; GPUs: see watch.py.
        """


class Rail(ABC):
    """Ranks, counted by their nodes, that make the same calls in the same order. Tensors are contiguous, of
    equal size on all ranks, on the rail's device, and belong to a transfer until its wait. On a GPU it starts
    after what the current stream holds so far, and takes `sms` SMs. `bytes_sent`: to other nodes.
    """

    engine: str  # name for users
    sms = 0

    def __init__(self, nodes: int, node: int) -> None:
        self.nodes, self.node, self.bytes_sent = nodes, node, 0

    @abstractmethod
    def swap(self, send: Tensor, to: int, receive: Tensor, source: int) -> Transfer:
        """Sends to one node and receives from another. A pair may have eight transfers on their way."""

    def gather(self, x: Tensor, out: Tensor) -> Transfer:
        """out [nodes, ...]: x of every node."""
        out[self.node].copy_(x)
        pairs = shifts(self.nodes, self.node)
        return Together(*(self.swap(x, to, out[source], source) for to, source in pairs))

    def alltoall(self, send: Tensor, receive: Tensor) -> Transfer:
        """send [nodes, ...]: a part for every node; receive [nodes, ...]: from every node."""
        receive[self.node].copy_(send[self.node])
        pairs = shifts(self.nodes, self.node)
        return Together(*(self.swap(send[to], to, receive[source], source) for to, source in pairs))

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers, also those on their way, without waiting for other ranks."""


def shifts(nodes: int, node: int) -> list[tuple[int, int]]:
    """The steps of an exchange of all nodes with all: the node to send to, and that to receive from."""
    return [((node + step) % nodes, (node - step) % nodes) for step in range(1, nodes)]


class Together:
    def __init__(self, *transfers: Transfer) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()


class GlooRail(Rail):
    """CPU tensors, through gloo. Its messages are counted, so that no rank takes one for another."""

    engine = "gloo"

    def __init__(self, store: Any, nodes: int, node: int, timeout_s: float) -> None:
        super().__init__(nodes, node)
        self._deadline = timedelta(seconds=timeout_s)
        self._backend: Any = _dist.ProcessGroupGloo(store, node, nodes, self._deadline)
        self._count = 0

    def swap(self, send: Tensor, to: int, receive: Tensor, source: int) -> Transfer:
        self.bytes_sent += send.nbytes
        self._count += 1
        if send.numel() == 0:
            return Together()
        if self._backend is None:
            raise RailError(source, "the rail is closed")
        with _naming(source):
            coming = self._backend.recv([receive], source, self._count)
        with _naming(to):
            going = self._backend.send([send], to, self._count)
        # `receive` first: a node that has not come is better named by what it owes.
        return Together(_GlooWork(coming, source, self._deadline), _GlooWork(going, to, self._deadline))

    def close(self) -> None:
        # gloo cannot abort a transfer, but its connections close, and peers notice at once.
        self._backend = None


class _GlooWork(NamedTuple):
    work: Any
    node: int
    deadline: timedelta

    def wait(self) -> None:
        with _naming(self.node):
            self.work.wait(self.deadline)


@contextmanager
def _naming(node: int) -> Iterator[None]:
    """Makes errors of gloo those of a node."""
    try:
        yield
    except RuntimeError as error:
        raise RailError(node, (str(error).strip().splitlines() or [type(error).__name__])[0]) from error


class NcclRail(Rail):
    """CUDA tensors, by a communicator of its own, of few CTAs. No host waits: `on_start` keeps deadlines."""

    engine = "NCCL"
    sms = NCCL_CTAS

    def __init__(self, backend: Any, nodes: int, node: int) -> None:
        super().__init__(nodes, node)
        self._backend = backend
        self.on_start: Callable[[NcclTransfer], None] = lambda transfer: None

    @staticmethod
    def make_backend(store: Any, nodes: int, node: int, timeout_s: float) -> Any:
        options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=_WATCHDOG_MARGIN * timeout_s)
        options.config.min_ctas, options.config.max_ctas = 1, NCCL_CTAS
        return _dist.ProcessGroupNCCL(store, node, nodes, options)

    def swap(self, send: Tensor, to: int, receive: Tensor, source: int) -> Transfer:
        # NCCL groups the messages, and leaves out those without bytes: a swap involves no third node.
        going, coming = [0] * self.nodes, [0] * self.nodes
        going[to], coming[source] = send.nbytes, receive.nbytes
        return self._begin("alltoall_base", send, receive, send.nbytes, coming, going)

    def alltoall(self, send: Tensor, receive: Tensor) -> Transfer:
        parts = [send.nbytes // self.nodes] * self.nodes
        return self._begin("alltoall_base", send, receive, send.nbytes - parts[self.node], parts, parts)

    def gather(self, x: Tensor, out: Tensor) -> Transfer:
        return self._begin("_allgather_base", x, out, (self.nodes - 1) * x.nbytes)

    def _begin(self, name: str, send: Tensor, receive: Tensor, sent: int, *sizes: list[int]) -> Transfer:
        self.bytes_sent += sent
        if send.numel() == 0:
            return Together()
        reached = None
        if send.is_cuda:
            reached = _cuda.Event()
            reached.record()
        options = _dist.AllToAllOptions() if sizes else _c10d.AllgatherOptions()
        options.asyncOp = True
        given = (each.view(-1).view(torch.uint8) for each in (receive, send))
        transfer = NcclTransfer(getattr(self._backend, name)(*given, *sizes, options), reached, receive)
        self.on_start(transfer)
        return transfer

    def close(self) -> None:
        # Kernels of NCCL that wait for a peer end too, so the stream goes on.
        self._backend.abort()


class NcclTransfer:
    """Keeps no tensor alive: torch does, until wait(); then the stream orders any reuse of the memory."""

    _FILL_BYTES = 1 << 20

    def __init__(self, work: Any, reached: Any, receive: Tensor) -> None:
        self._work = work
        self._reached = reached  # the event behind which it starts; None: at once
        self._received = (receive.data_ptr(), receive.nbytes, receive.device)

    def wait(self) -> None:
        self._work.wait()

    def has_started(self) -> bool:
        """Whether the stream has come as far as this transfer."""
        return self._reached is None or bool(self._reached.query())

    def has_finished(self) -> bool:
        return bool(self._work.is_completed())

    def poison(self) -> None:
        """Makes NaN of what it receives, and waits for that; by a copy engine, as SMs may all be busy."""
        address, nbytes, device = self._received
        storage = _torch_c._construct_storage_from_data_pointer(address, device, nbytes)
        memory: Any = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        ones = torch.full((min(nbytes, self._FILL_BYTES),), 0xFF, dtype=torch.uint8).pin_memory()
        stream = _cuda.Stream(device)
        with _cuda.stream(stream):
            for part in memory.split(self._FILL_BYTES):
                part.copy_(ones[: part.numel()], non_blocking=True)
        stream.synchronize()
