"""POSIX shared memory of the ranks of a host. Segments have names, until all have mapped them: ranks may be
in containers that share only /dev/shm, and not /proc, which a memfd would need.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import time
from pathlib import Path
from typing import Any

import torch

from flux.comm.rendezvous import Rendezvous
from flux.errors import CommTimeoutError

_DIRECTORY = Path("/dev/shm")
# The process id in the name is only for people who list the directory: in another container, the same id is
# another process.
_NAME = re.compile(r"flux-[0-9]{1,10}-[0-9a-f]{40}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# A segment without a lock belongs to a dead process, or is so new that its creator has not locked it yet.
_STALE_AFTER_S = 60.0
# Of a user whose ranks have no shared memory.
WAY_OUT = "(containers: --shm-size), or let torch carry the calls (FLUX_FUSED=off)"
_FULL = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


class NoSharedMemory(RuntimeError):
    """The ranks of a group could not share memory. Raised on all of them, with what each rank reports."""


def host_id() -> str:
    """Equal for processes that can share memory: one kernel, one /dev/shm."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{_DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


def why_not() -> str | None:
    if not os.access(_DIRECTORY, os.R_OK | os.W_OK | os.X_OK):
        return f"{_DIRECTORY} is not there or not writable"
    return None


class SharedMemory:
    """Zeroed bytes of every rank, mapped by all. An exception leaves no name, mapping or file open."""

    def __init__(self, nbytes: int, rank: int, rendezvous: Rendezvous, op: str) -> None:
        self.nbytes = nbytes
        self.views: list[torch.Tensor] = []  # the bytes of each rank
        names = [f"flux-{os.getpid()}-{secrets.token_hex(20)}"]
        try:
            try:
                try:
                    self._share(names, rank, rendezvous, op)
                finally:
                    _remove(names)
            finally:
                _remove(names)  # again, in case an interrupt ended the first
            self.peers = [view.data_ptr() for view in self.views]  # the addresses of these
        except BaseException:
            # A traceback may keep this object alive, but must not keep the memory mapped.
            self.views.clear()
            raise

    def _share(self, names: list[str], rank: int, rendezvous: Rendezvous, op: str) -> None:
        """Fills `views`. `names` holds this rank's name; the names of all ranks are added."""
        _remove_stale()
        error, full = "", False
        try:
            self.views.append(_create(names[0], self.nbytes))
        except (OSError, OverflowError) as e:
            full = isinstance(e, OverflowError) or e.errno in _FULL
            error = f"{self.nbytes} bytes in {_DIRECTORY}, {_free()} free: {e}"
        facts = rendezvous.exchange(op, {"name": names[0], "error": error, "full": full})
        told = [_name(fact.get("name")) for fact in facts]
        # Add the names of all ranks, because a peer that has died cannot remove its own.
        names.extend(name for name in told if name)
        errors = [
            _text(fact.get("error")) if name else f"expected a segment's name, got {fact.get('name')!r:.80}"
            for fact, name in zip(facts, told, strict=True)
        ]
        need = f". The {len(facts)} ranks of the group need {len(facts) * self.nbytes} bytes there"
        is_full = any(fact.get("full") for fact in facts)
        raise_if_any(op, errors, f"{need}: remove files, or enlarge it {WAY_OUT}" if is_full else "")

        error, gone = "", None
        for peer, name in enumerate(names[1:]):
            if peer != rank and not error and gone is None:
                try:
                    self.views.append(_open(name, self.nbytes))
                except FileNotFoundError:
                    gone = peer
                except (OSError, ValueError) as e:
                    error = f"segment of rank {peer}: {e}"
        facts = rendezvous.exchange(op, {"error": error, "gone": gone})
        for finder, fact in enumerate(facts):
            # A segment is missing only if its rank has stopped waiting for the others and removed it.
            if isinstance(lost := fact.get("gone"), int):
                detail = f"It removed its segment before rank {finder} had opened it."
                raise CommTimeoutError(op, rank, lost, 0, detail=detail)
        raise_if_any(op, [_text(fact.get("error")) for fact in facts])
        self.views.insert(rank, self.views.pop(0))


def _name(name: object) -> str | None:
    """The name if it is one of a segment: no path out of the directory, no file of others."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def _text(error: object) -> str:
    return error if isinstance(error, str) else f"expected an error message, got {error!r:.80}"


def raise_if_any(op: str, errors: list[str], advice: str = "") -> None:
    told = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if told:
        raise NoSharedMemory(f"flux.{op}: no shared memory: " + "; ".join(told) + advice)


def _create(name: str, nbytes: int) -> torch.Tensor:
    """A new segment, mapped and locked."""
    with _file(name, _FLAGS | os.O_CREAT | os.O_EXCL) as file:
        # The mapping keeps the lock, so the lock lasts as long as the segment is in use, in any container.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink != 1:
            raise OSError(errno.ESTALE, "removed before it could be locked", name)
        # A sparse file would turn a full /dev/shm (64 MB in a default container) into SIGBUS later.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return _map(file, nbytes)


def _open(name: str, nbytes: int) -> torch.Tensor:
    """A peer's segment, mapped. Raises ValueError if the file is not a private segment of `nbytes` bytes."""
    with _file(name, _FLAGS) as file:
        # fstat of the open file, not of its path, which could name another file by now.
        found = os.fstat(file.fileno())
        is_file, letter = stat.S_ISREG(found.st_mode), stat.filemode(found.st_mode)[0]
        checks: tuple[tuple[str, Any, Any], ...] = (
            ("type", "regular file", "regular file" if is_file else f"file of type {letter}"),
            ("owner", f"uid {os.geteuid()}", f"uid {found.st_uid}"),
            ("access of others", "none", oct(found.st_mode & 0o077) if found.st_mode & 0o077 else "none"),
            ("links", 1, found.st_nlink),
            ("bytes", nbytes, found.st_size),
        )
        for what, expected, got in checks:
            if got != expected:
                raise ValueError(f"{what}: expected {expected}, got {got}")
        return _map(file, nbytes)


def _file(name: str, flags: int) -> io.FileIO:
    # Inside map() no signal handler runs, so an interrupt cannot leak the descriptor before FileIO owns it.
    (file,) = map(io.FileIO, map(os.open, [_DIRECTORY / name], [flags], [0o600]), ["r+"])
    return file


@torch.inference_mode(False)  # later calls write to it in other modes
def _map(file: io.FileIO, nbytes: int) -> torch.Tensor:
    mapped = mmap.mmap(file.fileno(), nbytes)
    mapped.madvise(mmap.MADV_DONTFORK)  # a forked child must not write for its parent, nor keep the memory
    return torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive


def _free() -> str:
    with contextlib.suppress(OSError):
        return str(shutil.disk_usage(_DIRECTORY).free)
    return "unknown"


def _remove(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(_DIRECTORY / name)


def _remove_stale() -> None:
    """Removes this user's segments whose processes were killed before they could remove them."""
    with contextlib.suppress(OSError), os.scandir(_DIRECTORY) as entries:
        for entry in entries:
            if _name(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry)


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    def removable(found: os.stat_result) -> bool:
        old = time.time() - found.st_mtime > _STALE_AFTER_S
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and old

    if not removable(entry.stat(follow_symlinks=False)):  # opening a file of another user may have effects
        return
    with _file(entry.name, _FLAGS) as file:
        if removable(os.fstat(file.fileno())):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its creator lives
            os.unlink(_DIRECTORY / entry.name)
