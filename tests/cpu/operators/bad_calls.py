"""Calls that do not fit, for every public function: each argument in turn is replaced by what users pass by
mistake. All of it is made here, from one table of good calls and one of bad values.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import references
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import flux
from flux._sharded import local
from flux.fp8 import scales as fp8
from flux.ops import gemm, gemm_ar, grouped_gemm

Tensor = torch.Tensor
M, N, K = 8, 6, 4  # of what each rank passes; M can be dealt to 1, 2 and 4 ranks
BLOCKS = 2  # of 128 of K, of fp8 operands with block scales
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Good:
    """A call that fits, its arguments that are tensors or options, and what torch makes of it."""

    op: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: dict[str, Any]


def integers(*shape: int, odd: int = 0) -> Tensor:
    """Small, exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + odd) % 5 - 2).float().view(shape)


def scaled_arguments(kind: str, out_dtype: torch.dtype, *leading: int, n: int, k: int) -> dict[str, Any]:
    """fp8 operands, with scales of tensors, rows or blocks."""
    blocks = BLOCKS if k else 0
    k = blocks * 128 if kind == "block" else k
    scale_x, scale_w = {
        "tensor": (integers(1), integers(1)),
        "row": (integers(*leading, 1), integers(n)),
        "block": (integers(*leading, blocks), integers(-(-n // 128), blocks)),
    }[kind]
    return {
        "x": integers(*leading, k).to(FP8[0]),
        "weight": integers(n, k, odd=1).to(FP8[0]),
        "bias": integers(n, odd=2).to(out_dtype),
        "transpose_weight": False,
        "scale_x": 1 + scale_x.abs(),
        "scale_w": 1 + scale_w.abs(),
        "out_dtype": out_dtype,
        "accumulate": "promoted",
    }


def plain(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda out=None, wire=None, **rest: reference(**rest)


def normed(reference: Callable[..., Tensor]) -> Callable[..., Any]:
    def norm_reference(norm_weight: Tensor | None, eps: float, **rest: Any) -> Any:
        total = reference(**rest)
        return total if norm_weight is None else (gemm_ar.rms_norm(total, norm_weight, eps), total)

    return norm_reference


def of_scaled(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference that takes scales by position, for the arguments of the public function."""
    parameters = inspect.signature(reference).parameters.values()
    before = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if reference is grouped_gemm.reference:
        before = ["x", "weight", "offsets", "rows", "activation"]

    def scaled_reference(out: Any = None, **rest: Any) -> Any:
        return reference(*(rest.get(name) for name in (*before, *fp8.NAMES)))

    return scaled_reference


COLLECTIVES = ("gemm_rs", "ag_gemm", "gemm_ar", "all_gather", "all_reduce", "reduce_scatter")
REFERENCES = {op: getattr(references, op) for op in COLLECTIVES}
REFERENCES |= {"gemm": gemm.reference, "grouped_gemm": grouped_gemm.reference}


def good(op: str, call: Callable[..., Any] | None = None, **arguments: Any) -> Good:
    """A call of a public function beside its reference; of those that have none, beside itself."""
    function = call or operator.attrgetter(op)(flux)
    wrap = normed if "norm_weight" in arguments else of_scaled if "scale_w" in arguments else plain
    reference = wrap(REFERENCES[op]) if op in REFERENCES else function
    return Good(op, function, reference, arguments)


def good_list(arguments: dict[str, Any]) -> Good:
    """A call of ag_gemm with a list of weights."""

    def reference(x: Tensor, weight: Any, bias: Any, out: Any) -> list[Tensor]:
        assert all(type(each) is list for each in (weight, bias, out))
        return [references.ag_gemm(x, *each) for each in zip(weight, bias, strict=True)]

    return Good("ag_gemm", flux.ag_gemm, reference, arguments)


def good_linears(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[Good]:
    """Calls of column_linear, with one weight and a list of them, and of row_linear. They may be DTensors."""

    def columns(x: Tensor, weight: Any, bias: Any, sequence_parallel: bool, **_: Any) -> Any:
        reference = references.ag_gemm if sequence_parallel else gemm.reference
        if isinstance(weight, Tensor):
            return reference(x, local(weight), local(bias))
        assert all(type(each) is list for each in (weight, bias))
        return [reference(x, *map(local, each)) for each in zip(weight, bias, strict=True)]

    def rows(x: Tensor, weight: Tensor, bias: Tensor, sequence_parallel: bool, **_: Any) -> Tensor:
        reference = references.gemm_rs if sequence_parallel else references.gemm_ar
        return reference(x, local(weight), local(bias))

    lists = {"weight": [weight, weight + 1], "bias": [bias, None], "save_gathered": False}
    for sequence_parallel, given in ((True, {"save_gathered": False}), (False, lists)):
        common = {"x": x, "weight": weight, "bias": bias, "gradient_accumulation_fusion": False}
        common["sequence_parallel"] = sequence_parallel
        yield Good("column_linear", flux.layers.column_linear, columns, common | given)
        yield Good("row_linear", flux.layers.row_linear, rows, common)


def main_grad_of(op: str) -> Callable[..., Tensor]:
    """What a call has added to."""

    def call(main_grad: Tensor, **rest: Any) -> Tensor:
        getattr(flux, op)(main_grad=main_grad, **rest)
        return main_grad

    return call


def good_scaled_calls(p: int) -> list[Good]:
    """Calls with fp8 operands, and of what makes them."""
    # Sums of blocks are not exact in 16 bits.
    rows = scaled_arguments("row", torch.float16, M, n=N, k=K)
    block = scaled_arguments("block", torch.float32, M, n=N, k=K)
    ids, scores = torch.arange(2 * M).view(M, 2) % 4, integers(M, 2).abs() + 1
    routing = flux.moe.route(ids, scores, 4)
    how = {"scale_x": 1 + integers(M, 1).abs(), "out_dtype": torch.float32, "accumulate": "promoted"}
    tokens = {"x": integers(M, K).to(FP8[0])} | how
    hidden = integers(len(routing.rows), N).to(FP8[1])
    of_hidden = how | {"x": hidden, "scale_x": 1 + integers(len(hidden), 1).abs()}
    experts = {"weight": integers(4, N, K, odd=3).to(FP8[0]), "scale_w": 1 + integers(4, N).abs()}
    w2 = {"weight": integers(4, K, N, odd=1).to(FP8[0]), "scale_w": 1 + integers(4, K).abs()}
    offsets, order = torch.tensor([0, 3, 3, 5, M], dtype=torch.int32), torch.arange(M).flip(0)
    x, given = integers(M, K), torch.ones(1)
    return [
        good("gemm", **rows, out=torch.zeros(M, N).half()),
        good("gemm", **block),
        good("gemm_rs", **rows, out=torch.zeros(M // p, N).half()),
        good("gemm_rs", **block),
        good("ag_gemm", **rows, out=torch.zeros(M * p, N).half()),
        good("gemm_ar", **block),
        good("grouped_gemm", **tokens, **experts, offsets=offsets, rows=order, activation="silu"),
        good("moe.ag_scatter_gemm", **tokens, **experts, routing=routing, activation=None),
        good("moe.gemm_gather_rs", **of_hidden, **w2, routing=routing),
        good("quantize", x=x, quant="row", scale=None, ue8m0=False, dtype=FP8[0]),
        good("quantize", x=x, quant="tensor", scale=given, ue8m0=False, dtype=FP8[1]),
    ]


def good_dense(p: int, *leading: int, n: int = N, k: int = K) -> list[Good]:
    """Of operators with a dense weight or none, for x [*leading, k]."""
    x, weight, bias = integers(*leading, k), integers(n, k, odd=1), integers(n, odd=2)
    common: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "transpose_weight": False}
    m, grad, like_x = leading[0], integers(*leading, n), integers(*leading, k)
    of_norm = {"residual": like_x, "norm_weight": integers(k), "eps": 1e-6}

    def out(rows: int, columns: int = n) -> Tensor:
        return torch.zeros(rows, *leading[1:], columns)

    return [
        good("gemm", **common, out=out(m)),
        good("gemm_rs", **common, out=out(m // p), wire=None),
        good("ag_gemm", **common, out=out(m * p)),
        good_list(
            {"x": x, "weight": [weight, weight + 1], "bias": [bias, None], "out": [out(m * p), out(m * p)]}
        ),
        good("gemm_ar", **common, residual=grad, out=out(m)),
        good("gemm_ar", **common, residual=grad, norm_weight=integers(n), eps=1e-6),
        good("all_gather", x=x, out=out(m * p, k)),
        good("all_reduce", x=x, residual=like_x, out=out(m, k)),
        good("all_reduce", x=x, **of_norm),
        good("reduce_scatter", x=x, out=out(m // p, k), wire=None),
        *good_linears(x, weight, bias),
    ]


def good_calls(p: int) -> list[Good]:
    """One for each public function that takes tensors; new tensors every time."""
    x, grad, offsets = integers(M, K), integers(M, N), torch.tensor([0, 3, 3, M], dtype=torch.int32)
    experts, order = integers(3, N, K, odd=3), torch.arange(M).flip(0)
    ids, scores = torch.arange(2 * M).view(M, 2) % 4, integers(M, 2).abs() + 1
    routing = flux.moe.route(ids, scores, 4)
    w1, w2, hidden = integers(4, N, K), integers(4, K, N, odd=1), integers(len(routing.rows), N)
    return [
        *good_dense(p, M),
        good("grouped_gemm", x=x, weight=experts, offsets=offsets, rows=order, activation="silu"),
        good("wgrad_accum", main_grad_of("wgrad_accum"), grad_output=grad, x=x, main_grad=torch.zeros(N, K)),
        good("grouped_wgrad", grad_output=grad, x=x, offsets=offsets),
        good(
            "grouped_wgrad_accum",
            main_grad_of("grouped_wgrad_accum"),
            **{"grad_output": grad, "x": x, "offsets": offsets, "main_grad": torch.zeros(3, N, K)},
        ),
        good("moe.route", topk_ids=ids, topk_weights=scores, num_experts=4, ep_size=1, max_tokens=M),
        good("moe.ag_scatter_gemm", x=x, weight=w1, routing=routing, activation=None),
        good("moe.gemm_gather_rs", x=hidden, weight=w2, routing=routing),
        *good_scaled_calls(p),
    ]


def bad_tensors(good: Tensor, needs_grad: bool) -> Iterator[tuple[str, Any]]:
    """What may stand in the place of a tensor. needs_grad: a gradient would be asked for in vain."""
    if good.dtype in FP8:  # torch makes little of these: made in fp32, then cast
        for what, bad in bad_tensors(good.float(), False):
            plain = type(bad) is Tensor and bad.layout is torch.strided and not bad.is_nested
            if plain and bad.dtype == torch.float32:
                yield what, bad.to(good.dtype)
            yield f"fp32 or else: {what}", bad
        if needs_grad:
            yield "needing a gradient", good.clone().requires_grad_()
        return
    yield from [
        ("None", None),
        ("a number", 3),
        ("a float", 0.5),
        ("a string", "x"),
        ("bytes", b"x"),
        ("nested lists", good.tolist()),
        ("an array", good.numpy()),
        ("a list of it", [good]),
        ("a tuple of it", (good,)),
        ("a dict", {"x": good}),
        ("its type", type(good)),
        ("a function", lambda: good),
        ("its shape", good.shape),
        ("its storage", good.untyped_storage()),
        ("a module", torch.nn.Linear(2, 2)),
        ("a generator", iter([good])),
        ("COO", good.to_sparse()),
        ("nested", torch.nested.nested_tensor([good, good], layout=torch.jagged)),
        ("nested, strided", torch.nested.nested_tensor([good, good])),
        ("on meta", good.to("meta")),
        ("empty", good.new_empty(0)),
        ("no dimension", torch.tensor(1, dtype=good.dtype)),
        ("one more dimension", good[None]),
        ("two more dimensions", good[None, None]),
        ("flat", good.flatten()),
        ("one more row", torch.cat([good, good[:1]])),
        ("one row less", good[:-1]),
        ("no rows", good[:0]),
        ("every second row", good[::2]),
        ("one row for all", good[:1].expand(good.shape)),
        ("twice", torch.cat([good, good])),
    ]
    if good.dim() > 1:
        yield from [
            ("one more column", torch.cat([good, good[..., :1]], -1)),
            ("one column less", good[..., :-1]),
            ("no columns", good[..., :0]),
            ("transposed", good.transpose(0, 1)),
            ("one dimension less", good[0]),
            ("CSR", good.reshape(-1, good.shape[-1]).to_sparse_csr()),
            ("its mean", good.float().mean(0)),
        ]
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
    ):
        if dtype != good.dtype:
            yield str(dtype), good.to(dtype)
    yield "conjugated", good.to(torch.complex64).conj()
    if good.is_floating_point():
        yield "negated", torch._neg_view(good)
        yield "quantised", torch.quantize_per_tensor(good.float(), 1.0, 0, torch.quint8)
        yield "quantised by channel", torch.quantize_per_tensor(good.float(), 1.0, 0, torch.qint32)
        yield "a DTensor", as_dtensor(good)
        if needs_grad:
            yield "needing a gradient", good.clone().requires_grad_()
            yield "a parameter", torch.nn.Parameter(good.clone())


def as_dtensor(local: Tensor) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


BAD_OPTIONS: dict[str, list[Any]] = {
    "out_dtype": [torch.float64, torch.int8, torch.float8_e4m3fn, "bfloat16", 3, [], torch.complex64],
    "accumulate": ["slow", "", None, True, 1, ["fast"], b"fast"],
    "quant": ["rows", "", None, 1, True, ["row"], b"row"],
    "scale": [1.0, "1", [1.0], torch.ones(1), torch.ones(2)],
    "ue8m0": [None, 0, 1, "no", 0.0, [], torch.tensor(True)],
    "dtype": [torch.int8, torch.bfloat16, torch.float8_e4m3fnuz, "float8", None, 8],
    "wire": ["int4", "INT8", "", 8, True, ["int8"], b"int8"],
    "transpose_weight": [None, 0, 1, "no", 0.0, [], torch.tensor(True), (False,), b"", {}],
    "sequence_parallel": [None, 0, 1, "no", 0.0, [], torch.tensor(True)],
    "gradient_accumulation_fusion": [None, 0, 1, "no", []],
    "save_gathered": [None, 0, 1, "always", []],
    "return_gathered": [None, 0, 1, "no", 0.0, [], torch.tensor(True)],
    "eps": ["1e-6", -1.0, -1e-30, float("nan"), -float("inf"), [], True, torch.tensor(1e-6), 1j],
    "activation": ["relu", "SiLU", "", 1, True, ["silu"], b"silu", torch.nn.functional.silu],
    "num_experts": [0, -4, 3.0, "4", None, True, [4], 2**40, 2**63, 3, 5.5],
    "ep_size": [0, -1, 3, 1.0, "1", None, True, 2**40, -(2**70), 7],
    "max_tokens": [-1, 0, M - 1, 8.0, "8", True, [8], 2**40, 2**62, 2**63],
    "routing": [None, 3, (), [], "routing", {}],
    "group": [3, "nobody", 1.5, [], True, object(), dist.GroupMember.NON_GROUP_MEMBER, int],
}


WITHOUT_GROUP = ("gemm", "grouped_gemm", "wgrad_accum", "grouped_wgrad", "grouped_wgrad_accum", "quantize")


def bad_calls(good: Good) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is wrong, the arguments) of calls that differ from a good one in one argument."""
    # A backward pass through these is refused, others have one.
    without = ("gemm_ar", "wgrad_accum", "grouped_wgrad_accum", "quantize")
    refuses_gradients = not {"out", "scale_x"}.isdisjoint(good.arguments) or good.op in without
    for name, value in good.arguments.items():
        if isinstance(value, Tensor):
            for what, bad in bad_tensors(value, refuses_gradients):
                yield f"{name}: {what}", good.arguments | {name: bad}
        elif isinstance(value, list):
            for what, bad in bad_tensors(value[0], refuses_gradients):
                if bad is not None:
                    yield f"{name}[0]: {what}", good.arguments | {name: [bad, value[1]]}
            for other in ([], value[:1], [*value, value[0]], value[0], 3, "x", {"x": value[0]}):
                yield f"{name}: {other!r:.40}", good.arguments | {name: other}
        else:
            for bad in BAD_OPTIONS[name]:
                yield f"{name}: {bad!r}", good.arguments | {name: bad}
    if good.op.startswith("moe") and good.op != "moe.route":
        for field in ("rows", "offsets", "positions", "weights"):
            for what, bad in (
                ("None", None),
                ("a list", [1]),
                ("on meta", torch.zeros(2, device="meta")),
                ("a number", torch.tensor(1)),
            ):
                routing = good.arguments["routing"]._replace(**{field: bad})
                yield f"routing: {field} {what}", good.arguments | {"routing": routing}
        for field in ("num_experts", "ep_size", "max_tokens", "num_tokens", "group_name"):
            for bad in (None, int, [1], {1}, "nobody", 2**63, -1, 1.5):
                routing = good.arguments["routing"]._replace(**{field: bad})
                yield f"routing: {field} {bad!r}", good.arguments | {"routing": routing}
    if good.op not in WITHOUT_GROUP and "routing" not in good.arguments:
        for bad in BAD_OPTIONS["group"]:
            yield f"group: {bad!r}", good.arguments | {"group": bad}
    if isinstance(good.arguments.get("out"), Tensor):
        yield from overlapping(good)


def overlapping(good: Good) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls whose `out` shares memory with an input, or with itself."""
    out = good.arguments["out"]
    for name, value in good.arguments.items():
        if not isinstance(value, Tensor) or name == "out":
            continue
        for shift in (0, 1, value.numel() - 1):
            # The input lies in one piece of memory with `out`, which begins `shift` elements after it.
            memory = torch.zeros(value.numel() + out.numel() + shift)
            inside = memory[: value.numel()].view(value.shape).copy_(value)
            place = memory[shift : shift + out.numel()].view(out.shape)
            allowed = shift == 0 and inside.shape == place.shape
            may_be = {("gemm_ar", "residual"), ("all_reduce", "x"), ("all_reduce", "residual")}
            if not (allowed and (good.op, name) in may_be):
                yield f"out: {shift} elements behind {name}", good.arguments | {name: inside, "out": place}
    yield "out: expanded", good.arguments | {"out": torch.zeros(1, 1).expand(out.shape)}
    yield "out: strided", good.arguments | {"out": torch.zeros(out.shape[0], 2 * out.shape[1])[:, ::2]}
