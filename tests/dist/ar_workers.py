"""What each rank of the tests of GEMM+AllReduce and AllReduce does. Functions that spawn() can import."""

from __future__ import annotations

import random

import references
import torch
import torch.distributed as dist
from dist_workers import DTYPES, SHAPES, differs, raises_in_capture

import flux
from flux.ops import gemm as products
from flux.ops import gemm_ar as ops
from flux.testing import GemmRsCase, tolerance


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
