"""What each rank of the tests of fp8 between GPUs does. Functions that spawn() can import."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import soak
import torch
from dist_workers import differs
from int8_model import data, model

import flux
from flux.ops.ways import int8_sum
from flux.testing import ScaledCase

OF_FP8 = [each.__name__ for each in soak.OF_FP8]
CALLS = 3  # the same call again goes shorter ways through the host code


def exact(rank: int, world_size: int) -> list[str]:
    """Random calls. No operator may have been tested unfused."""
    _, told = soak.sweep(rank, world_size, OF_FP8, 5_000_000, 25 * len(OF_FP8))
    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        for kind in ("tensor", "row", "block"):
            plan = flux.explain(op, 64 * world_size, 264, 256, dtype=torch.float8_e4m3fn, scales=kind)
            if not plan.by_flux:
                told.append(str(plan))
    flux.check()
    return told


def given(case: ScaledCase, rank: int) -> dict[str, Any]:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    tensors = {"x": x, "weight": weight, "scale_x": scale_x, "scale_w": scale_w}
    found: dict[str, Any] = {name: tensor.cuda() for name, tensor in tensors.items()}
    found["bias"] = None if bias is None else bias.cuda()
    return found | {"out_dtype": case.out_dtype}


def graphs(rank: int, world_size: int) -> list[str]:
    """Captured calls, replayed with other operands and scales; eager calls without scales between them."""
    told = []
    cases = [ScaledCase(64, 264, 256, world_size, "block", sums=True, seed=seed) for seed in range(3)]
    static = given(cases[0], rank)
    rows = {**static, "bias": None}
    flux.reserve(max_m=64 * world_size, max_n=264, max_k=256)
    norm_weight = torch.ones(264, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scattered = flux.gemm_rs(**static)
        summed = flux.gemm_ar(**static)
        gathered = flux.ag_gemm(**rows)
        q, q_scale, _, norm = flux.gemm_ar(**static, norm_weight=norm_weight, quant="row", return_norm=True)
    plain = torch.full((64, 256), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    for number in range(30):
        case = cases[number % 3]
        for name, new in given(case, rank).items():
            if isinstance(new, torch.Tensor):
                static[name].copy_(new)
        graph.replay()
        total = case.total().cuda()
        told += differs(f"replay {number}", scattered, total.chunk(world_size)[rank])
        told += differs(f"replay {number}", summed, total)
        expected = replace(case, sums=True).gathered(rank).cuda()
        told += differs(f"replay {number} of rows", gathered, expected)
        of_norm, scale = flux.quantize(norm.cpu(), "row")
        told += differs(f"replay {number}, scales", q_scale.cpu(), scale)
        told += differs(f"replay {number}, fp8", q.cpu().view(torch.uint8), of_norm.view(torch.uint8))
        told += differs(f"eager {number}", flux.all_gather(plain)[:64], torch.full_like(plain, 1.0))
    flux.check()
    return told


def int8_between_ranks(rank: int, world_size: int) -> list[str]:
    """Sums with wire="int8" have the bits of rounding on the CPU: eager, replayed, and of products."""
    told: list[str] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, n in ((1, 128), (64, 300), (130, 1032)):  # 300: not in the kernel
            whole = [data((rows * world_size, n), source, dtype) for source in range(world_size)]
            expected = model([each.chunk(world_size)[rank] for each in whole], rank)[0].to(dtype).cuda()
            x = whole[rank].cuda()
            for _ in range(CALLS):
                told += differs(f"{rows} x {n}, {dtype}", flux.reduce_scatter(x, wire="int8"), expected)
            with mock.patch.object(int8_sum, "rows_at_once", lambda n, p: 50):  # several exchanges
                told += differs(f"{rows} x {n}, in parts", flux.reduce_scatter(x, wire="int8"), expected)
    x, weight = data((64 * world_size, 256), rank, torch.bfloat16).cuda(), torch.eye(256).bfloat16().cuda()
    expected = flux.reduce_scatter(x, wire="int8")
    told += differs("gemm_rs", flux.gemm_rs(x, weight, wire="int8"), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = flux.reduce_scatter(x, wire="int8")
    for factor in (2, 4, 8):
        x *= 2
        graph.replay()
        told += differs(f"replay times {factor}", replayed, expected * factor)
    flux.check()
    return told
