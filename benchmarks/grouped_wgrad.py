"""Times gradients of experts' weights on one GPU: flux's kernel in each tile, and torch's grouped GEMM.

    python benchmarks/grouped_wgrad.py OUT.json [--only REGEX]

Products are stored in bf16, or added to fp32 as to main_grad. Those of every candidate are compared with
exact ones first. Candidates take turns. Rows of experts are ragged.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rows_file
from flux.bench.timing import GpuTimer
from flux.ops.grouped_gemm import torch_grouped_mm
from flux.ops.grouped_wgrad import PREFETCHES, launch

WHAT = "microseconds of gradients of experts' weights, benchmarks/grouped_wgrad.py"
# Experts, n, k, and rows of an expert in the mean.
SHAPES = {
    **{f"mixtral-8x7b, EP 2, w1, {rows}": (4, 28672, 4096, rows) for rows in (1024, 2048, 4096, 8192)},
    **{f"mixtral-8x7b, EP 2, w2, {rows}": (4, 4096, 14336, rows) for rows in (1024, 2048, 4096, 8192)},
    **{f"qwen3-30b-a3b, EP 2, w1, {rows}": (64, 1536, 2048, rows) for rows in (128, 256, 1024)},
    **{f"qwen3-30b-a3b, EP 2, w2, {rows}": (64, 2048, 768, rows) for rows in (128, 256, 1024)},
}
# Of csrc/moe/grouped_wgrad.cu.
TILES = {0: "4 stages", 1: "3 stages, 5 slabs"}
DEVICE = "cuda"
Call = Callable[[], object]


class Problem:
    """Small integers, so that products are exact in fp32. Experts have 0.7 to 1.3 of the mean rows."""

    def __init__(self, experts: int, n: int, k: int, mean: int) -> None:
        counts = [
            int(mean * (0.7 + 0.6 * ((7 * e + 3) % experts) / max(1, experts - 1))) for e in range(experts)
        ]
        self.offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
        rows = sum(counts)
        self.grad, self.x = (torch.randint(-1, 2, (rows, m), device=DEVICE).bfloat16() for m in (n, k))
        self.stored = torch.empty(experts, n, k, dtype=torch.bfloat16, device=DEVICE)
        self.main_grad = torch.zeros(experts, n, k, device=DEVICE)
        self.operands = (self.grad, self.x, self.offsets)
        self.flops = 2 * rows * n * k

    def expected(self, expert: int) -> Tensor:
        first, last = (int(self.offsets[expert + i]) for i in range(2))
        return self.grad[first:last].float().t() @ self.x[first:last].float()

    def by_torch(self) -> Tensor:
        product: Tensor = torch_grouped_mm()(self.grad.t(), self.x, offs=self.offsets[1:])
        return product

    def each_added(self) -> None:
        torch._foreach_add_(list(self.main_grad.unbind()), list(self.by_torch().unbind()))


def candidates(p: Problem, adds: bool) -> Iterator[tuple[str, Call]]:
    out = p.main_grad if adds else p.stored
    for tile, name in TILES.items():
        yield f"flux, {name}", partial(launch, *p.operands, out, tile)
        if adds:
            yield f"flux, {name}, prefetched", partial(launch, *p.operands, out, tile + PREFETCHES)
    if adds:
        yield "torch._grouped_mm, add_", lambda: p.main_grad.add_(p.by_torch())
        yield "torch._grouped_mm, _foreach_add_", p.each_added
    else:
        yield "torch._grouped_mm", p.by_torch


def is_right(p: Problem, adds: bool, call: Call) -> bool:
    p.main_grad.zero_()
    p.stored.zero_()
    result = call()
    for expert in {0, len(p.offsets) // 2, len(p.offsets) - 2}:
        expected = p.expected(expert)
        if adds:
            # torch rounds what it adds.
            found, expected = p.main_grad[expert].bfloat16(), expected.bfloat16()
        else:
            product = result if isinstance(result, Tensor) else p.stored
            found, expected = product[expert], expected.bfloat16()
        if not torch.equal(found, expected):
            return False
    return True


def measure(name: str, adds: bool, timer: GpuTimer) -> dict[str, Any]:
    p = Problem(*SHAPES[name])
    calls, notes = {}, []
    for label, call in candidates(p, adds):
        if is_right(p, adds, call):
            calls[label] = call
        else:
            notes.append(f"{label} is wrong")
    for operand in (p.grad, p.x):  # small integers would need less power
        operand.normal_()
    for call in calls.values():
        timer.warm(call)
    samples = timer.interleaved(calls, 10, 5)
    us = {label: round(1e3 * statistics.median(times), 2) for label, times in samples.items()}
    tflops = {label: round(p.flops / time / 1e6) for label, time in us.items()}
    facts = {"shape": name, "experts_n_k_rows": SHAPES[name], "added": adds}
    return facts | {"us": us, "tflops": tflops, "notes": notes}


def main() -> None:
    arguments = rows_file.make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    timer, rows = GpuTimer(None, torch.device("cuda", 0)), []
    for name in SHAPES:
        for adds in (True, False):
            if re.search(arguments.only, name) is None:
                continue
            rows.append(measure(name, adds, timer))
            told = (
                f"{label} {us} ({rows[-1]['tflops'][label]} TFLOPS)" for label, us in rows[-1]["us"].items()
            )
            print(name, "added" if adds else "stored", *told, *rows[-1]["notes"], sep="  ", flush=True)
            rows_file.write(arguments.out, WHAT, rows)


if __name__ == "__main__":
    main()
