"""What `flux verify` runs: every op on exact-integer data, in shapes that reach every edge of the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import flux
from flux.bench import machine
from flux.bench.cases.common import compare
from flux.testing import GemmRsCase, spawn
from flux.testing.emulate import EmulatedRanks, why_not

_CALLS = 3  # back to back: both buffers of a workspace, and one of them again


@dataclass(frozen=True)
class Outcome:
    """One line of the table. state: "exact", "wrong" (then detail says where) or "skipped" (then why)."""

    op: str
    case: str
    where: str
    state: str
    detail: str = ""
    seconds: float = 0.0


def named_cases(world_size: int, device: str) -> list[tuple[str, GemmRsCase]]:
    """Cases for `world_size` ranks; 1 makes them plain GEMMs. M is per rank times ranks."""
    p = world_size
    big, small = (512 if device == "cuda" else 256), 128
    dtype = torch.bfloat16
    base = GemmRsCase(big * p, 2 * big, 2 * big, p, dtype, seed=1)
    other = torch.float16 if device == "cuda" else torch.float32
    cases = [
        ("one tile a rank", GemmRsCase(small * p, 2 * small, 64, p, dtype, seed=2)),
        ("many tiles", base),
        ("M, N, K ragged", GemmRsCase((small + 3) * p, 5 * small + 8, 2 * small + 24, p, dtype, seed=3)),
        ("shard smaller than a tile", GemmRsCase(5 * p, 2 * small + 8, 136, p, dtype, seed=4)),
        ("one row a rank", GemmRsCase(p, 3 * small, 264, p, dtype, seed=5)),
        ("bias", replace(base, bias=True, seed=6)),
        ("weight as [K, N]", replace(base, transpose_weight=True, seed=7)),
        (str(other).removeprefix("torch."), replace(base, dtype=other, bias=True, seed=8)),
        ("sizes no kernel takes", GemmRsCase(3 * p, 21, 13, p, dtype, seed=9)),
    ]
    if device == "cuda":
        cases.append(("large", GemmRsCase(2048 * p, 4096, 1024, p, dtype, seed=10)))
    return cases


def _timed(op: str, name: str, where: str, run: Callable[[], str]) -> Outcome:
    start = time.perf_counter()
    try:
        result = run()
    except (RuntimeError, ValueError, flux.CommTimeoutError) as error:
        result = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    seconds = time.perf_counter() - start
    return Outcome(
        op,
        name,
        where,
        "exact" if result == "exact" else "wrong",
        "" if result == "exact" else result,
        seconds,
    )


def gemm(device: torch.device) -> Iterator[Outcome]:
    """flux.gemm in this process."""
    where = "1 GPU" if device.type == "cuda" else "CPU"

    def run(case: GemmRsCase) -> str:
        x, weight, bias = case.inputs(0, device)
        got = flux.gemm(x, weight, bias, transpose_weight=case.transpose_weight)
        return compare(got, case.expected(0, device))

    for name, case in named_cases(1, device.type):
        yield _timed("gemm", name, where, partial(run, case))


def emulated(world_size: int, device: torch.device) -> Iterator[Outcome]:
    """The gemm_rs kernel with all its ranks on one GPU."""
    where = f"{world_size} ranks emulated"
    reason = why_not(world_size, device)
    if reason is not None:
        yield Outcome("gemm_rs", "all", where, "skipped", reason)
        return
    ranks = EmulatedRanks(world_size, device)

    def run(case: GemmRsCase) -> str:
        results = []
        cases = [replace(case, seed=case.seed + 100 * i) for i in range(_CALLS)]
        data = [[c.inputs(rank, device) for rank in range(world_size)] for c in cases]
        torch.cuda.synchronize(device)
        for inputs in data:
            xs, weights = [x for x, _, _ in inputs], [w for _, w, _ in inputs]
            results.append(
                ranks.gemm_rs(xs, weights, inputs[0][2], transpose_weight=case.transpose_weight, join=False)
            )
        ranks.check()
        for c, outs in zip(cases, results, strict=True):
            for rank, out in enumerate(outs):
                said = compare(out, c.expected(rank, device))
                if said != "exact":
                    return f"rank {rank}: {said}"
        return "exact"

    for name, case in named_cases(world_size, "cuda"):
        if case.n % 8 or case.k % 8:
            continue  # runs unfused through torch, which is not a kernel to emulate
        yield _timed("gemm_rs", name, where, partial(run, case))


def run_rank(rank: int, world_size: int, device_type: str) -> list[Outcome]:
    """All gemm_rs cases on one rank of a real group. One that raises ends the list: ranks would part ways."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    where = f"{world_size} GPUs" if device_type == "cuda" else f"{world_size} processes, CPU"
    outcomes = []
    for name, case in named_cases(world_size, device_type):
        outcome = _timed("gemm_rs", name, where, partial(_rank_case, rank, case, device))
        told: list[Any] = [None] * world_size
        dist.all_gather_object(told, outcome.detail)
        worst = next((f"rank {r}: {d}" for r, d in enumerate(told) if d), "")
        outcomes.append(replace(outcome, state="wrong" if worst else "exact", detail=worst))
        if "Error" in worst:
            break
    return outcomes


def _rank_case(rank: int, case: GemmRsCase, device: torch.device) -> str:
    cases = [replace(case, seed=case.seed + 100 * i) for i in range(_CALLS)]
    data = [c.inputs(rank, device) for c in cases]
    with torch.no_grad():
        outs = [flux.gemm_rs(x, w, b, transpose_weight=case.transpose_weight) for x, w, b in data]
    flux.check()
    said = (compare(out, c.expected(rank, device)) for c, out in zip(cases, outs, strict=True))
    return next((s for s in said if s != "exact"), "exact")


def ranks(world_size: int, device: str, timeout_s: float) -> Iterator[Outcome]:
    """gemm_rs between processes: GPUs, or the CPU path."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    where = f"{world_size} GPUs" if device == "cuda" else f"{world_size} processes, CPU"
    try:
        results: list[list[Outcome]] = spawn(
            run_rank, world_size, device, timeout_s=timeout_s, backend=backend, env=machine.NO_MULTICAST
        )
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        yield Outcome("gemm_rs", "all", where, "wrong", lines[-1] if lines else "a rank died")
        return
    yield from results[0]
