"""Runs a function on several ranks of this host, without torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import FileIO
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import wait
from typing import Any

from flux._log import log
from flux.testing import _check, fork_server, rank_process

_START_S = 300.0  # for the imports of the fork server
_LAST_WORDS_S = 10.0
_LEAVE_S = 2.0
_KILL_S = 10.0


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended that returned nothing.

    Attributes:
        rank: which one.
        exit_code: negative if a signal killed it; None if it did not finish in time.
        traceback: of its exception, or empty.

    Example::

        from flux.testing import RankFailure

        failure = RankFailure(rank=1, exit_code=-9, traceback="")
        assert str(failure) == "rank 1 died with exit code -9"
    """

    rank: int
    exit_code: int | None
    traceback: str

    def __str__(self) -> str:
        if self.traceback:
            return f"rank {self.rank} raised:\n{self.traceback}"
        if self.exit_code is None:
            return f"rank {self.rank} did not finish in time and was killed"
        return f"rank {self.rank} died with exit code {self.exit_code}"


class SpawnError(RuntimeError):
    """One or more ranks failed.

    Attributes:
        failures: the RankFailure of each, in the order in which they were noticed.

    Example::

        from flux.testing import SpawnError, spawn

        def fail(rank: int, world_size: int) -> None:
            raise ValueError(f"no work for rank {rank}")

        if __name__ == "__main__":
            try:
                spawn(fail, 2)
            except SpawnError as error:
                assert "no work for rank" in error.failures[0].traceback
            else:
                raise SystemExit("expected SpawnError")
    """

    def __init__(self, failures: list[RankFailure]) -> None:
        self.failures = failures
        super().__init__("\n".join(str(f) for f in failures))


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    ranks_per_node: int | None = None,
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in `world_size` new processes that form the default process
    group.

    `fn` must be importable (a module-level function), its arguments and results picklable; tensors among them
    are copied. With CUDA and enough GPUs rank r uses GPU r.

    No rank outlives the call. If it raises, KeyboardInterrupt included, all ranks have ended before; if this
    process is killed, by whatever signal, they are too.

    Args:
        fn: what each rank calls.
        world_size: how many ranks.
        args: further arguments of `fn`.
        timeout_s: after that many seconds every rank still running is killed.
        backend: for init_process_group; default: nccl for CUDA and gloo for CPU tensors if there are enough
            GPUs, else gloo.
        env: environment variables of the ranks, set before torch.distributed is initialised, besides those
            of this process.
        may_die: ranks whose end without a result is expected.
        ranks_per_node: emulates nodes on this host, of so many consecutive ranks each, by FLUX_NODE; for NCCL
            too, which then exchanges through sockets between them.

    Returns:
        What fn returned on each rank, or the RankFailure of a rank that `may_die`.

    Raises:
        TypeError: an argument has another type, or cannot be pickled. No process has been started.
        ValueError: an argument is out of range. No process has been started.
        SpawnError: a rank raised, died, did not finish in time, or returned what cannot be pickled.

    Example::

        import torch

        import flux
        from flux.testing import spawn


        def total(rank, world_size, addend):
            return flux.all_reduce(torch.full((4, 8), rank + addend))


        if __name__ == "__main__":
            assert all((result == 3.0).all() for result in spawn(total, 2, 1.0))
    """
    _check.numbers(world_size, timeout_s, ranks_per_node, may_die)
    _check.backend(backend)
    _check.env(env)
    work = _check.work(fn, args)
    with rank_process.listen() as listener, _Ranks(world_size, timeout_s, may_die) as ranks:
        preparation = mp_spawn.get_preparation_data("")
        if not _check.main_can_be_imported():
            preparation.pop("init_main_from_path", None)
        preparation["authkey"] = bytes(preparation["authkey"])  # its own type refuses to be pickled
        job = rank_process.Job(
            world_size=world_size,
            work=work,
            preparation=preparation,
            env={**os.environ, **(env or {})},
            backend=backend,
            timeout_s=timeout_s,
            port=listener.getsockname()[1],
            ranks_per_node=ranks_per_node or 0,
        )
        try:
            ranks.start(job, listener)
            return ranks.collect()
        except KeyboardInterrupt as error:
            # Without the internal traceback, which would hide the user's call.
            raise error.with_traceback(None) from None


class _Ranks:
    """The processes of one call. At the end of the context all of them have ended."""

    def __init__(self, world_size: int, timeout_s: float, may_die: Collection[int]) -> None:
        self._timeout_s = timeout_s
        self._may_die = may_die
        self._results: list[Any] = [None] * world_size
        self._failures: list[RankFailure] = []
        self._pending = set(range(world_size))  # ranks without a known result or failure
        self._running: set[int] = set()
        self._answers: list[FileIO] = []
        self._talks: list[socket.socket] = []
        self._control = fork_server.client.open_call()
        self._serving = False
        self._server_lost = False
        self._deadline = time.monotonic() + _START_S

    def __enter__(self) -> _Ranks:
        return self

    def start(self, job: rank_process.Job, listener: socket.socket) -> None:
        with _memory_file() as job_file, contextlib.suppress(BrokenPipeError):  # collect() reports it
            rank_process.write(job_file.fileno(), rank_process.dumps(job))
            fork_server.send(self._control, f"start {rank_process.STORE}", [listener.fileno()])
            for rank in range(job.world_size):
                ours, theirs = socket.socketpair()
                self._talks.append(ours)
                self._answers.append(_memory_file())
                files = (theirs, self._answers[rank], job_file)
                with theirs:
                    fork_server.send(self._control, f"start {rank}", [file.fileno() for file in files])
                self._running.add(rank)

    def collect(self) -> list[Any]:
        while self._pending and not self._server_lost:
            open_ends = [talk for rank in self._pending if (talk := self._talks[rank]).fileno() >= 0]
            ready = wait([self._control, *open_ends], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                self._give_up()
                break
            for rank in [rank for rank in self._pending if self._talks[rank] in ready]:
                self._listen(rank)
            if self._control in ready:
                self._obey()
        if self._failures:
            raise SpawnError(self._failures)
        return self._results

    def _give_up(self) -> None:
        if not self._serving:
            raise RuntimeError(f"spawn: expected ranks to start within {_START_S:.0f} s, got none")
        with contextlib.suppress(BrokenPipeError):
            fork_server.send(self._control, "trace")
        time.sleep(0.5)
        self._failures += [RankFailure(rank, None, "") for rank in sorted(self._pending)]

    def _listen(self, rank: int) -> None:
        """Reads a rank's answer, if any. After the end of file, its exit status is still to come."""
        talk = self._talks[rank]
        try:
            answered = bool(talk.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except ConnectionResetError:
            answered = False
        if not answered:
            talk.close()
            return
        try:
            # Unpickling can run code. The pickle comes from a process that this call has started: only
            # that process has the file, which has no name.
            result, error = rank_process.read(self._answers[rank].fileno())
        except Exception:
            result = None
            error = f"spawn: result: expected what this process can unpickle, got\n{traceback.format_exc()}"
        self._settle(rank, RankFailure(rank, None, error) if error else None, result)

    def _obey(self) -> None:
        words, _ = fork_server.receive(self._control)
        if not words:
            self._lose_server()
        elif words[0] == "serving":
            self._serving = True
            self._deadline = time.monotonic() + self._timeout_s
        else:
            rank, what = int(words[1]), " ".join(words[2:])
            self._running.discard(rank)
            if rank == rank_process.STORE:
                log.warning("spawn: the process that holds the ranks' store %s: %s", words[0], what)
            if rank in self._pending and self._talks[rank].fileno() >= 0:
                self._listen(rank)
            if rank in self._pending:
                ended = words[0] == "ended"
                failure = RankFailure(rank, int(what), "") if ended else RankFailure(rank, None, what)
                self._settle(rank, failure)

    def _lose_server(self) -> None:
        self._server_lost = True
        status = fork_server.client.exit_status()
        if not self._serving:
            raise RuntimeError(f"spawn: the process that starts ranks died with exit code {status}")
        log.warning("spawn: the process that starts ranks died with exit code %s, and they with it", status)
        for rank in sorted(self._pending):
            self._settle(rank, RankFailure(rank, -signal.SIGKILL, ""))

    def _settle(self, rank: int, failure: RankFailure | None, result: Any = None) -> None:
        self._pending.discard(rank)
        if failure is None or rank in self._may_die:
            self._results[rank] = result if failure is None else failure
            return
        self._failures.append(failure)
        # The rank's peers will time out; their errors in the next seconds may explain the failure.
        self._deadline = min(self._deadline, time.monotonic() + _LAST_WORDS_S)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for talk in self._talks:
                talk.close()
            if kind is None:  # ranks exit when this process closes its sockets
                self._await_end(_LEAVE_S, lambda: not self._running)
            with contextlib.suppress(OSError):  # not connected: the server is gone
                self._control.shutdown(socket.SHUT_WR)  # the server kills the remaining ranks
            # A server that is still starting does not fork for a caller that has closed its socket.
            starting = not self._serving and not wait([self._control], 0.0)
            if not starting and not self._await_end(_KILL_S, lambda: False):
                log.warning("spawn: ranks have not ended within %.0f s after SIGKILL", _KILL_S)
        finally:
            fork_server.client.close_call(self._control)
            for answer in self._answers:
                answer.close()

    def _await_end(self, seconds: float, enough: Callable[[], bool]) -> bool:
        """Whether all processes of the call have ended; returns at once when there is `enough`."""
        deadline = time.monotonic() + seconds
        while not self._server_lost and not enough():
            if not wait([self._control], max(0.0, deadline - time.monotonic())):
                return False
            words, _ = fork_server.receive(self._control)
            if not words:
                return True
            if words[0] == "ended":
                self._running.discard(int(words[1]))
        return True


def _memory_file() -> FileIO:
    """An unnamed file in memory, which disappears with the last process that has it open."""
    return FileIO(os.memfd_create("flux-spawn"), "w+")
