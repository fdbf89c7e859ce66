"""Runs a function on several ranks of this host, without torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from flux._log import log
from flux.testing import _check, rank_process

_LAST_WORDS_S = 10.0
_KILL_S = 10.0
# Ranks are forked from a process that has imported torch and flux, in milliseconds.
_context = multiprocessing.get_context("forkserver")


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
    # In this process, so that no rank that is stopped or dies takes it along.
    store = rank_process.dist.TCPStore(rank_process.HOST, 0, is_master=True, wait_for_workers=False)
    job = rank_process.Job(
        world_size=world_size,
        work=work,
        env={**os.environ, **(env or {})},
        backend=backend,
        timeout_s=timeout_s,
        port=store.port,
        ranks_per_node=ranks_per_node or 0,
    )
    try:
        with _Ranks(job, may_die) as ranks:
            return ranks.collect()
    except KeyboardInterrupt as error:
        # Without the internal traceback, which would hide the user's call.
        raise error.with_traceback(None) from None


# The kernel ends a rank when the last of its writer's copies is closed, so a forked child may keep none.
_alive: set[Connection] = set()


def _close_alive() -> None:
    for writer in _alive:
        writer.close()


os.register_at_fork(after_in_child=_close_alive)


_starting = threading.Lock()


def _fork(process: ForkServerProcess) -> None:
    """Starts a process. What is no file, as the main module of a program on standard input, is hidden from
    multiprocessing, which would have ranks import it.
    """
    main = sys.modules["__main__"].__dict__
    with _starting:
        # If the caller has imported the compiler, ranks need it too: import it once for all.
        compiler = sys.modules.keys() & {"torch._dynamo", "torch._inductor.compile_fx"}
        forkserver.set_forkserver_preload([rank_process.__name__, *compiler])
        resource_tracker.ensure_running()
        # SIGINT from a terminal reaches all processes of a job. This process gets it at the end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        file = None if _check.main_can_be_imported() else main.pop("__file__", None)
        try:
            process.start()
        finally:
            if file is not None:
                main["__file__"] = file


class _Ranks:
    """The processes of one call. At the end of the context all of them have ended."""

    def __init__(self, job: rank_process.Job, may_die: Collection[int]) -> None:
        self._may_die = may_die
        self._results: list[Any] = [None] * job.world_size
        self._failures: list[RankFailure] = []
        self._processes: list[ForkServerProcess] = []
        self._answers: list[Connection] = []  # of each rank; closed when nothing more comes
        self._writers: list[Connection] = []
        try:
            for rank in range(job.world_size):
                self._start(rank, job)
        except BaseException:
            self._end()
            raise
        self._deadline = time.monotonic() + job.timeout_s

    def _start(self, rank: int, job: rank_process.Job) -> None:
        ours, theirs = _context.Pipe(duplex=False)
        alive, writer = _context.Pipe(duplex=False)
        self._answers.append(ours)
        self._writers.append(writer)
        _alive.add(writer)
        process = _context.Process(
            target=rank_process.main, args=(rank, job, theirs, alive), name=f"rank {rank}"
        )
        with theirs, alive:
            _fork(process)
        self._processes.append(process)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def collect(self) -> list[Any]:
        pending = set(range(len(self._processes)))
        while pending:
            of: dict[Any, int] = {self._processes[rank].sentinel: rank for rank in pending}
            of |= {self._answers[rank]: rank for rank in pending if not self._answers[rank].closed}
            ready = wait(list(of), max(0.0, self._deadline - time.monotonic()))
            if not ready:
                self._give_up(pending)
                break
            # What a rank has said counts before its end.
            for rank in {of[end] for end in ready}:
                if self._listen(rank) or self._has_ended(rank):
                    pending.discard(rank)
        if self._failures:
            raise SpawnError(self._failures)
        return self._results

    def _listen(self, rank: int) -> bool:
        """Reads what a rank says, if anything; whether that is its answer."""
        answer = self._answers[rank]
        try:
            if answer.closed or not answer.poll():
                return False
            data = answer.recv_bytes()
        except (EOFError, OSError):
            answer.close()
            return False
        try:
            # Unpickling can run code. It comes from a process that this call has started.
            result, error = pickle.loads(data)
            self._settle(rank, RankFailure(rank, None, error) if error else None, result)
        except Exception:
            error = f"spawn: result: expected what this process can unpickle, got\n{traceback.format_exc()}"
            self._settle(rank, RankFailure(rank, None, error))
        return True

    def _has_ended(self, rank: int) -> bool:
        code = self._processes[rank].exitcode
        if code is not None:
            self._settle(rank, RankFailure(rank, code, ""))
        return code is not None

    def _settle(self, rank: int, failure: RankFailure | None, result: Any = None) -> None:
        if failure is None or rank in self._may_die:
            self._results[rank] = result if failure is None else failure
            return
        self._failures.append(failure)
        # The rank's peers will time out; their errors in the next seconds may explain the failure.
        self._deadline = min(self._deadline, time.monotonic() + _LAST_WORDS_S)

    def _give_up(self, pending: set[int]) -> None:
        for rank in pending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        self._failures += [RankFailure(rank, None, "") for rank in sorted(pending)]

    def _end(self) -> None:
        for writer in self._writers:
            writer.close()
            _alive.discard(writer)
        end = time.monotonic() + _KILL_S
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                log.warning("spawn: %s has not ended within %.0f s after SIGKILL", process.name, _KILL_S)
        for answer in self._answers:
            answer.close()
