"""Times the kernels of every operator on one GPU whose SMs several emulated ranks share.

What ranks send each other stays in this GPU's memory, so no time here is that of an operator between GPUs.
But it compares two builds of flux. Run them in turns::

    PYTHONPATH=OLD python benchmarks/one_gpu.py old-1.json
    PYTHONPATH=NEW python benchmarks/one_gpu.py new-1.json
    PYTHONPATH=NEW python benchmarks/one_gpu.py new-2.json
    PYTHONPATH=OLD python benchmarks/one_gpu.py old-2.json
    python benchmarks/one_gpu.py --before old-*.json --after new-*.json

A file maps each case to microseconds a call: the median of replays of a CUDA graph of several calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

# How x and weights are quantised, by the kind of scales.
QUANTS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group128", "block128")}
CALLS = 8  # in a graph
REPLAYS = 25
WHAT = "microseconds of a call whose ranks share one GPU, benchmarks/one_gpu.py"
DEVICE = torch.device("cuda", 0)
Case = tuple[str, Callable[[], object]]
# Of this tree: an older build is timed as this one is.
_SPEC: Any = importlib.util.spec_from_file_location(
    "timing", Path(__file__).parents[1] / "python/flux/bench/timing.py"
)
timing: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(timing)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def gemms() -> Iterator[Case]:
    import flux

    for m, n, k in (
        (16, 8192, 3584),
        (64, 4096, 4096),
        (192, 8192, 7168),
        (2048, 8192, 3584),
        (8192, 8192, 3584),
    ):
        x, weight = normal(m, k), normal(n, k)
        yield f"gemm {m}x{n}x{k}", partial(flux.gemm, x, weight)


def norms() -> Iterator[Case]:
    """A residual added in place, and the norm: one kernel, and torch's two."""
    from flux.ops import norm_and_quant
    from flux.ops.add_norm import add_norm_

    for rows, columns in ((128, 8192), (512, 8192), (2048, 8192), (1024, 4096), (4096, 4096)):
        total, residual, weight = normal(rows, columns), normal(rows, columns), normal(columns)

        def by_torch(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            total += residual
            return norm_and_quant.row_norm(total, weight, 1e-5)

        yield f"add_norm {rows}x{columns}, torch", partial(by_torch, total, residual, weight)
        yield f"add_norm {rows}x{columns}", partial(add_norm_, total, residual, weight, 1e-5)


def quantised() -> Iterator[Case]:
    import flux

    for m, n, k in ((16, 8192, 3584), (64, 8192, 7168), (2048, 8192, 3584), (8192, 8192, 3584)):
        x, weight = normal(m, k), normal(n, k)
        for kind, (of_x, of_weight) in QUANTS.items():
            yield f"quantize {m}x{k}, {kind}", partial(flux.quantize, x, of_x)
            (q, scale_x), (w, scale_w) = flux.quantize(x, of_x), flux.quantize(weight, of_weight)
            call = partial(flux.gemm, q, w, scale_x=scale_x, scale_w=scale_w)
            yield f"gemm_fp8 {m}x{n}x{k}, {kind}", call
            if kind != "block":
                yield f"gemm_fp8 {m}x{n}x{k}, {kind}, fast", partial(call, accumulate="fast")


def experts() -> Iterator[Case]:
    """Gradients of experts' weights, and the steps between the GEMMs of experts."""
    import flux
    from flux.moe import rows as steps

    for count, rows, n, k in ((4, 4096, 28672, 4096), (64, 256, 1536, 2048)):
        grad, x = normal(count * rows, n), normal(count * rows, k)
        offsets = torch.arange(count + 1, dtype=torch.int32, device="cuda") * rows
        out = torch.zeros(count, n, k, device="cuda")
        yield (
            f"grouped_wgrad {count}x{rows}x{n}x{k}",
            partial(flux.grouped_wgrad_accum, grad, x, offsets, out),
        )
    for used, room, hidden, inner in ((4096, 8192, 4096, 14336), (16384, 32768, 2048, 768)):
        offsets = torch.tensor([0, used], dtype=torch.int32, device="cuda")
        tokens = torch.randint(0, used, (room,), device="cuda", dtype=torch.int32)
        scores = torch.randint(0, 2, (room,), device="cuda").float() * 2 - 1  # nothing grows
        x, rows, product = normal(room, hidden), normal(room, inner), normal(room, 2 * inner)
        name = f"{used} of {room} rows, {hidden}, {inner}"
        yield f"gather_rows {name}", partial(steps.gather_rows, x, tokens, offsets, scores)
        yield f"activate_rows {name}", partial(steps.activate_rows, product, offsets, "swiglu")
        both = partial(steps.finish_activation, rows, product, offsets, scores, "swiglu")
        yield f"finish_activation {name}", both


def quantised_ranks(world_size: int) -> Iterator[Case]:
    from flux.testing.emulate import EmulatedRanks

    ranks, count = EmulatedRanks(world_size), range(world_size)
    for op, m, n, k in (
        ("gemm_rs", 4096, 8192, 2048),
        ("gemm_rs", 8192, 8192, 3584),
        ("ag_gemm", 4096, 2048, 8192),
        ("ag_gemm", 8192, 3584, 8192),
        ("gemm_ar", 16, 8192, 2048),
        ("gemm_ar", 128, 8192, 3584),
    ):
        rows = m // world_size if op == "ag_gemm" else m
        wide = [(normal(rows, k), normal(n, k)) for _ in count]
        for kind in QUANTS:
            xs, weights, scales = zip(*(fp8_of_rank(x, weight, kind) for x, weight in wide), strict=True)
            mode = {"mode": 0} if op == "gemm_ar" else {}
            call = partial(getattr(ranks, op), xs, weights, scales=scales, **mode)
            yield f"{op}_fp8 {m}x{n}x{k}, {kind}, {world_size} ranks", call


def fp8_of_rank(x: torch.Tensor, weight: torch.Tensor, kind: str) -> tuple[Any, Any, Any]:
    import flux
    from flux.fp8.scales import Scales

    of_x, of_weight = QUANTS[kind]
    (q, scale_x), (w, scale_w) = flux.quantize(x, of_x), flux.quantize(weight, of_weight)
    return q, w, Scales(scale_x, scale_w, torch.bfloat16, "promoted").canonical(*w.shape)


def dense(world_size: int) -> Iterator[Case]:
    from flux.testing.emulate import EmulatedRanks

    ranks = EmulatedRanks(world_size)
    count = range(world_size)
    for m, n, k in ((1024, 4096, 2048), (4096, 8192, 2048), (8192, 8192, 3584)):
        xs, weights = [normal(m, k) for _ in count], [normal(n, k) for _ in count]
        for copied in (False, True):
            name = f"gemm_rs{' by copy engines' if copied else ''} {m}x{n}x{k}, {world_size} ranks"
            yield name, partial(ranks.gemm_rs, xs, weights, copied=copied, chunks=4)
    for m, n, k in ((1024, 2048, 4096), (4096, 2048, 8192), (8192, 3584, 8192)):
        xs, weights = [normal(m // world_size, k) for _ in count], [normal(n, k) for _ in count]
        name = f"{m}x{n}x{k}, {world_size} ranks"
        yield f"ag_gemm {name}", partial(ranks.ag_gemm, xs, weights)
        yield f"all_gather {name}", partial(ranks.all_gather, xs)
    few_rows = ((1, 4096, 2048), (16, 8192, 2048), (64, 8192, 2048), (128, 8192, 3584), (256, 4096, 4096))
    for m, n, k in few_rows:
        xs, weights = [normal(m, k) for _ in count], [normal(n, k) for _ in count]
        norm = {"residual": normal(m, n), "norm_weight": normal(n)}
        for mode, shot in ((0, "one-shot"), (1, "two-shot")):
            name, call = (
                f"{m}x{n}x{k}, {shot}, {world_size} ranks",
                partial(ranks.gemm_ar, xs, weights, mode=mode),
            )
            yield f"gemm_ar {name}", call
            yield f"gemm_ar_norm {name}", partial(call, **norm)
    for m, n in ((8, 8192), (128, 8192), (512, 8192)):
        xs = [normal(m, n) for _ in count]
        for mode, shot in ((0, "one-shot"), (1, "two-shot")):
            yield f"all_reduce {m}x{n}, {shot}, {world_size} ranks", partial(ranks.all_reduce, xs, mode=mode)
        yield f"reduce_scatter {m}x{n}, {world_size} ranks", partial(ranks.reduce_scatter, xs)


def mixtures(world_size: int) -> Iterator[Case]:
    from flux.testing.emulate_moe import EmulatedMoeRanks
    from flux.testing.moe_data import MoeCase

    for tokens, hidden, columns, experts, top_k in ((512, 4096, 3584, 8, 2), (1024, 4096, 768, 64, 8)):
        for ep_size in (1, world_size):
            ranks = EmulatedMoeRanks(world_size)
            case = MoeCase(
                (tokens,) * world_size, hidden, columns, experts, top_k, ep_size, torch.bfloat16, "even", 0.0
            )
            layouts = ranks.route(case)
            own = experts // ep_size
            xs = [normal(tokens, hidden) for _ in range(world_size)]
            w1s = [normal(own, columns, hidden) for _ in range(world_size)]
            w2s = [normal(own, hidden, columns) for _ in range(world_size)]
            rows = [normal(layout.max_rows, columns) for layout in layouts]
            shape = f"{tokens}x{hidden}x{columns}, {experts} experts, top {top_k}"
            name = f"{shape}, EP {ep_size}, {world_size} ranks"
            yield f"moe layer 0 {name}", partial(ranks.ag_scatter_gemm, xs, w1s)
            yield f"moe layer 1 {name}", partial(ranks.gemm_gather_rs, rows, w2s)


def time_us(timer: Any, call: Callable[[], object], graphed: bool) -> float:
    def burst() -> list[object]:
        return [call() for _ in range(CALLS)]

    replay, _ = timing.captured(burst, DEVICE) if graphed else (burst, None)
    timer.warm(replay)
    (samples,) = timer.interleaved({"": replay}, 1, REPLAYS).values()
    return round(1e3 * statistics.median(samples) / CALLS, 2)


def measure(out: Path, only: str) -> None:
    import flux

    timer = timing.GpuTimer(None, DEVICE)
    torch.manual_seed(0)
    results: dict[str, float] = {}
    ranks = (part(count) for part in (dense, quantised_ranks, mixtures) for count in (2, 4))
    for cases in (gemms(), norms(), quantised(), experts(), *ranks):
        for name, call in cases:
            if re.search(only, name) is None:
                continue
            # A captured call sends by SMs, and a copy of a layer's rows to the GPU cannot be captured.
            results[name] = time_us(timer, call, graphed="copy engines" not in name)
    rows = ",\n  ".join(json.dumps({"case": name, "us": us}) for name, us in results.items())
    head = {"what": WHAT, "gpu": torch.cuda.get_device_name(), "packages": {"flux": flux.__version__}}
    out.write_text(f'{json.dumps(head)[:-1]},\n "rows": [\n  {rows}\n ]\n}}\n')


def compare(before: list[Path], after: list[Path]) -> None:
    """Prints a line for each case, with the spread of each side, and the slowest ratio of each kind."""

    def read(path: Path) -> dict[str, float]:
        return {row["case"]: row["us"] for row in json.loads(path.read_text())["rows"]}

    sides = [list(map(read, paths)) for paths in (before, after)]
    ratios: dict[str, list[float]] = {}
    for name in sides[0][0]:
        old, new = ([run[name] for run in side if name in run] for side in sides)
        if not new:
            continue
        ratio = statistics.median(old) / statistics.median(new)
        ratios.setdefault(name.split(" ")[0], []).append(ratio)
        print(f"{ratio:6.3f}  {min(old):9.2f}-{max(old):<9.2f} {min(new):9.2f}-{max(new):<9.2f} {name}")
    for kind, values in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(
            f"{kind}: speed of after over before {mean:.3f} in the geometric mean, slowest {min(values):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="file to write")
    parser.add_argument("--only", default="", metavar="REGEX", help="names of the cases to time")
    parser.add_argument("--before", nargs="+", type=Path, default=[])
    parser.add_argument("--after", nargs="+", type=Path, default=[])
    arguments = parser.parse_args()
    if arguments.out is not None:
        measure(arguments.out, arguments.only)
    if arguments.before:
        compare(arguments.before, arguments.after)


if __name__ == "__main__":
    main()
