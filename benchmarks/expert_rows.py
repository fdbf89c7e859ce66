"""Times the steps between the GEMMs of expert layers on one GPU: kernels, torch's formulas, and a copy that
moves as many bytes as a kernel.

    python benchmarks/expert_rows.py OUT.json [--only REGEX]

Candidates take turns. Results are compared by tests/gpu/test_gpu_expert_rows.py.
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
from flux.moe import rows as steps

WHAT = "microseconds of the steps between the GEMMs of experts, benchmarks/expert_rows.py"
# Rows that experts have, room for rows, H, I.
SHAPES = {
    "mixtral-8x7b, EP 2, 4096 tokens": (4096, 8192, 4096, 14336),
    "mixtral-8x7b, TP 2, 4096 tokens": (8192, 8192, 4096, 7168),
    "qwen3-30b-a3b, EP 2, 4096 tokens": (16384, 32768, 2048, 768),
}
DEVICE, ITEM = "cuda", 2
Call = Callable[[], object]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def problem(used: int, room: int, hidden: int, inner: int) -> Iterator[tuple[str, int, Call, Call]]:
    """Of each step its name, bytes that the kernel moves, the call of the kernel and that of torch's formula.

    Steps that overwrite an operand find their own results in it. Scores are 1 and -1, so that nothing grows.
    """
    offsets = torch.tensor([0, used], dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, used, (room,), device=DEVICE, dtype=torch.int32)
    scores = torch.randint(0, 2, (room,), device=DEVICE).float() * 2 - 1
    x, rows, other, product = (random(room, n) for n in (hidden, inner, inner, 2 * inner))
    of_x, of_rows, of_rest = (n * ITEM for n in (used * hidden, used * inner, (room - used) * inner))
    gather, finish = (x, tokens, offsets, scores), (rows, offsets, scores, other)
    forward, backward = (product, offsets, "swiglu"), (rows, product, offsets, "swiglu")

    def finish_activation() -> None:
        active = steps._activated(*forward)
        steps._finished(rows, offsets, scores, active)
        steps._activation_grad(*backward)

    yield "gather", 2 * of_x, partial(steps.gather_rows, *gather), partial(steps._gathered, *gather)
    yield "activate", 3 * of_rows, partial(steps.activate_rows, *forward), partial(steps._activated, *forward)
    size = 3 * of_rows + of_rest
    yield "finish", size, partial(steps.finish_rows, *finish), partial(steps._finished, *finish)
    calls = (partial(each, *backward) for each in (steps.activation_grad, steps._activation_grad))
    yield "activation_grad", 5 * of_rows, *calls
    both = partial(steps.finish_activation, rows, product, offsets, scores, "swiglu")
    yield "finish_activation", 6 * of_rows, both, finish_activation


def measure(name: str, timer: GpuTimer) -> Iterator[dict[str, Any]]:
    for step, size, kernel, formula in problem(*SHAPES[name]):
        source = torch.empty(size // 2, dtype=torch.uint8, device=DEVICE)
        copy = partial(torch.empty_like(source).copy_, source)
        calls: dict[str, Call] = {"flux": kernel, "torch": formula, "copy of as many bytes": copy}
        for call in calls.values():
            timer.warm(call)
        samples = timer.interleaved(calls, 10, 5)
        us = {label: round(1e3 * statistics.median(times), 2) for label, times in samples.items()}
        facts = {
            "shape": name,
            "used_room_hidden_inner": SHAPES[name],
            "step": step,
            "mb": round(size / 1e6, 1),
        }
        yield facts | {"us": us, "of_the_copy": round(us["copy of as many bytes"] / us["flux"], 3)}


def main() -> None:
    arguments = rows_file.make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    timer, rows = GpuTimer(None, torch.device("cuda", 0)), []
    with torch.no_grad():
        for name in SHAPES:
            for row in measure(name, timer) if re.search(arguments.only, name) else ():
                rows.append(row)
                print(name, row["step"], row["mb"], row["us"], row["of_the_copy"], sep="  ", flush=True)
                rows_file.write(arguments.out, WHAT, rows)


if __name__ == "__main__":
    main()
