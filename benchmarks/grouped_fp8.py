"""Times grouped GEMMs of fp8 operands on one GPU: flux in every tile and in 16 bits, torch, and DeepGEMM.

    python benchmarks/grouped_fp8.py OUT.json [--only REGEX] [--scales row]

Every product is compared with its exact value first. Candidates take turns. All experts have a multiple of
128 rows, because DeepGEMM asks for it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import flux
import rows_file
from flux import _native
from flux.bench.timing import GpuTimer
from flux.fp8.scales import Scales
from flux.ops.grouped_gemm import launch

WHAT = "microseconds of grouped GEMMs of fp8 operands, benchmarks/grouped_fp8.py"
# Rows, experts, n, k: both products of mixtures of experts, with 2048 and 8192 tokens.
SHAPES = {
    "mixtral-8x7b, EP 2, w1, 2048": (2048, 4, 28672, 4096),
    "mixtral-8x7b, EP 2, w2, 2048": (2048, 4, 4096, 14336),
    "mixtral-8x7b, EP 2, w1, 8192": (8192, 4, 28672, 4096),
    "qwen3-235b, EP 2, w1, 8192": (32768, 64, 3072, 4096),
    "deepseek-v3, EP 8, w1, 8192": (8192, 32, 4096, 7168),
    "deepseek-v3, EP 8, w2, 8192": (8192, 32, 7168, 2048),
}
GROUPED = ((256, 3), (128, 5), (64, 7))  # columns and stages of tiles of the grouped GEMM
KINDS = ("tensor", "row", "block")
BLOCK = 128
DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn
Call = Callable[[], object]


class Problem:
    """Operands of small integers whose scales are powers of two: all products are exact."""

    def __init__(self, rows: int, experts: int, n: int, k: int, kind: str) -> None:
        self.kind, self.n, self.k, self.experts = kind, n, k, experts
        self.x = torch.randint(-1, 2, (rows, k), device=DEVICE).to(E4M3)
        self.weight = torch.randint(-1, 2, (experts, n, k), device=DEVICE, dtype=torch.int8).to(E4M3)
        of_x, of_w = {
            "tensor": ((1,), (1,)),
            "row": ((rows, 1), (experts, n)),
            "block": ((rows, k // BLOCK), (experts, -(-n // BLOCK), k // BLOCK)),
        }[kind]
        self.scale_x, self.scale_w = (
            torch.exp2(torch.randint(0, 2, shape, device=DEVICE).float()) for shape in (of_x, of_w)
        )
        each = rows // experts // BLOCK * BLOCK
        ends = [each * (i + 1) for i in range(experts - 1)] + [rows]
        self.offsets = torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
        self.wide_x, self.wide_weight = self.x.bfloat16(), self.weight.bfloat16()

    def expected(self, first: int, last: int, expert: int) -> Tensor:
        """Of some rows of an expert."""
        x, w = self.x[first:last].float(), self.weight[expert].float()
        if self.kind == "block":
            x = x * self.scale_x[first:last].repeat_interleave(BLOCK, 1)
            of_w = self.scale_w[expert].repeat_interleave(BLOCK, 0)[: self.n].repeat_interleave(BLOCK, 1)
            return (x @ (w * of_w).t()).bfloat16()
        of_x = self.scale_x[first:last] if self.kind == "row" else self.scale_x
        of_w = self.scale_w[expert] if self.kind == "row" else self.scale_w
        return (x @ w.t() * of_x * of_w).bfloat16()


def of_flux(p: Problem) -> Iterator[tuple[str, Call]]:
    operands = (p.x, p.weight, p.offsets)
    yield "flux", partial(flux.grouped_gemm, *operands, scale_x=p.scale_x, scale_w=p.scale_w)
    scales = Scales(p.scale_x, p.scale_w, torch.bfloat16, "promoted").canonical_experts(p.experts, p.n, p.k)
    for tile in _native.core.tile_configs(1):
        if tile.promotes and (tile.block_n, tile.stages) in GROUPED:
            yield f"flux {tile.name}", partial(launch, *operands, None, None, p.out, tile.id, scales=scales)


def others(p: Problem) -> Iterator[tuple[str, Call]]:
    ends = p.offsets[1:]
    if p.kind == "row":
        scales = (p.scale_x.flatten(), p.scale_w)
        for fast in (False, True):
            how = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
            name = "torch._scaled_grouped_mm" + (", fast" if fast else "")
            yield name, partial(torch._scaled_grouped_mm, p.x, p.weight.transpose(1, 2), *scales, **how)
    if p.kind == "block" and find_spec("deep_gemm") is not None:
        deep_gemm = import_module("deep_gemm")
        of_row = torch.repeat_interleave(
            torch.arange(p.experts, dtype=torch.int32, device=DEVICE), p.offsets.diff()
        )
        x = (p.x, deep_gemm.get_mn_major_tma_aligned_tensor(p.scale_x))
        call = partial(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, x, (p.weight, p.scale_w), p.out, of_row)
        yield "DeepGEMM", partial(call, disable_ue8m0_cast=True)


def in_16_bits(p: Problem) -> Iterator[tuple[str, Call]]:
    yield "flux, bf16", partial(flux.grouped_gemm, p.wide_x, p.wide_weight, p.offsets)
    weight = p.wide_weight.transpose(1, 2)
    yield "torch._grouped_mm, bf16", partial(torch._grouped_mm, p.wide_x, weight, offs=p.offsets[1:])


def is_right(p: Problem, call: Call) -> bool:
    p.out.zero_()
    result = call()
    product = result if isinstance(result, Tensor) else p.out
    for expert in {0, p.experts // 2, p.experts - 1}:
        first, last = (int(p.offsets[expert + i]) for i in range(2))
        first = max(first, last - 2 * BLOCK)
        if not torch.equal(product[first:last], p.expected(first, last, expert)):
            return False
    return True


def measure(name: str, kind: str, timer: GpuTimer) -> dict[str, Any]:
    p = Problem(*SHAPES[name], kind)
    calls, notes = {}, []
    for label, call in (*of_flux(p), *others(p)):
        try:
            right = is_right(p, call)
        except Exception as error:
            notes.append(f"{label} could not run: {error}".splitlines()[0])
            continue
        if right:
            calls[label] = call
        else:
            notes.append(f"{label} is wrong")
    calls |= dict(in_16_bits(p))
    for call in calls.values():
        timer.warm(call)
    samples = timer.interleaved(calls, 10, 5)
    us = {label: round(1e3 * statistics.median(times), 2) for label, times in samples.items()}
    return {"shape": name, "rows_experts_n_k": SHAPES[name], "scales": kind, "us": us, "notes": notes}


def main() -> None:
    parser = rows_file.make_parser(__doc__)
    parser.add_argument("--scales", action="append", choices=KINDS, help="kinds of scales; default: all")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    timer, rows = GpuTimer(None, torch.device("cuda", 0)), []
    for name in SHAPES:
        for kind in arguments.scales or KINDS:
            if re.search(arguments.only, name) is None:
                continue
            rows.append(measure(name, kind, timer))
            best = sorted(rows[-1]["us"].items(), key=lambda item: item[1])
            print(
                name, kind, *(f"{label} {us}" for label, us in best), *rows[-1]["notes"], sep="  ", flush=True
            )
            rows_file.write(arguments.out, WHAT, rows)


if __name__ == "__main__":
    main()
