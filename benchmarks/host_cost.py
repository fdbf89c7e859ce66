"""What the host does for an eager call, on a machine without GPUs: kernels and CUDA's functions do nothing.

    make kernels
    python benchmarks/host_cost.py [--out FILE] [--only NAME ...]

Everything else is as on a GPU: torch's dispatcher and its tensors, the operators in Python, the host code of
the kernels. Times are of this thread's CPU, the fastest of several repetitions. A GPU's driver takes some
microseconds more for each launch and each copy.

total    a call of the public function that is known (flux.comm.repeat)
C++      the part of it in flux._core and in the host code of the kernels
CUDA     calls of functions of CUDA's runtime and driver, and how many of them put something on a stream
first    a call that is planned, but not yet known
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CALLS, REPETITIONS = 500, 9


def timed(call: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU for a call."""
    for _ in range(50):
        call()
    times = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - start) / CALLS * 1e6)
    return min(times)


def python_calls(call: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return count - 1  # the call itself


def cases(parts: Any, composed: Any) -> dict[str, Callable[[], object]]:
    """A call of each operator. parts, composed: the groups of those that run as several operators."""
    import torch

    import flux

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda:0")

    x, weight, residual, norm_weight = tensor(64, 1024), tensor(2048, 1024), tensor(64, 2048), tensor(2048)
    norm = {"norm_weight": norm_weight}
    many, short = tensor(16384, 1024), tensor(8192, 1024)
    wide, narrow = tensor(8192, 4096), tensor(2048, 4096)
    tokens, experts = 64, 8
    ids, weights = tensor(tokens, 2, dtype=torch.int32), tensor(tokens, 2, dtype=torch.float32)
    routing = flux.moe.route(ids, weights, experts)
    hidden, up, down = tensor(tokens, 1024), tensor(experts, 512, 1024), tensor(experts, 1024, 256)
    activated = flux.moe.ag_scatter_gemm(hidden, up, routing, activation="swiglu")
    row, block = scaled(x, weight, "row"), scaled(x, weight, "group128")
    of_layer_0, of_layer_1 = scaled(hidden, up, "group128"), scaled(activated, down, "group128")
    one = torch.empty(1, dtype=torch.float32, device="cuda:0")
    scaled_by_one = {**row, "scale_x": one, "scale_w": one}
    return {
        "gemm": lambda: flux.gemm(x, weight),
        "gemm_rs": lambda: flux.gemm_rs(x, weight),
        "gemm_rs, copy engines": lambda: flux.gemm_rs(many, short),
        "ag_gemm": lambda: flux.ag_gemm(x, weight),
        "ag_gemm, copy engines": lambda: flux.ag_gemm(many, short),
        "ag_gemm, two weights": lambda: flux.ag_gemm(x, [weight, weight]),
        "gemm_rs, in parts": lambda: flux.gemm_rs(x, weight, group=parts),
        "gemm_rs, in parts, bias": lambda: flux.gemm_rs(x, weight, norm_weight, group=parts),
        "ag_gemm, in parts": lambda: flux.ag_gemm(x, weight, group=parts),
        "ag_gemm, in parts, copy engines": lambda: flux.ag_gemm(wide, narrow, group=parts),
        "gemm_ar, in parts": lambda: flux.gemm_ar(x, weight, group=parts),
        "gemm_ar, in parts, bias": lambda: flux.gemm_ar(x, weight, norm_weight, group=parts),
        "gemm_ar, composed": lambda: flux.gemm_ar(x, weight, group=composed),
        "gemm_ar, composed, copy engines": lambda: flux.gemm_ar(many, short, group=composed),
        "gemm_ar, composed, residual": lambda: flux.gemm_ar(x, weight, residual=residual, group=composed),
        "gemm_ar, composed, norm": lambda: flux.gemm_ar(x, weight, residual=residual, **norm, group=composed),
        "gemm_ar": lambda: flux.gemm_ar(x, weight),
        "gemm_ar, norm": lambda: flux.gemm_ar(x, weight, residual=residual, norm_weight=norm_weight),
        "all_reduce": lambda: flux.all_reduce(residual),
        "all_reduce, norm": lambda: flux.all_reduce(residual, residual=residual, norm_weight=norm_weight),
        "reduce_scatter": lambda: flux.reduce_scatter(residual),
        "all_gather": lambda: flux.all_gather(x),
        "all_gather, copy engines": lambda: flux.all_gather(wide),
        "grouped_gemm": lambda: flux.grouped_gemm(activated, down, routing.offsets),
        "moe.route": lambda: flux.moe.route(ids, weights, experts),
        "moe.ag_scatter_gemm": lambda: flux.moe.ag_scatter_gemm(hidden, up, routing, activation="swiglu"),
        "moe.gemm_gather_rs": lambda: flux.moe.gemm_gather_rs(activated, down, routing),
        "gemm, fp8 of tensors": lambda: flux.gemm(**scaled_by_one),
        "gemm, fp8 of rows": lambda: flux.gemm(**row),
        "gemm, fp8 of blocks": lambda: flux.gemm(**block),
        "quantize, tensor": lambda: flux.quantize(x, "tensor"),
        "quantize, static": lambda: flux.quantize(x, "tensor", scale=one),
        "quantize, row": lambda: flux.quantize(x, "row"),
        "quantize, group128": lambda: flux.quantize(x),
        "gemm_rs, fp8": lambda: flux.gemm_rs(**block),
        "ag_gemm, fp8": lambda: flux.ag_gemm(**block),
        "gemm_ar, fp8": lambda: flux.gemm_ar(**block),
        "gemm_ar, fp8, quant": lambda: flux.gemm_ar(**block, **norm, quant="group128"),
        "all_reduce, quant": lambda: flux.all_reduce(residual, **norm, quant="group128"),
        "grouped_gemm, fp8": lambda: flux.grouped_gemm(**of_layer_1, offsets=routing.offsets),
        "moe.ag_scatter_gemm, fp8": lambda: flux.moe.ag_scatter_gemm(**of_layer_0, routing=routing),
        "moe.gemm_gather_rs, fp8": lambda: flux.moe.gemm_gather_rs(**of_layer_1, routing=routing),
    }


def vllms_experts(group: Any) -> dict[str, Callable[[], object]]:
    """A layer of experts in vLLM, as its plugin calls it for large batches: several operators in turn."""
    import torch

    from flux.integrations.vllm.experts import own_experts, summed_experts

    def case(call: Any, name: str, tokens: int, *where: Any) -> Callable[[], object]:
        hidden, inner, experts, top_k = {"Qwen3": (2048, 384, 128, 8), "Mixtral": (4096, 7168, 8, 2)}[name]

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda:0")

        weights = tensor(experts, 2 * inner, hidden), tensor(experts, hidden, inner)
        chosen = tensor(tokens, top_k, dtype=torch.int32), tensor(tokens, top_k, dtype=torch.float32)
        x = tensor(tokens, hidden)
        return lambda: call(x, *chosen, *weights, *where)

    ranks = (group.group_name, 0, 2)
    alone = torch.distributed.new_group([0]).group_name
    return {
        "vLLM's experts, Qwen3, 8192": case(summed_experts, "Qwen3", 8192, *ranks),
        "vLLM's experts, Qwen3, 8191": case(summed_experts, "Qwen3", 8191, *ranks),
        "vLLM's experts, Mixtral, 8192": case(summed_experts, "Mixtral", 8192, *ranks),
        "own part, Qwen3, 2048": case(own_experts, "Qwen3", 2048, alone),
    }


def vllms_pair(group: Any) -> dict[str, Callable[[], object]]:
    """A row-parallel layer of 8192 columns, and the norm and the layer behind it, sequence parallel in vLLM,
    with a class for weights like vLLM's, as flux leaves it.
    """
    import torch

    from flux.integrations.vllm import op, rows  # noqa: F401  (rows defines operators)

    class Weight(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, {} if kwargs is None else kwargs)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda:0")

    assert op.pass_by(Weight)
    x, residual, norm = tensor(1024, 4096), tensor(1024, 8192), (tensor(8192), 1e-5)
    down, up = (Weight(tensor(*shape), requires_grad=False) for shape in ((8192, 4096), (14336, 8192)))
    given = (x, down, None, group.group_name, residual, False, *norm, up, None)
    return {"vLLM's sum and product": lambda: torch.ops.flux_vllm.scatter_norm_gather.default(*given)}


def calls_of_cuda(call: Callable[[], object]) -> tuple[int, int]:
    """How many calls of CUDA's functions a call makes, and how many of them put something on a stream."""
    import fake_cuda  # type: ignore[import-not-found]

    before, on_streams = fake_cuda.calls(), fake_cuda.enqueued()
    call()
    return fake_cuda.calls() - before, fake_cuda.enqueued() - on_streams


def measured_sequence(call: Callable[[], object]) -> dict[str, Any]:
    """Of several operators: if known; if none is, as under torch's profiler; and for the first time."""
    from flux.comm import repeat

    call()  # the first one of a group
    everything = (*repeat.of_groups.values(), repeat.without_group())

    def forgets() -> None:
        for calls in everything:
            calls.clear()
        call()

    total, first = timed(call), timed(forgets)
    for calls in everything:
        calls.paused = True
    paused, python_of_paused = timed(call), python_calls(call)
    for calls in everything:
        calls.paused = False
    call()
    cuda_calls, enqueued = calls_of_cuda(call)
    return {
        "total_us": round(total, 2),
        "python_calls": python_calls(call),
        "cuda_calls": cuda_calls,
        "enqueued": enqueued,
        "unknown_us": round(paused, 2),
        "unknown_python_calls": python_of_paused,
        "first_us": round(first, 2),
    }


def scaled(x: Any, weight: Any, quant: str) -> dict[str, Any]:
    """Operands of these shapes in fp8, with scales of rows or of blocks."""
    import torch

    def empty(*shape: int) -> Any:
        return torch.empty(*shape, dtype=torch.float32, device=x.device)

    *experts, n, k = weight.shape
    if quant == "row":
        scales = {"scale_x": empty(len(x), 1), "scale_w": empty(*experts, n, 1)}
    else:
        of_x = empty(k // 128, len(x)).t()
        scales = {"scale_x": of_x, "scale_w": empty(*experts, n // 128, k // 128)}
    fp8 = [torch.empty_like(tensor, dtype=torch.float8_e4m3fn) for tensor in (x, weight)]
    return {"x": fp8[0], "weight": fp8[1], **scales}


class Asked:
    """KnownCalls that remembers what it was asked, to ask it again without Python around."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.given: tuple[Any, ...] = ()

    def call(self, *given: Any) -> Any:
        self.given = given
        return self._calls.call(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)


def measure(name: str, call: Callable[[], object], group: Any) -> dict[str, Any]:
    from flux.comm import repeat

    call()
    without_group, of_group = repeat.without_group, repeat.of_groups[group]
    alone = name.split(",")[0] in ("gemm", "grouped_gemm", "quantize")
    calls = without_group() if alone else of_group
    asked = Asked(calls)
    repeat.without_group, repeat.of_groups[group] = lambda: asked, asked  # type: ignore[assignment]
    call()
    repeat.without_group, repeat.of_groups[group] = without_group, of_group
    given = asked.given
    assert calls.call(*given) is not None, f"{name} is not known"

    def forgets() -> None:
        calls.clear()
        call()

    total, cpp, first = timed(call), timed(lambda: calls.call(*given)), timed(forgets)
    call()
    cuda_calls, enqueued = calls_of_cuda(call)
    return {
        "total_us": round(total, 2),
        "cpp_us": round(cpp, 2),
        "python_us": round(total - cpp, 2),
        "python_calls": python_calls(call),
        "cuda_calls": cuda_calls,
        "enqueued": enqueued,
        "first_us": round(first, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", type=Path, default=ROOT / "build/kernels", help="folder of make kernels")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="*", default=[], help="names of operators")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from host.machine import by_way, start

    group = start(options.kernels, ROOT / "build/host_cost")
    parts, composed = by_way("parts"), by_way("composed")
    import torch

    from flux.bench.record import write_rows

    rows = []
    print(f"{'us':26}{'total':>8}{'Python':>8}{'C++':>8}{'first':>8}   calls of Python, of CUDA, on streams")
    with torch.no_grad():
        for name, call in cases(parts, composed).items():
            if options.only and name not in options.only:
                continue
            of = parts if "in parts" in name else composed if "composed" in name else group
            row = measure(name, call, of)
            rows.append({"case": name, **row})
            figures = [f"{row[key]:8.2f}" for key in ("total_us", "python_us", "cpp_us", "first_us")]
            counts = [f"{row[key]:9}" for key in ("python_calls", "cuda_calls", "enqueued")]
            print(f"{name:26}{''.join(figures)}{''.join(counts)}", flush=True)
    with torch.inference_mode():
        for name, call in {**vllms_pair(group), **vllms_experts(group)}.items():
            if options.only and name not in options.only:
                continue
            row = measured_sequence(call)
            rows.append({"case": name, **row})
            print(f"{name:30}", ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.out is not None:
        what = " ".join((__doc__ or "").split("\n\n")[0].split())
        write_rows(options.out, what, rows, python=sys.version.split()[0])


if __name__ == "__main__":
    main()
