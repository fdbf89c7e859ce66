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

import flux
from flux.testing import AgGemmCase, GemmRsCase, RankFailure, spawn

OPS = ("gemm_rs", "ag_gemm", "all_gather", "gemm_ar", "all_reduce", "reduce_scatter")
SPAWN_S = 90.0


def one_call(op: str, case: GemmRsCase | AgGemmCase, rank: int, group: dist.ProcessGroup) -> None:
    """Makes one call, and raises AssertionError if its result is not exact."""
    x, weight, bias = case.inputs(rank)
    if isinstance(case, AgGemmCase):
        if op == "all_gather":
            result, expected = flux.all_gather(x, group=group), case.gathered()
        else:
            result, expected = flux.ag_gemm(x, weight, bias, group=group), case.expected(rank)
    elif op in ("all_reduce", "reduce_scatter"):
        product = (x.float() @ weight.float().t()).to(x.dtype)
        result = getattr(flux, op)(product, group=group)
        expected = case.expected_sum() if op == "all_reduce" else case.expected(rank)
    else:
        result = getattr(flux, op)(x, weight, bias, group=group)
        expected = case.expected_sum() if op == "gemm_ar" else case.expected(rank)
    assert torch.equal(result, expected), f"{op} {case}: wrong on rank {rank} of {group.group_name}"


def draw(dice: random.Random, world_size: int) -> tuple[str, GemmRsCase | AgGemmCase]:
    op = dice.choice(OPS)
    rows = dice.choice((1, 3, 10, 64, 200)) * world_size
    n, k = dice.choice((8, 24, 100, 520)), dice.choice((4, 16, 72))
    dtype = dice.choice((torch.bfloat16, torch.float32))
    has_bias = op in ("gemm_rs", "ag_gemm", "gemm_ar") and dice.random() < 0.3
    make = AgGemmCase if op in ("ag_gemm", "all_gather") else GemmRsCase
    return op, make(rows, n, k, world_size, dtype, bias=has_bias, seed=dice.randrange(1000))


def should_stop(folder: Path) -> bool:
    """Agreed by all ranks: whether rank 0 has seen the file."""
    seen = dist.get_rank() == 0 and (folder / "stop").exists()
    return bool(flux.all_reduce(torch.full((1, 8), float(seen)))[0, 0])


def work(rank: int, world_size: int, folder: Path, seed: int) -> dict[str, Any]:
    """Calls until it is told to stop, or until one times out: how many, and what the error says."""
    (folder / f"started-{rank}").write_text(str(os.getpid()))
    world = dist.group.WORLD
    assert world is not None
    groups = [(world, rank)]
    if world_size == 4:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups.append((halves[rank // 2], rank % 2))
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
            group, place = dice.choice(groups)
            begin = time.monotonic()
            op, case = draw(dice, group.size())
            if dice.random() < 0.08:
                flux.release(group)
            if dice.random() < 0.08:
                flux.reserve(group, max_m=dice.choice((64, 1024)), max_n=256, max_k=64)
            one_call(op, case, place, group)
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
