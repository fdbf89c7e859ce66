"""What each rank of the tests of fp8 between GPUs does. Functions that spawn() can import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from ar_workers import not_everywhere
from dist_workers import differs
from int8_model import data, model

import flux
from flux.ops.norm_and_quant import QUANTS
from flux.ops.ways import int8_sum
from flux.testing import ScaledCase
from flux.testing.scaled_data import exact_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows of a rank, n, k. The last one has shards of 8 MiB and more: copy engines carry those.
SHAPES = [(1, 8, 128), (64, 264, 256), (129, 1032, 640), (512, 4096, 1024), (2050, 264, 4224)]
CALLS = 3  # the same call again goes shorter ways through the host code


def scaled_cases(world_size: int, sums: bool) -> Iterator[tuple[ScaledCase, str]]:
    """Problems of every kind of scales, whose m is the rows of one rank, and how they accumulate."""
    for kind in ("tensor", "row", "block"):
        for number, (rows, n, k) in enumerate(SHAPES):
            if sums and kind == "block" and k > 1024:
                k = 1024  # else the sums are not exact in 16 bits
            x_dtype, out_dtype = (E4M3, E5M2)[number % 2], (torch.bfloat16, torch.float16)[number // 2 % 2]
            bias = number % 3 == 0
            case = ScaledCase(rows, n, k, world_size, kind, x_dtype, out_dtype, bias, sums, number)
            yield case, "promoted"
            if kind == "row":
                yield replace(case, x_dtype=E4M3), "fast"


def given(case: ScaledCase, rank: int, accumulate: str = "promoted") -> dict[str, Any]:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    tensors = {"x": x, "weight": weight, "scale_x": scale_x, "scale_w": scale_w}
    found: dict[str, Any] = {name: tensor.cuda() for name, tensor in tensors.items()}
    found["bias"] = None if bias is None else bias.cuda()
    return found | {"out_dtype": case.out_dtype, "accumulate": accumulate}


def exact(rank: int, world_size: int) -> list[str]:
    told = []
    for case, accumulate in scaled_cases(world_size, sums=True):
        whole = replace(case, m=case.m * world_size)
        expected = whole.total().cuda()
        scattered = given(whole, rank, accumulate)
        for _ in range(CALLS):
            told += differs(whole, flux.gemm_rs(**scattered), expected.chunk(world_size)[rank])
        summed, total = given(case, rank, accumulate), case.total().cuda()
        out = torch.full_like(total, 7)
        for _ in range(CALLS):
            told += differs(case, flux.gemm_ar(**summed), total)
            told += differs(f"out of {case}", flux.gemm_ar(**summed, out=out), total)
    for case, accumulate in scaled_cases(world_size, sums=False):
        gathering, expected = given(case, rank, accumulate), case.gathered(rank).cuda()
        rows = torch.cat([case.x(source)[0].float() for source in range(world_size)]).cuda()
        scales = [case.x(source)[1] for source in range(world_size)]
        of_rows = torch.cat([s if s.dim() == 2 else s.expand(case.m, 1) for s in scales]).cuda()
        for _ in range(CALLS):
            told += differs(case, flux.ag_gemm(**gathering), expected)
            result, gathered, scale = flux.ag_gemm(**gathering, return_gathered=True)
            told += differs(f"with gathered {case}", result, expected)
            told += differs(f"gathered {case}", gathered.float(), rows)
            told += differs(f"gathered scales {case}", scale, of_rows)
    # Neither operator may have been tested unfused.
    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        for kind in ("tensor", "row", "block"):
            plan = flux.explain(op, 64 * world_size, 264, 256, dtype=E4M3, scales=kind)
            if not plan.by_flux:
                told.append(str(plan))
    flux.check()
    return told


def quantised(rank: int, world_size: int) -> list[str]:
    """fp8 of the norm has the bits of flux.quantize, on all ranks."""
    told = []
    for number, (m, n, k) in enumerate([(1, 4096, 128), (16, 1024, 256), (64, 8192, 384), (300, 2048, 256)]):
        case = ScaledCase(m, n, k, world_size, "block", sums=True, seed=number)
        partial = exact_product(*case.x(rank), *case.weight(rank)).bfloat16().cuda()
        residual, norm_weight = case.residual().cuda(), torch.ones(n, dtype=torch.bfloat16).cuda()
        total = (case.total().float() + case.residual()).bfloat16().cuda()
        calls: tuple[Callable[..., Any], ...] = (
            lambda **end: flux.gemm_ar(**given(case, rank), **end),  # noqa: B023
            lambda **end: flux.all_reduce(partial, **end),  # noqa: B023
        )
        for quant in QUANTS:
            for options in ({}, {"ue8m0": True}, {"scale": torch.tensor([0.02])}):
                static: Any = options.get("scale")
                if static is not None and quant != "tensor":
                    continue
                end = {"quant": quant, "ue8m0": "ue8m0" in options, "return_norm": True}
                end |= {"residual": residual, "norm_weight": norm_weight}
                end["quant_scale"] = None if static is None else static.cuda()
                for call in calls:
                    for _ in range(CALLS):
                        q, scale, summed, norm = call(**end)
                        expected, scales = flux.quantize(norm.cpu(), quant, **options)  # type: ignore[arg-type]
                        what = f"{quant} {sorted(options)} {case}"
                        told += differs(f"sum, {what}", summed, total)
                        told += differs(f"scales, {what}", scale.cpu(), scales)
                        told += differs(what, q.cpu().view(torch.uint8), expected.view(torch.uint8))
                        told += not_everywhere(what, norm)
    flux.check()
    return told


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
