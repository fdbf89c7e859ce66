"""Runs a function on several ranks of this host, without torchrun."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended that returned nothing: its exit code (negative: killed by that signal) and traceback,
    if any.
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
    """One or more ranks failed. `failures` has them in the order in which they were noticed."""

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
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in `world_size` new processes that form the default process
    group.

    `fn` must be importable (a module-level function), its arguments and results picklable. With CUDA and
    enough GPUs rank r uses GPU r.

    Args:
        timeout_s: after that many seconds every rank still running is killed.
        backend: for init_process_group; default: nccl for CUDA and gloo for CPU tensors if there are enough
            GPUs, else gloo.
        env: environment variables of the ranks, set before torch.distributed is initialised.
        may_die: ranks whose end without a result is expected.

    Returns:
        What fn returned on each rank, or the RankFailure of a rank that `may_die`.

    Raises:
        SpawnError: a rank raised, died, or did not finish in time.
    """
    # The fork server imports torch once; forking this process is not an option if it has used a GPU.
    context = mp.get_context("forkserver")
    # The compiler too, if the caller has imported it: otherwise each rank that compiles does so itself.
    compiler = ["torch._dynamo"] if "torch._dynamo" in sys.modules else []
    context.set_forkserver_preload(["torch", "torch.distributed", "flux", "flux.testing.spawn", *compiler])
    # The server keeps the environment of its start, so each rank is given this one.
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="flux-spawn-") as directory:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            job = (fn, rank, world_size, args, backend, environment, f"{directory}/store", timeout_s, theirs)
            process = context.Process(target=_rank_main, args=job, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s, may_die)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    pipes: list[Connection], processes: list[Any], timeout_s: float, may_die: Collection[int]
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    failures: list[RankFailure] = []
    running = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_s
    while running:
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in running.values():
                if processes[rank].is_alive():
                    os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
            failures += [RankFailure(rank, None, "") for rank in running.values()]
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = running.pop(pipe)
            failure = None
            try:
                result, error = pipe.recv()
                failure = RankFailure(rank, None, error) if error else None
            except EOFError:
                processes[rank].join(5.0)
                result, failure = None, RankFailure(rank, processes[rank].exitcode, "")
            if failure is not None and rank in may_die:
                result, failure = failure, None
            results[rank] = result
            if failure is not None:
                failures.append(failure)
                # Its peers can only run into their timeouts now; what they say in the next seconds may
                # explain more.
                deadline = min(deadline, time.monotonic() + 10.0)
    if failures:
        raise SpawnError(failures)
    return results


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str | None,
    env: dict[str, str],
    store: str,
    timeout_s: float,
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    faulthandler.register(signal.SIGUSR1)  # where it hangs, on stderr
    os.environ.update(env)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
        if has_gpus:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = fn(rank, world_size, *args)
        pipe.send((result, ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    # Peers may still talk to this rank: it stays until the parent hangs up.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a clean exit: destroying a process group may wait for a rank that is dead.
    os._exit(0)
