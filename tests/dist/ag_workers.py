"""What each rank of the tests of AllGather+GEMM does. Functions that spawn() can import."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dist_workers import differs, raises_in_capture

import flux
from flux.testing import AgGemmCase, GemmRsCase


def graphs(rank: int, world_size: int, replays: int) -> list[str]:
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
