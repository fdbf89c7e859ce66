"""What each rank of the tests in this folder does. Functions that spawn() can import."""

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

import flux
from flux.testing import GemmRsCase, tolerance

SHAPES = [(1, 8, 8), (64, 64, 64), (127, 200, 72), (129, 264, 520), (512, 1024, 1032), (1024, 4096, 512)]
DTYPES = (torch.bfloat16, torch.float16)


def wrong(result: torch.Tensor, case: GemmRsCase, place: int) -> str:
    """Empty if the result is exact."""
    expected = case.expected(place, "cuda")
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{case}: {tuple(result.shape)} {result.dtype}"
    count = int((result != expected).sum())
    return f"{case}: {count} of {expected.numel()} elements differ" if count else ""


def random_case(rng: random.Random, world_size: int, seed: int, rows: int = 600) -> GemmRsCase:
    # Now and then a size that the kernel does not take: those must not disturb the fused calls around them.
    n = 8 * rng.randint(1, 200) + (rng.random() < 0.03)
    k = 8 * rng.randint(1, 80)
    m = world_size * rng.randint(1, rows)
    return GemmRsCase(m, n, k, world_size, rng.choice(DTYPES), rng.random() < 0.3, rng.random() < 0.3, seed)


def exact_sums(rank: int, world_size: int) -> list[str]:
    told = []
    for number, (rows, n, k) in enumerate(SHAPES):
        for flags in range(4):
            case = GemmRsCase(
                rows * world_size,
                n,
                k,
                world_size,
                DTYPES[(number + flags) % 2],
                flags & 1 == 1,
                flags & 2 == 2,
                flags,
            )
            x, weight, bias = case.inputs(rank, "cuda")
            out = torch.empty(rows, n, dtype=case.dtype, device="cuda")
            for _ in range(3):
                told.append(
                    wrong(flux.gemm_rs(x, weight, bias, transpose_weight=case.transpose_weight), case, rank)
                )
                flux.gemm_rs(x, weight, bias, transpose_weight=case.transpose_weight, out=out)
                told.append(wrong(out, case, rank))
    plan = flux.explain("gemm_rs", 512 * world_size, 1024, 512)
    if not plan.fused:
        told.append(str(plan))
    flux.check()
    return [t for t in told if t]


def unfused_kinds(rank: int, world_size: int) -> list[str]:
    """What the kernel does not take, and what it does, give the same results as torch alone."""
    told = []
    for n, k, dtype in ((33, 64, DTYPES[0]), (64, 33, DTYPES[1]), (64, 64, torch.float32)):
        case = GemmRsCase(50 * world_size, n, k, world_size, dtype, bias=True)
        x, weight, bias = case.inputs(rank, "cuda")
        told.append(wrong(flux.gemm_rs(x, weight, bias), case, rank))
    x = torch.randn(256 * world_size, 512, device="cuda").bfloat16()
    weight = torch.randn(1024, 512, device="cuda").bfloat16()
    result = flux.gemm_rs(x, weight)
    if not torch.equal(result, flux.gemm_rs(x, weight)):
        told.append("not bitwise repeatable")
    exact = torch.empty(256, 1024, dtype=torch.float64, device="cuda")
    dist.reduce_scatter_tensor(exact, x.double() @ weight.double().t())
    atol, rtol = tolerance(512, torch.bfloat16, world_size)
    if ((result.double() - exact).abs() > atol + rtol * exact.abs()).any():
        told.append("beyond the tolerance")
    return [t for t in told if t]


def many_shapes(rank: int, world_size: int, number: int, sleep_s: float) -> list[str]:
    """Random shapes back to back; results are only looked at in batches, so that ranks run ahead of each
    other.
    """
    told: list[str] = []
    shapes, delays = random.Random(world_size), random.Random(rank)
    for first in range(0, number, 50):
        cases = [random_case(shapes, world_size, first + i) for i in range(50)]
        results = []
        for case in cases:
            x, weight, bias = case.inputs(rank, "cuda")
            if delays.random() < 0.1:
                time.sleep(delays.random() * sleep_s)
            if delays.random() < 0.2:
                torch.cuda._sleep(int(delays.random() * 2_000_000))
            results.append(flux.gemm_rs(x, weight, bias, transpose_weight=case.transpose_weight))
        told += [wrong(result, case, rank) for result, case in zip(results, cases, strict=True)]
    flux.check()
    return [t for t in told if t]


