"""The program that signals.py disturbs: ranks that make random calls, each compared with its exact result.

    python random_calls.py FOLDER WORLD_SIZE SEED MODE DEADLINE_S

MODE is what the caller does about signals: "plain" nothing, "handler" exits with 7 on SIGTERM, "catch" with
130 on SIGINT. It writes what each rank did to FOLDER/results.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dense_calls import COLLECTIVES, Call, wrong

import flux
from flux.testing import RankFailure, spawn

SPAWN_S = 90.0


def sizes(dice: random.Random) -> tuple[int, int, int]:
    return dice.choice((1, 3, 10, 64, 200)), dice.choice((8, 24, 100, 520)), dice.choice((4, 16, 72))


def should_stop(folder: Path) -> bool:
    """Agreed by all ranks: whether rank 0 has seen the file."""
    seen = dist.get_rank() == 0 and (folder / "stop").exists()
    return bool(flux.all_reduce(torch.full((1, 8), float(seen)))[0, 0])


def work(rank: int, world_size: int, folder: Path, seed: int) -> dict[str, Any]:
    """Calls until it is told to stop, or until one times out: how many, and what the error says."""
    (folder / f"started-{rank}").write_text(str(os.getpid()))
    world = dist.group.WORLD
    assert world is not None
    groups = [world]
    if world_size == 4:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups.append(halves[rank // 2])
    dice = random.Random(seed)
    told: dict[str, Any] = {"calls": 0, "error": None}
    group, begin = world, time.monotonic()
    try:
        should_stop(folder)
        (folder / f"ready-{rank}").touch()
        while True:
            group, begin = world, time.monotonic()
            if told["calls"] % 4 == 0 and should_stop(folder):
                break
            group = dice.choice(groups)
            begin = time.monotonic()
            op = dice.choice(COLLECTIVES)
            if dice.random() < 0.08:
                flux.release(group=group)
            if dice.random() < 0.08:
                flux.reserve(group=group, max_m=dice.choice((64, 1024)), max_n=256, max_k=64)
            call = Call(dice, dice.randrange(1000), group, sizes, (torch.bfloat16, torch.float32))
            assert (bad := wrong(call.make(op))) == [], bad
            told["calls"] += 1
    except flux.CommTimeoutError as error:
        members = dist.get_process_group_ranks(group)
        told["error"] = {
            "op": error.op,
            "peer": members[error.peer],
            "epoch": error.epoch,
            "seconds": time.monotonic() - begin,
        }
    (folder / f"done-{rank}").touch()
    return told


def main(folder: Path, world_size: int, seed: int, mode: str, deadline_s: str) -> None:
    def handler(*_: object) -> None:
        raise SystemExit(7)

    if mode == "handler":
        signal.signal(signal.SIGTERM, handler)
    (folder / "calling").touch()
    try:
        results = spawn(
            work,
            world_size,
            folder,
            seed,
            env={"FLUX_TIMEOUT_S": deadline_s},
            timeout_s=SPAWN_S,
            may_die=range(world_size),
        )
    except KeyboardInterrupt:
        if mode != "catch":
            raise
        raise SystemExit(130) from None
    told = [{"exit_code": r.exit_code, "text": str(r)} if isinstance(r, RankFailure) else r for r in results]
    (folder / "results").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
