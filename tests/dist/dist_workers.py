"""What ranks do in the tests of dense collectives, as far as it is the same for all of them. Functions that
spawn() can import; each returns what went wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dense_calls import Call, wrong
from dense_forms import FORMS

import flux
from flux.testing import AgGemmCase, GemmRsCase, tolerance

DTYPES = (torch.bfloat16, torch.float16)
# Rows, of a shard or of a sum, n and k. The last two of ag_gemm have shards of 8 MiB and more: copy engines
# carry those. gemm_ar: few rows in small tiles that share K, one-shot; many in large ones, two-shot.
SHAPES = {
    "gemm_rs": [
        (1, 8, 8),
        (64, 64, 64),
        (127, 200, 72),
        (129, 264, 520),
        (1024, 4096, 512),
        (512, 1024, 1032),
    ],
    "ag_gemm": [(1, 8, 8), (64, 64, 64), (127, 200, 72), (129, 264, 520), (512, 1024, 1032)]
    + [(1024, 512, 4096), (1100, 264, 4104)],
    "gemm_ar": [(1, 8, 8), (1, 4096, 1032), (7, 264, 72), (16, 8192, 2048), (64, 1024, 520), (130, 264, 136)]
    + [(256, 4096, 512), (1000, 2048, 264)],
}
# What random calls of a test of an operator are.
MIXES = {
    "gemm_rs": ("gemm_rs",),
    "ag_gemm": ("ag_gemm",) * 5 + ("gemm_rs",) * 2 + ("all_gather",) + ("gemm_rs_with_gather",),
    "gemm_ar": ("gemm_ar",) * 6 + ("all_reduce",) * 3 + ("gemm_rs",),
}
# Large calls; copy engines carry the second one of ag_gemm, the first one of gemm_ar goes in one shot.
LARGE: dict[str, Callable[[int], list[Any]]] = {
    "gemm_rs": lambda p: [GemmRsCase(512 * p, 1024, 512, p)],
    "ag_gemm": lambda p: [AgGemmCase(512 * p, 1024, 512, p), AgGemmCase(1024 * p, 264, 4096, p, seed=1)],
    "gemm_ar": lambda p: [GemmRsCase(8, 4096, 512, p), GemmRsCase(256, 4096, 512, p, seed=1)],
}


def differs(what: object, result: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Empty if the result is exact."""
    return wrong([(str(what), result, lambda: expected)])


def expected(op: str, case: Any, rank: int) -> torch.Tensor:
    result: torch.Tensor = case.expected_sum("cuda") if op == "gemm_ar" else case.expected(rank, "cuda")
    return result


def exact(rank: int, world_size: int, op: str) -> list[str]:
    """All forms of calls of an operator, and the plans that make them."""
    told = []
    for number, (rows, n, k) in enumerate(SHAPES[op]):
        m = rows if op == "gemm_ar" else rows * world_size
        for flags in range(4):
            dtype, transpose_weight, bias = DTYPES[(number + flags) % 2], flags & 1 == 1, flags & 2 == 2
            kind = AgGemmCase if op == "ag_gemm" else GemmRsCase
            case = kind(m, n, k, world_size, dtype, transpose_weight, bias, flags)
            for _ in range(3):
                for what, result, right in FORMS[op](case, rank, "cuda"):
                    told += differs(f"{what} of {case}", result, right)
        # No way may have been tested in place of another.
        plan = flux.explain(op, m, n, k)
        copied, summed = op == "ag_gemm" and rows >= 1024, op != "gemm_ar" or plan.way != "composed"
        if not (plan.by_flux and summed and (op == "gemm_rs" or plan.copied == copied)):
            told.append(str(plan))
    flux.check()
    return told


def sizes(op: str) -> Callable[[random.Random], tuple[int, int, int]]:
    def drawn(dice: random.Random) -> tuple[int, int, int]:
        if op in ("ag_gemm", "gemm_rs_with_gather") and dice.random() < (0.05 if op == "ag_gemm" else 0.5):
            return dice.randint(1024, 1300), 8 * dice.randint(1, 64), 8 * dice.randint(512, 600)
        rows = dice.randint(1, 600)
        if op in ("gemm_ar", "all_reduce") and dice.random() < 0.7:
            rows = dice.randint(1, 64)
        # Now and then a size that the kernel does not take: those must not disturb the calls around them.
        return rows, 8 * dice.randint(1, 200) + (dice.random() < 0.03), 8 * dice.randint(1, 80)

    return drawn


def many_shapes(rank: int, world_size: int, op: str, number: int, sleep_s: float) -> list[str]:
    """Random shapes and operators back to back; results are only looked at in batches, so that ranks run
    ahead of each other.
    """
    told: list[str] = []
    # Of `shapes` all ranks draw the same, of `delays` each its own.
    shapes, delays = random.Random(world_size), random.Random(rank)
    for first in range(0, number, 50):
        pending = []
        for seed in range(first, first + 50):
            which = shapes.choice(MIXES[op])
            call = Call(shapes, seed, sizes=sizes(which), dtypes=DTYPES, device="cuda")
            if delays.random() < 0.1:
                time.sleep(delays.random() * sleep_s)
            if delays.random() < 0.2:
                torch.cuda._sleep(int(delays.random() * 2_000_000))
            pending += call.make(which)
        told += wrong(pending)
    flux.check()
    return told