def seconds_late(rank: int, world_size: int) -> list[str]:
    told = []
    case = GemmRsCase(512 * world_size, 1024, 512, world_size)
    x, weight, _ = case.inputs(rank, "cuda")
    for late in range(world_size):
        if rank == late:
            time.sleep(2.0)
        told += [wrong(flux.gemm_rs(x, weight), case, rank) for _ in range(5)]
    return [t for t in told if t]


def two_groups(rank: int, world_size: int) -> list[str]:
    """Rows and columns of a mesh with two rows, in turns."""
    told = []
    half = world_size // 2
    rows = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))]
    columns = [dist.new_group([i, i + half]) for i in range(half)]
    for number in range(60):
        by_row = number % 3 != 0
        group = rows[rank // half] if by_row else columns[rank % half]
        place, colour = (rank % half, rank // half) if by_row else (rank // half, rank % half)
        case = random_case(random.Random(half * number + colour), group.size(), half * number + colour)
        x, weight, bias = case.inputs(place, "cuda")
        result = flux.gemm_rs(x, weight, bias, group=group, transpose_weight=case.transpose_weight)
        told.append(wrong(result, case, place))
        if number % 10 == 0:
            everybody = GemmRsCase(world_size * 200, 264, 136, world_size, seed=number)
            x, weight, _ = everybody.inputs(rank, "cuda")
            told.append(wrong(flux.gemm_rs(x, weight), everybody, rank))
    return [t for t in told if t]


def graphs(rank: int, world_size: int) -> list[str]:
    told = []
    cases = [GemmRsCase(300 * world_size, 520, 136, world_size, bias=True, seed=seed) for seed in range(3)]
    x, weight, bias = (t.clone() for t in cases[0].inputs(rank, "cuda") if t is not None)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            flux.gemm_rs(x, weight, bias)
        told.append("capture without a workspace did not raise")
    except RuntimeError as error:
        if "flux.reserve" not in str(error):
            told.append(str(error))
    torch.cuda.synchronize()
    flux.reserve(max_m=cases[0].m, max_n=cases[0].n, max_k=cases[0].k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flux.gemm_rs(x, weight, bias)
        second = flux.gemm_rs(x, weight, bias)
    for number in range(30):
        case = cases[number % 3]
        for static, new in zip((x, weight, bias), case.inputs(rank, "cuda"), strict=True):
            assert new is not None
            static.copy_(new)
        graph.replay()
        told += [wrong(first, case, rank), wrong(second, case, rank)]
        if number % 7 == 3:
            told.append(wrong(flux.gemm_rs(x, weight, bias), case, rank))
        if number == 15:
            # The workspace grows: the graph must go on with the buffers it knows.
            large = GemmRsCase(2048 * world_size, 4096, 64, world_size)
            big_x, big_weight, _ = large.inputs(rank, "cuda")
            told.append(wrong(flux.gemm_rs(big_x, big_weight), large, rank))
    flux.check()
    return [t for t in told if t]


def streams(rank: int, world_size: int) -> list[str]:
    told = []
    case = GemmRsCase(512 * world_size, 1024, 512, world_size)
    x, weight, _ = case.inputs(rank, "cuda")
    torch.cuda.synchronize()
    results = []
    side = [torch.cuda.Stream() for _ in range(3)]
    for number in range(30):
        with torch.cuda.stream(side[(number * 7) % 3]):
            if number % 5 == 0:
                torch.cuda._sleep(3_000_000)
            results.append(flux.gemm_rs(x, weight))
    torch.cuda.synchronize()
    told += [wrong(result, case, rank) for result in results]
    flux.release()
    told.append(wrong(flux.gemm_rs(x, weight), case, rank))
    return [t for t in told if t]


def victim(rank: int, world_size: int, dying: int, delay_s: float) -> dict[str, Any]:
    case = GemmRsCase(2048 * world_size, 4096, 512, world_size)
    x, weight, _ = case.inputs(rank, "cuda")
    return outlive(lambda: flux.gemm_rs(x, weight), case.expected(rank, "cuda"), rank == dying, delay_s)


def outlive(
    call: Callable[[], torch.Tensor], expected: torch.Tensor, dies: bool, delay_s: float
) -> dict[str, Any]:
    """One rank is killed between calls (delay 0) or while calls run; the others must say so."""
    for _ in range(3):
        result = call()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    dist.barrier()
    if dies:
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
