"""The workspace of GPUs that can access each other's memory."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _env, _native
from flux.comm import repeat, shm, symm_mem
from flux.comm.group import name_of, why_fake
from flux.comm.workspace import HEADER_BYTES, NOTHING, OP_NAMES, Call, Met, Same, Workspace, call_facts, grown
from flux.errors import CommTimeoutError

_cuda: Any = torch.cuda  # parts of it are not typed
# By device (flux._core.LaunchOrder).
_orders: dict[int, Any] = {}
_COMPARED: AbstractContextManager[None] = nullcontext()
# ErrorRecord::code (csrc/runtime/symm_buffer.h).
_PEER_GAVE_UP, _OVERLAP = 2, 3


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why flux's kernels cannot run on a CUDA device, or None."""
    if (reason := _native.why_not()) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return None
    return f"{device} has compute capability {major}.{minor}, the kernels need 9.0"


def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def refuse_capture(group: ProcessGroup, op: str) -> None:
    """Raises RuntimeError during the capture of a CUDA graph, which cannot contain an allocation."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: group {name_of(group)!r} has no workspace large enough for this call, and a CUDA graph "
            "cannot capture its allocation. On all ranks, call flux.expect_graphs(group=) before the steps "
            "that precede the capture, or before the capture flux.reserve(group=, max_m=, max_n=, max_k=, "
            "dtype=)."
        )


class CudaWorkspace(Workspace):
    """Symmetric memory. The device counts the epoch, so that CUDA graphs can replay calls; copy engines have
    buffers of their own, whose epoch the host counts, because it must know where a copy goes.
    """

    carrier = "kernel"
    _same: Same = NOTHING  # arguments of the current call that ranks compare if the workspace grows

    def __init__(self, met: Met) -> None:
        super().__init__(met)
        backend = _env.get("FLUX_SYMM_BACKEND")
        self.transport = f"stores to peers' symmetric memory (torch's {backend} backend)"
        self._memory: symm_mem.SymmetricMemory | None = None
        self._symm_buffer: Any = None
        self._address = 0
        self._launch, self._copy_launch = Launch(self, copies=False), Launch(self, copies=True)
        self._index = met.device.index
        self._order = _orders.get(self._index) or _orders.setdefault(self._index, _native.core.LaunchOrder())
        self._captured = False
        self._kept: list[Any] = []
        self._copy_region: tuple[symm_mem.SymmetricMemory, Any] | None = None
        self._copy_address = 0
        self._copy_room = (0, 0)  # signal_bytes and slot_bytes of the buffers for copy engines
        if self.why_not is None:
            # Lazy loading of a kernel can hang behind a kernel that spins, so load all kernels now.
            torch.ops.flux._prepare()
            # Pinned: kernels write it, the host reads it without synchronising.
            self._error = torch.zeros(16, dtype=torch.int32, pin_memory=True)
            self._error_address = self._error.data_ptr()
            # The first word is written last. Reading it directly takes less host time than core.read_error.
            self._error_code = ctypes.c_uint32.from_address(self._error_address)
            self.known = repeat.make(self.turn, self._order, self._error_address, str(met.group.group_name))

    @classmethod
    def handshake(cls, group: ProcessGroup, device: torch.device) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(device)
        off = "FLUX_FUSED=off" if _env.get("FLUX_FUSED") == "off" else None
        return {
            "why_not": off or why_fake(group) or why_not(device) or symm_mem.why_not(group, device),
            "host": shm.host_id(),
            "backend": _env.get("FLUX_SYMM_BACKEND"),
            "num_sms": properties.multi_processor_count,
            # With blocking launches the host waits for a copy before it launches the kernel that the copy
            # waits for: a deadlock.
            "copies": os.environ.get("CUDA_LAUNCH_BLOCKING") != "1",
            "uuid": str(properties.uuid),
        }

    def _unreachable(self, facts: list[dict[str, Any]]) -> str | None:
        return symm_mem.unreachable_peer(self.device, [f["uuid"] for f in facts], self.rank)

    def _allocate(self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str) -> None:
        if self._captured:
            self._kept.append((self._memory, self._symm_buffer))
        self._captured = False
        self._memory, self._symm_buffer = self._make_region(signal_bytes, slot_bytes, exchange_bytes, op)
        self.known.clear()  # their launches have the address of the old buffers
        self._address = int(self._symm_buffer.address)

    def _make_region(
        self, signal_bytes: int, slot_bytes: int, exchange_bytes: int, op: str
    ) -> tuple[symm_mem.SymmetricMemory, Any]:
        # Peers may write to the old buffers until they have reached this point too.
        torch.cuda.synchronize(self.device)
        met = self._tell(op, {"rendezvous": symm_mem.rendezvous_count})
        nbytes = HEADER_BYTES + signal_bytes + 2 * (slot_bytes + exchange_bytes)
        counts = [facts["rendezvous"] for facts in met]
        memory = symm_mem.SymmetricMemory(nbytes, self.group, self.device, counts)
        sizes = (signal_bytes, slot_bytes, exchange_bytes)
        until = (self._error_address, int(self.timeout_s * 1e9))
        symm_buffer = _native.core.SymmBuffer(self.rank, self.world_size, memory.peers, *sizes, *until)
        if exchange_bytes:
            memory.tensor[nbytes - 2 * exchange_bytes :].fill_(0xFF)  # kAbsent: no data has arrived
            torch.cuda.synchronize(self.device)
        # A barrier: no rank may write to a peer's buffers before they are initialised.
        self._meet(op, {})
        return memory, symm_buffer

    def calling(self, call: Call, same: Same) -> AbstractContextManager[None]:
        """Compares calls with FLUX_DEBUG=compare, and where the workspace grows: that synchronises hosts."""
        self.raise_if_failed()
        self._same = same
        if self.compares_contents and not torch.cuda.is_current_stream_capturing():
            self._compare(call.op, call_facts(call, same, True))
        return _COMPARED

    def enter(self, call: Call) -> Launch:
        """Of a launch on the current stream; synchronises only to grow. Yields the SymmBuffer's address, and
        the epoch of copy engines, or 0: the device counts.
        """
        if self._error_code.value:
            self._raise_timeout(call.op)
        if call.copied_now():
            if not self._fits_copy(call.signal_bytes, call.slot_bytes):
                facts = call_facts(call, self._same, False)
                self.reserve_copy(call.signal_bytes, call.slot_bytes, call.op, facts)
            return self._copy_launch
        if not self.fits(call.signal_bytes, call.slot_bytes, call.exchange_bytes):
            refuse_capture(self.group, call.op)
            facts = call_facts(call, self._same, False)
            self.grow(call.signal_bytes, call.slot_bytes, call.op, facts, call.exchange_bytes)
        return self._launch

    def reserve_copy(self, signal_bytes: int, slot_bytes: int, op: str, facts: dict[str, Any]) -> None:
        """As grow, of the buffers for copy engines."""
        if self._fits_copy(signal_bytes, slot_bytes):
            return
        self._compare(op, facts)
        signals, slots = map(grown, self._copy_room, (signal_bytes, slot_bytes))
        self._copy_region = self._make_region(signals, slots, 0, op)
        self._copy_address, self._copy_room = int(self._copy_region[1].address), (signals, slots)
        self.known.clear()
        self.known.copy_epoch = 0

    def _fits_copy(self, signal_bytes: int, slot_bytes: int) -> bool:
        return signal_bytes <= self._copy_room[0] and slot_bytes <= self._copy_room[1]

    def _follow_last_call(self) -> None:
        stream, order = torch._C._cuda_getCurrentRawStream(self._index), self._order
        if stream != order.stream or order.event is not None:
            current = torch.cuda.current_stream(self.device)
            event, order.event = order.event, None
            if order.stream is not None:
                # Calls must run in program order across all streams and groups: a kernel occupies all its SMs
                # while it waits for its peers, which may be waiting for the other call of this rank.
                if event is None:
                    event = _cuda.ExternalStream(order.stream, device=self.device).record_event()
                current.wait_event(event)
            order.stream = stream
            # Torch's own streams have odd ids, the default stream id 0.
            if current.stream_id != 0 and current.stream_id % 2 == 0:
                # An external stream may be destroyed before the next call, so record the event now, not then.
                order.event = _cuda.Event()
            else:
                order.lasts(stream)

    def remember(self, recipe: repeat.Recipe, *given: Any, **how: Any) -> None:
        """repeat.remember, unless ranks compare all calls, or a CUDA graph captures this one."""
        if not self.compares_contents and not torch.cuda.is_current_stream_capturing():
            repeat.remember(self.known, recipe, *given, **how)

    def remember_parts(self, recipe: repeat.Recipe, count: int) -> None:
        if not self.compares_contents and not torch.cuda.is_current_stream_capturing():
            repeat.remember_parts(self.known, recipe, count)

    def check(self) -> None:
        self.raise_if_failed()
        self._raise_timeout("check")

    def _raise_timeout(self, op: str) -> None:
        if self.failure is not None:
            raise self.failure
        if self.why_not is not None or not self._error_code.value:
            return
        op_id, rank, peer, tile, expected, seen = _native.core.read_error(self._error_address)
        if self._error_code.value == _OVERLAP:
            self.failure = RuntimeError(
                f"flux.{op}: two launches used the workspace of group {name_of(self.group)!r} at the same "
                "time, and may have corrupted each other's results. Order the branches of a CUDA graph, and "
                "graphs that are replayed on several streams, or use a group for each. "
                "flux.release(group=group) makes the group usable again."
            )
            raise self.failure
        how: dict[str, Any] = {"tile": tile, "timeout_s": self.timeout_s}
        if self._error_code.value == _PEER_GAVE_UP:
            gone = f"Rank {peer} has given up waiting, and may have overwritten what this rank read."
            how = {"detail": gone}
        self.failure = CommTimeoutError(OP_NAMES.get(op_id, op), rank, peer, expected, seen=seen, **how)
        raise self.failure

    def release(self) -> None:
        if self.why_not is None:
            torch.cuda.synchronize(self.device)
        super().release()


class Launch:
    """Of a call's launch: yields the address of its SymmBuffer and its epoch, which copy engines use up."""

    __slots__ = ("_copies", "_workspace")

    def __init__(self, workspace: CudaWorkspace, copies: bool) -> None:
        self._workspace, self._copies = workspace, copies

    def __enter__(self) -> tuple[int, int]:
        workspace = self._workspace
        workspace._order.acquire()
        try:
            if not self._copies and torch.cuda.is_current_stream_capturing():
                workspace._captured = True
            else:
                workspace._follow_last_call()
            workspace.turn.open()
        except BaseException:
            workspace._order.release()
            raise
        if not self._copies:
            return workspace._address, 0
        workspace.known.copy_epoch += 1
        return workspace._copy_address, workspace.known.copy_epoch

    def __exit__(self, *_: object) -> None:
        order = self._workspace._order
        try:
            if order.event is not None and not torch.cuda.is_current_stream_capturing():
                order.event.record(torch.cuda.current_stream(self._workspace.device))
        finally:
            order.release()