def two_groups(rank: int, world_size: int, op: str) -> list[str]:
    """Rows and columns of a mesh with two rows, in turns."""
    told = []
    half = world_size // 2
    rows = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))]
    columns = [dist.new_group([i, i + half]) for i in range(half)]
    for number in range(60):
        by_row = number % 3 != 0
        group, colour = (rows[rank // half], rank // half) if by_row else (columns[rank % half], rank % half)
        groups = [(group, half * number + colour)] + [(None, number)] * (number % 10 == 0)
        for each, seed in groups:
            dice = random.Random(seed)
            which = dice.choice(MIXES[op])
            told += wrong(Call(dice, seed, each, sizes(which), DTYPES, "cuda").make(which))
    return told


def unfused_kinds(rank: int, world_size: int, op: str) -> list[str]:
    """What the kernel does not take, and what it does, give the same results as torch alone."""
    told: list[str] = []
    gathers = op == "ag_gemm"
    for n, k, dtype in ((33, 64, DTYPES[0]), (64, 33, DTYPES[1]), (64, 64, torch.float32)):
        for which in ("ag_gemm", "all_gather") if gathers else ("gemm_rs",):
            for seed in range(4):  # with and without a bias, several weights, gathered rows
                call = Call(random.Random(seed), seed, None, lambda _, n=n, k=k: (50, n, k), [dtype], "cuda")
                told += wrong(call.make(which))
    torch.manual_seed(rank)
    rows = 256 if gathers else 256 * world_size
    x, weight = (torch.randn(size, 512, device="cuda").bfloat16() for size in (rows, 1024))
    result = getattr(flux, op)(x, weight)
    told += differs("a second call", getattr(flux, op)(x, weight), result)
    if gathers:
        shards = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(shards, x)
        exact = torch.cat(shards).double() @ weight.double().t()
    else:
        exact = torch.empty(256, 1024, dtype=torch.float64, device="cuda")
        dist.reduce_scatter_tensor(exact, x.double() @ weight.double().t())
    atol, rtol = tolerance(512, torch.bfloat16, 1 if gathers else world_size)
    # Not `>`: of that a NaN is no example.
    if not ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all():
        told.append("beyond the tolerance")
    return told


def seconds_late(rank: int, world_size: int, op: str) -> list[str]:
    told = []
    data = [(c, c.inputs(rank, "cuda"), expected(op, c, rank)) for c in LARGE[op](world_size)]
    for late in range(world_size):
        if rank == late:
            time.sleep(2.0)
        for case, (x, weight, _), result in data * 5:
            told += differs(case, getattr(flux, op)(x, weight), result)
    return told


def streams(rank: int, world_size: int, op: str) -> list[str]:
    call = getattr(flux, op)
    data = [(c, c.inputs(rank, "cuda"), expected(op, c, rank)) for c in LARGE[op](world_size)]
    torch.cuda.synchronize()
    results = []
    side = [torch.cuda.Stream() for _ in range(3)]
    for number in range(60):
        case, (x, weight, _), result = data[number // 2 % len(data)]
        with torch.cuda.stream(side[(number * 7) % 3]):
            if number % 5 == 0:
                torch.cuda._sleep(3_000_000)
            results.append((case, call(x, weight), result))
    torch.cuda.synchronize()
    flux.release()
    results += [(f"released, {case}", call(x, weight), result) for case, (x, weight, _), result in data]
    return [line for each in results for line in differs(*each)]


def raises_in_capture(call: Callable[[], Any]) -> list[str]:
    """A capture that would have to make a workspace says what to do."""
    told = []
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        told.append("capture without a workspace did not raise")
    except RuntimeError as error:
        if "flux.reserve" not in str(error):
            told.append(str(error))
    torch.cuda.synchronize()
    return told


def victim(
    rank: int, world_size: int, dying: int, delay_s: float, op: str, m: int, n: int, k: int
) -> dict[str, Any]:
    """One rank is killed between calls (delay 0) or while calls run; the others must say so."""
    case = (AgGemmCase if op == "ag_gemm" else GemmRsCase)(m, n, k, world_size)
    x, weight, _ = case.inputs(rank, "cuda")

    def call() -> torch.Tensor:
        result: torch.Tensor = getattr(flux, op)(x, weight)
        return result

    for _ in range(3):
        result = call()
    torch.cuda.synchronize()
    assert torch.equal(result, expected(op, case, rank))
    dist.barrier()
    if rank == dying:
        if delay_s == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    told: list[flux.CommTimeoutError] = []
    while not told and time.monotonic() - start < 30:
        try:
            for _ in range(5):
                call()
            flux.check()
        except flux.CommTimeoutError as error:
            told.append(error)
    seconds = time.monotonic() - start
    for attempt in (call, flux.check):
        try:
            attempt()
        except flux.CommTimeoutError as error:
            told.append(error)
    return {"errors": told, "seconds": seconds, "again": time.monotonic() - start - seconds}
