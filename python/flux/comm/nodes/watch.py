"""Deadlines of exchanges on GPUs, as NCCL's kernels wait for ever: a thread fills what is late with NaN, that
no result hides, and aborts the communicator. The stream goes on; the next call raises.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable

from flux._log import log
from flux.comm.nodes.rail import NcclTransfer


class Watch:
    """Looks after the transfers of a rail, in order; a deadline counts from when the stream comes to one."""

    def __init__(
        self, timeout_s: float, someone_failed: Callable[[], int | None], give_up: Callable[[str], None]
    ) -> None:
        self._timeout_s, self._someone_failed, self._give_up = timeout_s, someone_failed, give_up
        self._transfers: deque[tuple[NcclTransfer, int]] = deque()
        self._due_since: float | None = None
        self._count = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self, transfer: NcclTransfer) -> None:
        with self._lock:
            self._drop_finished()
            self._count += 1
            self._transfers.append((transfer, self._count))
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="flux watch", daemon=True)
            atexit.register(self.stop)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. When the interpreter exits, it must not be inside a library."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        pause = min(0.5, self._timeout_s / 10)
        while not self._stopped.wait(pause):
            try:
                if self.look(time.monotonic()):
                    return
            except Exception:
                log.exception("flux: the thread that keeps the deadlines of exchanges between nodes failed")
                return

    def look(self, now: float) -> bool:
        """Looks once, at a time in seconds. Returns whether it has given up."""
        with self._lock:
            self._drop_finished()
            if not self._transfers:
                return False
            transfer, number = self._transfers[0]
        if self._someone_failed() is None:
            if not transfer.has_started():  # the GPU is still busy with what comes before
                return False
            if self._due_since is None:
                self._due_since = now
            if now - self._due_since < self._timeout_s:
                return False
        with self._lock:
            for late, _ in self._transfers:
                late.poison()
        self._give_up(f"exchange number {number}")
        return True

    def _drop_finished(self) -> None:
        while self._transfers and self._transfers[0][0].has_finished():
            self._transfers.popleft()
            self._due_since = None
