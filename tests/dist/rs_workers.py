"""What each rank of the tests of GEMM+ReduceScatter does, but for what dist_workers.py has."""

from __future__ import annotations

from functools import partial

import torch
from dist_workers import DTYPES, differs, raises_in_capture, unfused_kinds

import flux
from flux.testing import GemmRsCase

SHAPES = [(1, 8, 8), (64, 64, 64), (127, 200, 72), (129, 264, 520), (512, 1024, 1032), (1024, 4096, 512)]


def exact(rank: int, world_size: int) -> list[str]:
    told: list[str] = []
    for number, (rows, n, k) in enumerate(SHAPES):
        for flags in range(4):
            dtype, transpose_weight, bias = DTYPES[(number + flags) % 2], flags & 1 == 1, flags & 2 == 2
            case = GemmRsCase(rows * world_size, n, k, world_size, dtype, transpose_weight, bias, flags)
            x, weight, b = case.inputs(rank, "cuda")
            expected = case.expected(rank, "cuda")
            out = torch.empty_like(expected)
            for _ in range(3):
                result = flux.gemm_rs(x, weight, b, transpose_weight=transpose_weight)
                told += differs(case, result, expected)
                flux.gemm_rs(x, weight, b, transpose_weight=transpose_weight, out=out)
                told += differs(f"out of {case}", out, expected)
    plan = flux.explain("gemm_rs", 512 * world_size, 1024, 512)
    if not plan.by_flux:
        told.append(str(plan))
    flux.check()
    return told


def graphs(rank: int, world_size: int, replays: int) -> list[str]:
    told: list[str] = []
    cases = [GemmRsCase(300 * world_size, 520, 136, world_size, bias=True, seed=seed) for seed in range(3)]
    x, weight, bias = (t.clone() for t in cases[0].inputs(rank, "cuda") if t is not None)
    told += raises_in_capture(lambda: flux.gemm_rs(x, weight, bias))
    flux.reserve(max_m=cases[0].m, max_n=cases[0].n, max_k=cases[0].k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = flux.gemm_rs(x, weight, bias)
        second = flux.gemm_rs(x, weight, bias)
    for number in range(min(replays, 30)):
        case = cases[number % 3]
        for static, new in zip((x, weight, bias), case.inputs(rank, "cuda"), strict=True):
            assert new is not None
            static.copy_(new)
        graph.replay()
        for result in (first, second):
            told += differs(f"replay {number}", result, case.expected(rank, "cuda"))
        if number % 7 == 3:
            told += differs("eager", flux.gemm_rs(x, weight, bias), case.expected(rank, "cuda"))
        if number == 15:
            # The workspace grows: the graph must go on with the buffers it knows.
            large = GemmRsCase(2048 * world_size, 4096, 64, world_size)
            big_x, big_weight, _ = large.inputs(rank, "cuda")
            told += differs(large, flux.gemm_rs(big_x, big_weight), large.expected(rank, "cuda"))
    flux.check()
    return told


ONLY = [partial(unfused_kinds, op="gemm_rs")]
