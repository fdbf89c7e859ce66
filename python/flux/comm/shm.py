"""POSIX shared memory between the ranks of one host, for CPU tensors.

Every rank makes one file in /dev/shm, everybody maps everybody's, and the names are removed as soon as all
have: what a crashed process leaves behind is freed by the kernel with the last mapping.
"""

from __future__ import annotations

import mmap
import os
import socket
import uuid
from pathlib import Path

import torch

from flux.comm.group import Meeting

_DIRECTORY = Path("/dev/shm")


class NoSharedMemory(RuntimeError):
    """A rank could not make or map its part. Raised on all ranks alike."""


def host_id() -> str:
    """Equal for processes that can share memory: one kernel, one /dev/shm."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{_DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


def why_not() -> str | None:
    """Why this process cannot share memory, or None."""
    if not os.access(_DIRECTORY, os.R_OK | os.W_OK | os.X_OK):
        return f"{_DIRECTORY} is not there or not writable"
    return None


class SharedMemory:
    """The same number of zeroed bytes on every rank, mapped by all.

    Attributes:
        views: for every rank, its bytes as a uint8 tensor.
        peers: for every rank, the address of its bytes in this process.
        nbytes: bytes per rank.
    """

    def __init__(self, nbytes: int, rank: int, meeting: Meeting, op: str) -> None:
        path = _DIRECTORY / f"flux-{os.getpid()}-{uuid.uuid4().hex}"
        error = ""
        names = [str(path)]
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                # A sparse file would turn a full /dev/shm (64 MB in a default container) into SIGBUS later.
                os.posix_fallocate(fd, 0, nbytes)
                own = _map(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as e:
            error = f"{nbytes} bytes in {_DIRECTORY}: {e}"
        try:
            facts = meeting.exchange(op, {"path": str(path), "error": error})
            names = [f["path"] for f in facts]
            errors = [f"rank {r}: {f['error']}" for r, f in enumerate(facts) if f["error"]]
            if errors:
                raise NoSharedMemory(f"flux.{op}: no shared memory: " + "; ".join(errors))
            self.views = [own if r == rank else _open(f["path"], nbytes) for r, f in enumerate(facts)]
            meeting.exchange(op, {})
        finally:
            # All of them: a peer that has died since cannot remove its own.
            for name in names:
                Path(name).unlink(missing_ok=True)
        self.peers = [view.data_ptr() for view in self.views]
        self.nbytes = nbytes


def _open(path: str, nbytes: int) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
