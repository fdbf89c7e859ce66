"""The code of a rank that `flux.testing.spawn` starts."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # parts of it are not typed
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """What every rank of a call receives.

    work: pickle of (fn, args). port: of the store. ranks_per_node: 0 for the host's own nodes.
    """

    world_size: int
    work: bytes
    env: dict[str, str]
    backend: str | None
    timeout_s: float
    port: int
    ranks_per_node: int


def dumps(value: object) -> bytes:
    """Pickles by value, unlike multiprocessing, so that tensors outlive their process and need no file."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def main(rank: int, job: Job, caller: Connection, alive: Connection) -> None:
    """Runs a rank, which ends when `alive` is closed: by the caller, or by the caller's death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The kernel does it, also to a rank that is stopped or waits in native code.
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if alive.poll():  # closed before that
        os._exit(1)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR1)  # shows where the rank hangs
    try:
        told = _dump_result(_call(rank, job))
    except BaseException:
        told = dumps((None, traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None or closed
            stream.flush()
    caller.send_bytes(told)
    # Peers may still communicate with this rank. Not a clean exit: it might wait for a rank that is dead.
    while True:
        signal.pause()


def _call(rank: int, job: Job) -> Any:
    os.environ.clear()
    os.environ.update(job.env)
    if job.ranks_per_node:
        os.environ.update(_of_node(rank // job.ranks_per_node))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fn, args = pickle.loads(job.work)
    torch.set_num_threads(1)
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= job.world_size
    if has_gpus:
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group(
        job.backend or ("cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        store=dist.TCPStore(HOST, job.port, is_master=False, timeout=timeout),
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
