"""What ranks do in the tests of dense collectives. Functions that spawn() can import; each returns what went
wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import references
import torch
import torch.distributed as dist
from dense_calls import Call, wrong
from dense_forms import FORMS

import flux
from flux.ops import gemm as products
from flux.ops import gemm_ar as ops
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


def graphs_of_ag_gemm(rank: int, world_size: int, replays: int) -> list[str]:
    told: list[str] = []
    m = 300 * world_size
    small = [AgGemmCase(m, 520, 136, world_size, bias=True, seed=seed) for seed in range(3)]
    # Beside the graph copy engines carry it; in the graph, which the host does not count, they cannot.
    large = [AgGemmCase(1030 * world_size, 264, 4096, world_size, seed=seed) for seed in range(3)]
    scattered = [GemmRsCase(m, 520, 136, world_size, bias=True, seed=seed) for seed in range(3)]

    def all_inputs(number: int) -> list[torch.Tensor]:
        cases: tuple[Any, ...] = (small[number], large[number], scattered[number])
        return [t for case in cases for t in case.inputs(rank, "cuda") if t is not None]

    static = x, weight, bias, large_x, large_weight, *partials = all_inputs(0)
    for call in (lambda: flux.ag_gemm(x, weight, bias), lambda: flux.gemm_rs(*partials)):
        told += raises_in_capture(call)
    flux.reserve(max_m=large[0].m, max_n=520, max_k=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flux.ag_gemm(x, weight, bias)
        second, gathered = flux.ag_gemm(x, weight, bias, return_gathered=True)
        several = flux.ag_gemm(x, [weight, weight])
        reduced = flux.gemm_rs(*partials), flux.gemm_rs(*partials)
        big = flux.ag_gemm(large_x, large_weight)
        alone = flux.all_gather(large_x)
    outputs = (first, second, gathered, *several, *reduced, big, alone)
    for number in range(min(replays, 30)):
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
        total = scattered[which].expected(rank, "cuda")
        for result in reduced:
            told += differs(f"{what} gemm_rs", result, total)
        told += differs(f"{what} {large[which]}", big, large[which].expected(rank, "cuda"))
        told += differs(f"{what} all_gather", alone, large[which].gathered("cuda"))
        if number % 7 == 3:
            told += differs("eager", flux.ag_gemm(x, weight, bias), case.expected(rank, "cuda"))
            told += differs("eager", flux.gemm_rs(*partials), total)
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


def not_everywhere(what: object, result: torch.Tensor) -> list[str]:
    """Empty if all ranks have the same bits."""
    mine = result.contiguous().view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    same = all(torch.equal(mine, other) for other in everybody)
    return [] if same else [f"{what}: not the same on all ranks"]


def rounded_sums(rank: int, world_size: int) -> list[str]:
    """Data that does get rounded: the same bits everywhere and every time, and how far off they may be."""
    told = []
    for m, n, k in SHAPES["gemm_ar"]:
        for dtype in DTYPES:
            torch.manual_seed(rank)
            x, weight = (torch.randn(size, k, device="cuda").to(dtype) for size in (m, n))
            torch.manual_seed(99)
            shapes = ((n,), (m, n), (n,))
            bias, residual, norm_weight = (torch.randn(s, device="cuda").to(dtype) for s in shapes)
            what = f"{m}x{n}x{k} {dtype}"
            total = flux.gemm_ar(x, weight, bias, residual=residual)
            again = flux.gemm_ar(x, weight, bias, residual=residual)
            told += differs(f"{what} again", again, total) + not_everywhere(what, total)
            exact = references.gemm_ar(x.double(), weight.double(), bias.double(), residual=residual.double())
            atol, rtol = tolerance(k, dtype, world_size)
            # Not `>`: of that a NaN is no example.
            if not ((total.double() - exact).abs() <= atol + rtol * exact.abs()).all():
                told.append(f"{what}: beyond the tolerance")
            norm, summed = flux.gemm_ar(x, weight, bias, residual=residual, norm_weight=norm_weight)
            told += differs(f"{what} sum beside the norm", summed, total) + not_everywhere(what, norm)
            wide = total.double()
            scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
            wanted = wide * scale * norm_weight.double()
            # tests/cpu/operators/test_dense.py derives this.
            info = torch.finfo(dtype)
            rtol = info.eps / 2 + (n / 2 + 4) * 2.0**-24
            if not ((norm.double() - wanted).abs() <= rtol * wanted.abs() + info.smallest_normal).all():
                told.append(f"{what}: norm beyond the tolerance")
            told += not_everywhere(f"all_reduce {what}", flux.all_reduce(x))
    flux.check()
    return told


def unfused_and_composed(rank: int, world_size: int) -> list[str]:
    """What the kernel does not take, and what is too large to be exchanged."""
    told = []
    cases = [
        GemmRsCase(50, 33, 64, world_size, DTYPES[0], bias=True),
        GemmRsCase(50, 64, 33, world_size, DTYPES[1], bias=True),
        GemmRsCase(50, 64, 64, world_size, torch.float32, bias=True),
        GemmRsCase(4400, 8192, 64, world_size, DTYPES[0], bias=True),
        GemmRsCase(4401, 8192, 64, world_size, DTYPES[0], bias=True),
    ]
    for case in cases:
        x, weight, bias = case.inputs(rank, "cuda")
        expected = case.expected_sum("cuda")
        for _ in range(2):
            told += differs(case, flux.gemm_ar(x, weight, bias), expected)
        ones = torch.ones(case.n, device="cuda", dtype=case.dtype)
        norm, total = flux.gemm_ar(x, weight, bias, norm_weight=ones)
        told += differs(f"sum of {case}", total, expected)
        told += differs(f"norm of {case}", norm, ops.rms_norm(expected, ones, 1e-6))
        residual = case.residual("cuda")
        more = {"residual": residual, "norm_weight": ones}
        first = flux.gemm_ar(x, weight, bias, **more)
        told += differs(f"residual of {case}", first[1] - residual, expected)
        for _ in range(2):  # of which C++ makes the second at the latest
            again = flux.gemm_ar(x, weight, bias, **more)
            told += differs(f"norm of {case} again", again[0], first[0])
            told += differs(f"residual of {case} again", again[1], first[1])
        total = flux.all_reduce(products.reference(x, weight))
        assert bias is not None
        told += differs(f"all_reduce {case}", total, expected - bias)
    ways = [flux.explain("gemm_ar", c.m, c.n, c.k, c.dtype) for c in cases]
    if [plan.by_flux for plan in ways] != [False, False, False, True, True] or max(
        ways[3].mode, ways[4].mode
    ) >= 0:
        told.append("; ".join(plan.reason for plan in ways))
    return told


def graphs_of_gemm_ar(rank: int, world_size: int, replays: int) -> list[str]:
    """32 calls of which each takes what the one before gave, replayed.

    The weights are signed permutations, cut by columns: every element of a result is one element of the
    input, and one rank has it. So numbers stay exact however long the chain is, and what one call loses,
    doubles or takes from an earlier replay is still wrong at the end.
    """
    told: list[str] = []
    m, n = 16, 1024
    own = slice(rank * n // world_size, (rank + 1) * n // world_size)
    g = torch.Generator().manual_seed(5)
    orders = [torch.randperm(n, generator=g).cuda() for _ in range(32)]
    signs = [(torch.randint(2, (n,), generator=g) * 2 - 1).bfloat16().cuda() for _ in range(32)]
    weights = []
    for order, sign in zip(orders, signs, strict=True):
        weight = torch.zeros(n, n, device="cuda", dtype=torch.bfloat16)
        weight[torch.arange(n, device="cuda"), order] = sign
        weights.append(weight[:, own].contiguous())
    mask = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    mask[own] = 1

    def chain(h: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(weights):
            h = flux.gemm_ar(h[:, own], weight)
            if number % 4 == 3:
                h = flux.all_reduce(h * mask)
        return h

    def expected(h: torch.Tensor) -> torch.Tensor:
        for order, sign in zip(orders, signs, strict=True):
            h = h[:, order] * sign
        return h

    static = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    told += raises_in_capture(lambda: chain(static))
    flux.reserve(max_m=m, max_n=n, max_k=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(static)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    delays = random.Random(rank)
    for number in range(replays):
        torch.manual_seed(number)
        h = (torch.randint(-127, 128, (m, n), device="cuda") * 2 + 1).clamp(-255, 255).bfloat16()
        static.copy_(h)
        result.fill_(7)
        if delays.random() < 0.05:
            torch.cuda._sleep(int(delays.random() * 2_000_000))
        graph.replay()
        wrong += (result != expected(h)).sum()
        if number % 100 == 33:
            wrong += (chain(h) != expected(h)).sum()  # eager calls in between
        if number == replays // 2:
            # The workspace grows: the graph must go on with the buffers it knows.
            large = GemmRsCase(512, 4096, 64, world_size)
            x, weight, _ = large.inputs(rank, "cuda")
            told += differs(large, flux.gemm_ar(x, weight), large.expected_sum("cuda"))
    flux.check()
    if int(wrong):
        told.append(f"{int(wrong)} elements of {replays} replays differ")
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
