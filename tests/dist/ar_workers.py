"""What each rank of the tests of GEMM+AllReduce and AllReduce does. Functions that spawn() can import."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dist_workers import DTYPES, outlive

import flux
from flux.ops import gemm as products
from flux.ops import gemm_ar as ops
from flux.testing import GemmRsCase, tolerance

# m, n, k: few rows in small tiles that share K, one-shot; and as many as take the large ones, two-shot.
SHAPES = [(1, 8, 8), (1, 4096, 1032), (7, 264, 72), (16, 8192, 2048), (64, 1024, 520), (130, 264, 136)]
SHAPES += [(256, 4096, 512), (1000, 2048, 264)]


def differs(what: object, result: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Empty if the result is exact."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return [f"{what}: {tuple(result.shape)} {result.dtype}"]
    count = int((result != expected).sum())
    return [f"{what}: {count} of {expected.numel()} elements differ"] if count else []


def not_everywhere(what: object, result: torch.Tensor) -> list[str]:
    """Empty if all ranks have the same bits."""
    mine = result.contiguous().view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    same = all(torch.equal(mine, other) for other in everybody)
    return [] if same else [f"{what}: not the same on all ranks"]


def random_sum(rng: random.Random, world_size: int, seed: int) -> GemmRsCase:
    m = rng.randint(1, 64) if rng.random() < 0.7 else rng.randint(65, 600)
    # Now and then a size that the kernel does not take: those must not disturb the fused calls around them.
    n = 8 * rng.randint(1, 300) + (rng.random() < 0.03)
    k = 8 * rng.randint(1, 80)
    return GemmRsCase(m, n, k, world_size, rng.choice(DTYPES), rng.random() < 0.3, rng.random() < 0.3, seed)


def exact_sums(rank: int, world_size: int) -> list[str]:
    told = []
    for number, (m, n, k) in enumerate(SHAPES):
        for flags in range(4):
            dtype, transpose_weight, bias = DTYPES[(number + flags) % 2], flags & 1 == 1, flags & 2 == 2
            case = GemmRsCase(m, n, k, world_size, dtype, transpose_weight, bias, flags)
            x, weight, b = case.inputs(rank, "cuda")
            expected = case.expected_sum("cuda")
            out = torch.full_like(expected, 7)
            residual = case.residual("cuda")
            product = products.reference(x, weight, None, transpose_weight)
            alone = expected if b is None else expected - b
            layout = {"transpose_weight": transpose_weight}
            for _ in range(3):
                told += differs(case, flux.gemm_ar(x, weight, b, **layout), expected)
                flux.gemm_ar(x, weight, b, out=out, **layout)
                told += differs(f"out of {case}", out, expected)
                total = flux.gemm_ar(x, weight, b, residual=residual, **layout)
                told += differs(f"residual of {case}", total - residual, expected)
                told += differs(f"all_reduce {case}", flux.all_reduce(product), alone)
                if m % world_size == 0:
                    rows = slice(rank * m // world_size, (rank + 1) * m // world_size)
                    told += differs(f"reduce_scatter {case}", flux.reduce_scatter(product), alone[rows])
                summed = product.clone()
                flux.all_reduce(summed, out=summed)
                told += differs(f"all_reduce in place {case}", summed, alone)
    for m, n, k in SHAPES:
        plan = flux.explain("gemm_ar", m, n, k)
        if not plan.fused or plan.mode < 0:
            told.append(str(plan))
    flux.check()
    return told


def rounded_sums(rank: int, world_size: int) -> list[str]:
    """Data that does get rounded: the same bits everywhere and every time, and how far off they may be."""
    told = []
    for m, n, k in SHAPES:
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
            exact = ops.reference(x.double(), weight.double(), bias.double(), residual=residual.double())
            atol, rtol = tolerance(k, dtype, world_size)
            # Not `>`: of that a NaN is no example.
            if not ((total.double() - exact).abs() <= atol + rtol * exact.abs()).all():
                told.append(f"{what}: beyond the tolerance")
            norm, summed = flux.gemm_ar(x, weight, bias, residual=residual, norm_weight=norm_weight)
            told += differs(f"{what} sum beside the norm", summed, total) + not_everywhere(what, norm)
            wide = total.double()
            scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
            wanted = wide * scale * norm_weight.double()
            # tests/cpu/operators/test_gemm_ar.py derives this.
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
    if [plan.fused for plan in ways] != [False, False, False, True, True] or max(
        ways[3].mode, ways[4].mode
    ) >= 0:
        told.append("; ".join(plan.reason for plan in ways))
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
            kind = shapes.choice(["gemm_ar"] * 6 + ["all_reduce"] * 3 + ["gemm_rs"])
            case = random_sum(shapes, world_size, seed)
            if kind == "gemm_rs":
                m = -(-case.m // world_size) * world_size
                case = GemmRsCase(m, case.n, case.k, world_size, case.dtype, seed=seed)
            x, weight, bias = case.inputs(rank, "cuda")
            layout = {"transpose_weight": case.transpose_weight}
            if delays.random() < 0.1:
                time.sleep(delays.random() * sleep_s)
            if delays.random() < 0.2:
                torch.cuda._sleep(int(delays.random() * 2_000_000))
            wanted = partial(case.expected_sum, "cuda")
            if kind == "gemm_rs":
                result = flux.gemm_rs(x, weight, bias, **layout)
                wanted = partial(case.expected, rank, "cuda")
            elif kind == "all_reduce":
                result = flux.all_reduce(products.reference(x, weight, None, case.transpose_weight))
                result = result if bias is None else result + bias
            else:
                result = flux.gemm_ar(x, weight, bias, **layout)
            # A peer must not read what this rank's call has been given.
            x.fill_(7)
            pending.append((f"{kind} {case}", result, wanted))
        for what, result, expected in pending:
            told += differs(what, result, expected())
    flux.check()
    return told


def seconds_late(rank: int, world_size: int) -> list[str]:
    told = []
    cases = [GemmRsCase(m, 4096, 512, world_size) for m in (8, 256)]
    data = [(case, case.inputs(rank, "cuda"), case.expected_sum("cuda")) for case in cases]
    for late in range(world_size):
        if rank == late:
            time.sleep(2.0)
        for _ in range(5):
            for case, (x, weight, _), expected in data:
                told += differs(case, flux.gemm_ar(x, weight), expected)
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
        case = random_sum(random.Random(half * number + colour), group.size(), half * number + colour)
        x, weight, bias = case.inputs(place, "cuda")
        result = flux.gemm_ar(x, weight, bias, group=group, transpose_weight=case.transpose_weight)
        told += differs(case, result, case.expected_sum("cuda"))
        if number % 10 == 0:
            everybody = GemmRsCase(32, 264, 136, world_size, seed=number)
            x, weight, _ = everybody.inputs(rank, "cuda")
            told += differs(everybody, flux.gemm_ar(x, weight), everybody.expected_sum("cuda"))
    return told


def graphs(rank: int, world_size: int, replays: int) -> list[str]:
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
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            chain(static)
        told.append("capture without a workspace did not raise")
    except RuntimeError as error:
        if "flux.reserve" not in str(error):
            told.append(str(error))
    torch.cuda.synchronize()
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


def streams(rank: int, world_size: int) -> list[str]:
    told = []
    cases = [GemmRsCase(m, 1024, 512, world_size, seed=m) for m in (4, 300)]
    data = [case.inputs(rank, "cuda") for case in cases]
    torch.cuda.synchronize()
    results = []
    side = [torch.cuda.Stream() for _ in range(3)]
    for number in range(60):
        x, weight, _ = data[number % 2]
        with torch.cuda.stream(side[(number * 7) % 3]):
            if number % 5 == 0:
                torch.cuda._sleep(3_000_000)
            results.append((number % 2, flux.gemm_ar(x, weight)))
    torch.cuda.synchronize()
    for which, result in results:
        told += differs(cases[which], result, cases[which].expected_sum("cuda"))
    flux.release()
    for case, (x, weight, _) in zip(cases, data, strict=True):
        told += differs(f"released, {case}", flux.gemm_ar(x, weight), case.expected_sum("cuda"))
    return told


def victim(rank: int, world_size: int, dying: int, delay_s: float, m: int) -> dict[str, Any]:
    case = GemmRsCase(m, 4096, 2048, world_size)
    x, weight, _ = case.inputs(rank, "cuda")
    return outlive(lambda: flux.gemm_ar(x, weight), case.expected_sum("cuda"), rank == dying, delay_s)
