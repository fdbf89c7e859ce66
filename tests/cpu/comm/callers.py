"""Programs that call spawn and that tests kill: python callers.py MODE FOLDER."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

import flux
from flux.testing import GemmRsCase, spawn

RANKS = 6
ENV = {"FLUX_TIMEOUT_S": "600"}
_STOPPED = RANKS - 1


def busy(rank: int, world_size: int, folder: Path) -> None:
    """Every rank is busy in another way, for ten minutes."""
    pair = dist.new_group([0, _STOPPED])
    case = GemmRsCase(20, 8, 16, 2)
    if rank in (0, _STOPPED):
        x, weight, _ = case.inputs(rank % 2)
        assert torch.equal(flux.gemm_rs(x, weight, group=pair), case.expected(rank % 2))
    dist.barrier()  # some of what follows would keep the others from starting
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        flux.gemm_rs(x, weight, group=pair)  # waits in native code
    elif rank == 1:
        dist.recv(torch.empty(1), _STOPPED)
    elif rank == 2:
        x = torch.ones(2048, 2048)
        while True:
            torch.mm(x, x)
    elif rank == 3:
        time.sleep(600)
    elif rank == 4:
        while True:
            pass
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def brief(rank: int, world_size: int, folder: Path, caller: int) -> int:
    """Ends when the caller's handler has run."""
    if rank == 0:
        os.kill(caller, signal.SIGTERM)
    while not (folder / "handled").exists():
        time.sleep(0.01)
    return rank


def born(rank: int, world_size: int, folder: Path) -> None:
    (folder / "born").touch()


def survivor(folder: Path) -> None:
    """Survives an interrupt at the start, a SIGTERM, and an interrupt of busy ranks; a SIGTERM ends it.

    Interrupts go to all processes, as from a terminal.
    """
    threading.Timer(0.5, os.killpg, (os.getpgrp(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        spawn(born, 2, folder)
    except KeyboardInterrupt:
        (folder / "interrupted").write_text(f"{time.monotonic() - begin:.2f}")

    def handler(number: int, frame: FrameType | None) -> None:
        if (folder / "handled").exists():
            raise SystemExit(7)
        (folder / "handled").touch()

    signal.signal(signal.SIGTERM, handler)
    assert spawn(brief, 2, folder, os.getpid(), backend="gloo") == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is handler
    try:
        threading.Thread(target=interrupt_when_busy, args=(folder,)).start()
        spawn(busy, RANKS, folder, backend="gloo", env=ENV, timeout_s=600)
    except KeyboardInterrupt:
        ranks = list(folder.glob("rank-*"))
        left = [path.name for path in ranks if Path("/proc", path.read_text()).exists()]
        for path in ranks:
            path.unlink()
        (folder / "left").write_text(f"{left} of {len(ranks)}")
    spawn(busy, RANKS, folder, backend="gloo", env=ENV, timeout_s=600)


def wait_until_busy(folder: Path) -> None:
    while not all((folder / f"rank-{rank}").exists() for rank in range(RANKS)):
        time.sleep(0.01)


def interrupt_when_busy(folder: Path) -> None:
    wait_until_busy(folder)
    os.killpg(os.getpgrp(), signal.SIGINT)


def fork_when_busy(folder: Path) -> None:
    """A child that has inherited what this process has open."""
    wait_until_busy(folder)
    child = os.fork()
    if child == 0:
        time.sleep(600)
    (folder / "child").write_text(str(child))


def main(mode: str, folder: Path) -> None:
    if mode == "survivor":
        survivor(folder)
        return
    if mode == "fork":
        threading.Thread(target=fork_when_busy, args=(folder,), daemon=True).start()
    spawn(busy, RANKS, folder, backend="gloo", env=ENV, timeout_s=600)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
