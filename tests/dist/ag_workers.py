"""What each rank of the tests of AllGather+GEMM does. Functions that spawn() can import."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dist_workers import DTYPES, outlive, random_case

import flux
from flux.ops.gemm_rs_with_gather import gemm_rs_with_gather
from flux.testing import AgGemmCase, GemmRsCase, tolerance

# Rows of a shard, n, k. The last two have shards of 8 MiB and more: copy engines carry those.
SHAPES = [
    (1, 8, 8),
    (64, 64, 64),
    (127, 200, 72),
    (129, 264, 520),
    (512, 1024, 1032),
    (1024, 512, 4096),
    (1100, 264, 4104),
]


def differs(what: object, result: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Empty if the result is exact."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return [f"{what}: {tuple(result.shape)} {result.dtype}"]
    count = int((result != expected).sum())
    return [f"{what}: {count} of {expected.numel()} elements differ"] if count else []


def random_ag_case(rng: random.Random, world_size: int, seed: int, large: float = 0.05) -> AgGemmCase:
    """A share of `large` have shards of 8 MiB or more, which copy engines carry."""
    if rng.random() < large:
        rows, n, k = rng.randint(1024, 1300), 8 * rng.randint(1, 64), 8 * rng.randint(512, 600)
    else:
        # Now and then a size that the kernel does not take.
        rows, n, k = (
            rng.randint(1, 600),
            8 * rng.randint(1, 200) + (rng.random() < 0.03),
            8 * rng.randint(1, 80),
        )
    transpose_weight, bias = rng.random() < 0.3, rng.random() < 0.3
    return AgGemmCase(world_size * rows, n, k, world_size, rng.choice(DTYPES), transpose_weight, bias, seed)


def exact_results(rank: int, world_size: int) -> list[str]:
    told = []
    for number, (rows, n, k) in enumerate(SHAPES):
        for flags in range(4):
            case = AgGemmCase(
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
            expected, everything = case.expected(rank, "cuda"), case.gathered("cuda")
            layout = {"transpose_weight": case.transpose_weight}
            for _ in range(3):
                out, gathered = torch.full_like(expected, 7), torch.full_like(everything, 7)
                told += differs(case, flux.ag_gemm(x, weight, bias, **layout), expected)
                flux.ag_gemm(x, weight, bias, out=out, **layout)
                told += differs(f"out of {case}", out, expected)
                result, rows_of_all = flux.ag_gemm(x, weight, bias, return_gathered=True, **layout)
                told += differs(f"with gathered {case}", result, expected)
                told += differs(f"gathered {case}", rows_of_all, everything)
                told += differs(f"all_gather {case}", flux.all_gather(x), everything)
                flux.all_gather(x, out=gathered)
                told += differs(f"out of all_gather {case}", gathered, everything)
    # Neither way may have been tested by the other.
    for rows, n, k in SHAPES:
        plan = flux.explain("ag_gemm", rows * world_size, n, k)
        if not plan.fused or plan.copied != (rows >= 1024):
            told.append(str(plan))
    flux.check()
    return told


def several_weights(rank: int, world_size: int) -> list[str]:
    """x is gathered once for a list of weights. The last list has one that the kernel does not take."""
    told = []
    for number, (rows, k) in enumerate([(1, 8), (127, 72), (300, 520), (1024, 4096)]):
        first = AgGemmCase(rows * world_size, 264, k, world_size, DTYPES[number % 2], seed=number)
        for widths in ((264,), (264, 520, 8), (264, 128, 33)):
            cases = [
                replace(first, n=n, transpose_weight=number == 2, bias=i % 2 == 1)
                for i, n in enumerate(widths)
            ]
            x = first.inputs(rank, "cuda")[0]
            weights = [case.inputs(rank, "cuda")[1] for case in cases]
            biases = [case.inputs(rank, "cuda")[2] for case in cases]
            wanted = [case.expected(rank, "cuda") for case in cases]
            layout = {"transpose_weight": number == 2}
            for _ in range(3):
                results = flux.ag_gemm(x, weights, biases, **layout)
                outs = [torch.full_like(expected, 7) for expected in wanted]
                flux.ag_gemm(x, weights, biases, out=outs, **layout)
                others, gathered = flux.ag_gemm(x, weights, biases, return_gathered=True, **layout)
                for what, each in (("", results), ("out of ", outs), ("with gathered ", others)):
                    for case, result, expected in zip(cases, each, wanted, strict=True):
                        told += differs(f"{what}{case}", result, expected)
                told += differs(f"gathered {first}", gathered, first.gathered("cuda"))
    flux.check()
    return told


def unfused_kinds(rank: int, world_size: int) -> list[str]:
    """What the kernel does not take, and what it does, give the same results as torch alone."""
    told = []
    for n, k, dtype in ((33, 64, DTYPES[0]), (64, 33, DTYPES[1]), (64, 64, torch.float32)):
        case = AgGemmCase(50 * world_size, n, k, world_size, dtype, bias=True)
        x, weight, bias = case.inputs(rank, "cuda")
        result, gathered = flux.ag_gemm(x, weight, bias, return_gathered=True)
        told += differs(case, result, case.expected(rank, "cuda"))
        told += differs(f"gathered {case}", gathered, case.gathered("cuda"))
        told += differs(f"all_gather {case}", flux.all_gather(x), case.gathered("cuda"))
    x = torch.randn(256, 512, device="cuda").bfloat16()
    weight = torch.randn(1024, 512, device="cuda").bfloat16()
    result = flux.ag_gemm(x, weight)
    told += differs("a second call", flux.ag_gemm(x, weight), result)
    shards = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(shards, x)
    exact = torch.cat(shards).double() @ weight.double().t()
    atol, rtol = tolerance(512, torch.bfloat16)
    # Not `>`: of that a NaN is no example.
    if not ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all():
        told.append("beyond the tolerance")
    return told


def many_shapes(rank: int, world_size: int, number: int, sleep_s: float) -> list[str]:
    """Random shapes and operators back to back; results are only looked at in batches, so that ranks run
    ahead of each other.
    """
    told: list[str] = []
    # Of `shapes` all ranks draw the same, of `delays` each its own.
    shapes, delays = random.Random(world_size), random.Random(rank)
    for first in range(0, number, 50):
        pending: list[tuple[str, torch.Tensor, Callable[[], torch.Tensor]]] = []
        for seed in range(first, first + 50):
            kind = shapes.choice(
                ["plain"] * 5 + ["gemm_rs"] * 2 + ["all_gather", "gathered", "several", "beside"]
            )
            case: Any = (random_case if kind == "gemm_rs" else random_ag_case)(shapes, world_size, seed)
            if kind == "beside":
                case = random_ag_case(shapes, world_size, seed, large=0.5)
            beside = replace(random_case(shapes, world_size, seed), bias=False)
            other = replace(case, n=8 * shapes.randint(1, 200), bias=False)
            x, weight, bias = case.inputs(rank, "cuda")
            layout = {"transpose_weight": case.transpose_weight}
            other_weight = other.inputs(rank, "cuda")[1] if kind == "several" else None
            if delays.random() < 0.1:
                time.sleep(delays.random() * sleep_s)
            if delays.random() < 0.2:
                torch.cuda._sleep(int(delays.random() * 2_000_000))
            if kind == "gemm_rs":
                results = [flux.gemm_rs(x, weight, bias, **layout)]
                wanted = [partial(case.expected, rank, "cuda")]
            elif kind == "all_gather":
                results = [flux.all_gather(x)]
                wanted = [partial(case.gathered, "cuda")]
            elif kind == "beside":
                left, right, _ = beside.inputs(rank, "cuda")
                flipped = beside.transpose_weight
                results = list(gemm_rs_with_gather(left, right, x, transpose_weight=flipped))
                wanted = [partial(beside.expected, rank, "cuda"), partial(case.gathered, "cuda")]
                left.fill_(7)
            elif kind == "gathered":
                results = list(flux.ag_gemm(x, weight, bias, return_gathered=True, **layout))
                wanted = [
                    partial(case.expected, rank, "cuda"),
                    partial(case.gathered, "cuda"),
                ]
            elif kind == "several":
                case = replace(case, bias=False)
                results = list(flux.ag_gemm(x, [weight, other_weight], **layout))
                wanted = [partial(c.expected, rank, "cuda") for c in (case, other)]
            else:
                results = [flux.ag_gemm(x, weight, bias, **layout)]
                wanted = [partial(case.expected, rank, "cuda")]
            # Whatever carries x to the peers must be done with it when the call is, in stream order.
            x.fill_(7)
            pending += [(f"{kind} {case}", r, w) for r, w in zip(results, wanted, strict=True)]
        for what, result, expected in pending:
            told += differs(what, result, expected())
    flux.check()
    return told


def seconds_late(rank: int, world_size: int) -> list[str]:
    told = []
    cases = [
        AgGemmCase(512 * world_size, 1024, 512, world_size),
        AgGemmCase(1024 * world_size, 264, 4096, world_size, seed=1),
    ]
    data = [(case, case.inputs(rank, "cuda"), case.expected(rank, "cuda")) for case in cases]
    for late in range(world_size):
        if rank == late:
            time.sleep(2.0)
        for _ in range(5):
            for case, (x, weight, _), expected in data:
                told += differs(case, flux.ag_gemm(x, weight), expected)
    return told


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
        seed = half * number + colour
        case = random_ag_case(random.Random(seed), group.size(), seed, large=0.25)
        x, weight, bias = case.inputs(place, "cuda")
        result = flux.ag_gemm(x, weight, bias, group=group, transpose_weight=case.transpose_weight)
        told += differs(case, result, case.expected(place, "cuda"))
        told += differs(f"all_gather {case}", flux.all_gather(x, group=group), case.gathered("cuda"))
        if number % 10 == 0:
            everybody = AgGemmCase(world_size * 200, 264, 136, world_size, seed=number)
            x, weight, _ = everybody.inputs(rank, "cuda")
            told += differs(everybody, flux.ag_gemm(x, weight), everybody.expected(rank, "cuda"))
    return told


def graphs(rank: int, world_size: int) -> list[str]:
    told: list[str] = []
    m = 300 * world_size
    small = [AgGemmCase(m, 520, 136, world_size, bias=True, seed=seed) for seed in range(3)]
    # Beside the graph copy engines carry it; in the graph, which the host does not count, they cannot.
    large = [AgGemmCase(1030 * world_size, 264, 4096, world_size, seed=seed) for seed in range(3)]
    scattered = [GemmRsCase(m, 520, 136, world_size, seed=seed) for seed in range(3)]

    def all_inputs(number: int) -> list[torch.Tensor]:
        cases: tuple[Any, ...] = (small[number], large[number], scattered[number])
        return [t for case in cases for t in case.inputs(rank, "cuda") if t is not None]

    static = x, weight, bias, large_x, large_weight, partial_x, partial_weight = all_inputs(0)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            flux.ag_gemm(x, weight, bias)
        told.append("capture without a workspace did not raise")
    except RuntimeError as error:
        if "flux.reserve" not in str(error):
            told.append(str(error))
    torch.cuda.synchronize()
    flux.reserve(max_m=large[0].m, max_n=520, max_k=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flux.ag_gemm(x, weight, bias)
        second, gathered = flux.ag_gemm(x, weight, bias, return_gathered=True)
        several = flux.ag_gemm(x, [weight, weight])
        reduced = flux.gemm_rs(partial_x, partial_weight)
        big = flux.ag_gemm(large_x, large_weight)
        alone = flux.all_gather(large_x)
    outputs = (first, second, gathered, *several, reduced, big, alone)
    for number in range(30):
        which = number % 3
        for old, new in zip(static, all_inputs(which), strict=True):
            old.copy_(new)
        for output in outputs:
            output.fill_(7)
        graph.replay()
        case, plain = small[which], replace(small[which], bias=False)
        what = f"replay {number}"
        for result in (first, second):
            told += differs(f"{what} {case}", result, case.expected(rank, "cuda"))
        told += differs(f"{what} gathered", gathered, case.gathered("cuda"))
        for result in several:
            told += differs(f"{what} {plain}", result, plain.expected(rank, "cuda"))
        told += differs(f"{what} gemm_rs", reduced, scattered[which].expected(rank, "cuda"))
        told += differs(f"{what} {large[which]}", big, large[which].expected(rank, "cuda"))
        told += differs(f"{what} all_gather", alone, large[which].gathered("cuda"))
        if number % 7 == 3:
            told += differs("eager", flux.ag_gemm(x, weight, bias), case.expected(rank, "cuda"))
            told += differs("eager", flux.ag_gemm(large_x, large_weight), large[which].expected(rank, "cuda"))
        if number % 7 == 5:
            # Data that does get rounded: the kernel must be the same in a graph.
            x.copy_(torch.randn(x.shape, device="cuda"))
            weight.copy_(torch.randn(weight.shape, device="cuda"))
            graph.replay()
            told += differs("replay of random data", first, flux.ag_gemm(x, weight, bias))
        if number == 15:
            # The workspace grows: the graph must go on with the buffers it knows.
            larger = AgGemmCase(2100 * world_size, 136, 4096, world_size)
            larger_x, larger_weight, _ = larger.inputs(rank, "cuda")
            result = flux.ag_gemm(larger_x, larger_weight)
            told += differs(larger, result, larger.expected(rank, "cuda"))
            wide = GemmRsCase(2048 * world_size, 8192, 64, world_size)
            wide_x, wide_weight, _ = wide.inputs(rank, "cuda")
            told += differs(wide, flux.gemm_rs(wide_x, wide_weight), wide.expected(rank, "cuda"))
    flux.check()
    return told


def streams(rank: int, world_size: int) -> list[str]:
    told = []
    cases = [
        AgGemmCase(512 * world_size, 1024, 512, world_size),
        AgGemmCase(1024 * world_size, 264, 4096, world_size, seed=1),
    ]
    data = [case.inputs(rank, "cuda") for case in cases]
    torch.cuda.synchronize()
    results = []
    side = [torch.cuda.Stream() for _ in range(3)]
    for number in range(60):
        which = number % 4 // 2
        x, weight, _ = data[which]
        with torch.cuda.stream(side[(number * 7) % 3]):
            if number % 5 == 0:
                torch.cuda._sleep(3_000_000)
            results.append((which, flux.ag_gemm(x, weight)))
    torch.cuda.synchronize()
    for which, result in results:
        told += differs(cases[which], result, cases[which].expected(rank, "cuda"))
    flux.release()
    for case, (x, weight, _) in zip(cases, data, strict=True):
        told += differs(f"released, {case}", flux.ag_gemm(x, weight), case.expected(rank, "cuda"))
    return told


def victim(rank: int, world_size: int, dying: int, delay_s: float, k: int) -> dict[str, Any]:
    case = AgGemmCase(2048 * world_size, 1024, k, world_size)
    x, weight, _ = case.inputs(rank, "cuda")
    return outlive(lambda: flux.ag_gemm(x, weight), case.expected(rank, "cuda"), rank == dying, delay_s)
