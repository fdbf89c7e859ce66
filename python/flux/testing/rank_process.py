"""The code of the processes that the fork server forks for a call of `flux.testing.spawn`."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import pickle
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import process as mp_process
from multiprocessing import spawn as mp_spawn
from typing import Any, NoReturn

import torch
import torch.distributed

_dist: Any = torch.distributed  # parts of it are not typed
STORE = -1  # the rank of the process that holds the store
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """The data that every rank of a call receives.

    preparation: multiprocessing's: sys.path, working directory, main module. work: pickle of (fn, args), to
    be read after that. port: of the store. ranks_per_node: 0 for the host's own nodes.
    """

    world_size: int
    work: bytes
    preparation: dict[str, Any]
    env: dict[str, str]
    backend: str | None
    timeout_s: float
    port: int
    ranks_per_node: int


def listen() -> socket.socket:
    """The socket of a call's store, for this host only."""
    return socket.create_server((_HOST, 0))


def dumps(value: object) -> bytes:
    """Pickles by value, unlike multiprocessing, so that tensors outlive their process and need no file."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)


def read(descriptor: int) -> Any:
    """Unpickles a file in memory. Its offset is shared between processes, so it is mapped instead."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        return pickle.loads(data)


def main(rank: int, descriptors: list[int]) -> NoReturn:
    """Runs a rank, or the process of the store; never returns.

    Args:
        descriptors: of a rank a socket to the caller, a file for its answer, and one with the Job; of the
            store its listening socket.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if rank == STORE:
            _hold_store(*descriptors)
        _run(rank, *descriptors)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _hold_store(listener: int) -> None:
    """Runs the store in a separate process, so that no stopped rank or caller blocks access to it.

    A FileStore does not ensure that: ranks lock its file, and a rank that is stopped keeps the lock.
    """
    with socket.socket(fileno=listener) as listening:
        port = listening.getsockname()[1]
        store = _dist.TCPStore(
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    while store is not None:
        signal.pause()


def _run(rank: int, talk: int, answer: int, job: int) -> None:
    caller = socket.socket(fileno=talk)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1)  # shows where the rank hangs
    try:
        told = _dump_result(_call(rank, read(job)))
    except BaseException:
        told = dumps((None, traceback.format_exc()))
    write(answer, told)
    _flush()
    with contextlib.suppress(OSError):
        caller.send(b"\0", socket.MSG_NOSIGNAL)
        # Peers may still communicate with this rank, so it waits until the caller closes the socket.
        caller.recv(1)
    _flush()
    # Not a clean exit: destroying a process group may wait for a rank that is dead.
    os._exit(0)


def _call(rank: int, job: Job) -> Any:
    os.environ.clear()
    os.environ.update(job.env)
    if job.ranks_per_node:
        os.environ.update(_of_node(rank // job.ranks_per_node))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # As in multiprocessing: calling spawn in a main module without a guard raises an error.
    current: Any = mp_process.current_process()
    current._inheriting = True
    try:
        mp_spawn.prepare({**job.preparation, "name": f"rank {rank}"})
        fn, args = pickle.loads(job.work)
    finally:
        del current._inheriting
    torch.set_num_threads(1)
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= job.world_size
    if has_gpus:
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=job.timeout_s)
    _dist.init_process_group(
        job.backend or ("cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        store=_dist.TCPStore(_HOST, job.port, is_master=False, timeout=timeout),
        rank=rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    return fn(rank, job.world_size, *args)


def _of_node(node: int) -> dict[str, str]:
    """The variables of a rank on a node that others on this host are not on. NCCL then takes sockets to
    those.
    """
    return {
        "FLUX_NODE": str(node),
        "NCCL_HOSTID": f"flux-node-{node}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


def _dump_result(result: Any) -> bytes:
    try:
        return dumps((result, ""))
    except Exception as error:
        raise TypeError(
            f"spawn: result: expected what pickle can send, got {type(result).__name__}: {error}"
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None or closed
            stream.flush()
