"""How torch sees flux's operators: opcheck of each (schema, aliases, fakes, gradients), meta tensors, and
torch.compile of functions that call them. One set of processes for one rank, and one for two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from cases import scenario_test
from torch import Tensor
from torch._inductor import compile_fx  # noqa: F401  (spawn then imports it once for all ranks)
from torch.utils._pytree import tree_leaves

import flux
from flux.ops.grouped_gemm import ACTIVATIONS
from flux.ops.quantize import QUANTS
from flux.testing import ScaledCase
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_moe_data import ScaledMoe

E4M3, HALF, F32 = torch.float8_e4m3fn, torch.float16, torch.float32
KINDS = ("tensor", "row", "block")
OFFSETS = torch.tensor([0, 0, 5, 5, 8], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2], [3, 1]])
Checks = Iterator[tuple[str, tuple[Any, ...]]]  # an operator and its arguments


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def scaled(case: ScaledCase, rank: int) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """x, the weight, and what follows for fp8."""
    x, weight, scale_x, scale_w, _ = case.inputs(rank)
    return x, weight, (scale_x, scale_w, HALF, "promoted")


def scaled_experts(kind: str, *tokens: int) -> ScaledMoe:
    return ScaledMoe(MoeCase(tokens, 256, 160, 4, 2, skew="skewed", seed=2), kind, E4M3, F32)


def without_group() -> Checks:
    x, experts, grad, w = torch.randn(8, 24), torch.randn(4, 16, 24), torch.randn(8, 16), torch.randn(6, 260)
    yield "grouped_gemm", (x, experts, OFFSETS, None, None)
    yield "grouped_gemm", (x, experts, OFFSETS, torch.arange(8), "swiglu")
    for cast in (torch.Tensor.float, torch.Tensor.bfloat16):
        yield "wgrad_accum", (cast(grad), cast(x), torch.ones(16, 24))
        yield "grouped_wgrad", (cast(grad), cast(x), OFFSETS)
        yield "grouped_wgrad_accum", (cast(grad), cast(x), OFFSETS, torch.ones(4, 16, 24))
    for kind in KINDS:
        q, weight, how = scaled(ScaledCase(6, 140, 260, 1, kind), 0)
        given, case = (q, weight, torch.ones(140, dtype=HALF), False), scaled_experts(kind, 8)
        yield "gemm", (*given, *how)
        yield "gemm_out", (*given, torch.empty(6, 140, dtype=HALF), *how)
        (q, scale_x), (weight, scale_w) = case.x(0), case.w1(0)
        yield "grouped_gemm", (q, weight, OFFSETS, torch.arange(8), "silu", scale_x, scale_w, *how[2:])
    for quant, scale in (*((each, None) for each in QUANTS), ("tensor", torch.ones(1))):
        yield "quantize", (w, quant, scale, scale is None, E4M3)
    # The steps between the GEMMs of expert layers.
    rows, scores = torch.randn(8, 16).bfloat16(), torch.ones(8)
    for factors, others in ((scores, rows + 1), (None, None)):
        yield "moe_gather_rows", (rows[:4], torch.tensor([3, 0, 3, 2, 1, 0, 0, 0]), OFFSETS, factors)
        yield "moe_finish_rows", (rows, OFFSETS, factors, others)
    for activation in ACTIVATIONS:
        back = rows[:, : 8 if activation == "swiglu" else 16].contiguous()
        yield "moe_activate_rows", (rows.clone().requires_grad_(), OFFSETS, activation)
        yield "moe_finish_activation", (back, rows, OFFSETS, scores, activation)
        yield "moe_activation_grad", (back, rows, OFFSETS, activation)


def dense(p: int, name: str) -> Checks:
    x, weight, bias = leaf(4 * p, 8), leaf(6, 8), leaf(6)
    yield "gemm", (x, weight, bias, False)
    yield "gemm_rs", (x, weight, bias, False, name)
    yield "ag_gemm", (x, [weight, weight], [], False, True, name)
    yield "ag_gemm", (x, [weight, weight], [bias, None], False, False, name)
    yield "gemm_rs_with_gather", (x, weight, False, bias, name)
    yield "all_gather", (x, name)
    yield "reduce_scatter", (x, name)
    yield "reduce_scatter", (leaf(2 * p, 130), name, "int8")
    yield "reduce_scatter_out", (torch.ones(2 * p, 130), name, torch.empty(2, 130), "int8")
    x, weight, bias, residual = x.detach(), weight.detach(), torch.ones(6), torch.ones(4 * p, 6)
    rows, whole, gathered = torch.empty(4, 6), torch.empty(4 * p, 6), torch.empty(4 * p * p, 6)
    yield "gemm", (x, weight.t().contiguous(), bias, True)
    yield "gemm_out", (x, weight, bias, False, whole)
    yield "gemm_rs_out", (x, weight, None, False, name, rows)
    yield "ag_gemm_out", (x, [weight], [bias], False, False, name, [gathered])
    yield "ag_gemm_out", (x, [weight], [], False, True, name, [gathered, torch.empty(4 * p * p, 8)])
    yield "gemm_ar", (x, weight, bias, False, residual, name)
    yield "gemm_ar_out", (x, weight, None, False, None, name, whole)
    yield "gemm_ar_norm", (x, weight, None, False, residual, bias, 1e-6, name)
    yield "all_reduce", (x, None, name)
    yield "all_reduce", (residual, residual + 1, name)
    yield "all_reduce_out", (x, None, name, torch.empty_like(x))
    yield "all_reduce_norm", (residual, residual + 1, bias, 1e-6, name)
    yield "all_gather_out", (x, name, torch.empty(4 * p * p, 8))
    yield "reduce_scatter_out", (x, name, torch.empty(4, 8))


def of_fp8(rank: int, p: int, name: str) -> Checks:
    """What is behind the scales is the same for all kinds."""
    x, weight, how = scaled(ScaledCase(4 * p, 24, 260, p, "block", sums=True), rank)
    given, out, whole = (x, weight, None, False), torch.zeros(4, 24).half(), torch.zeros(4 * p, 24).half()
    norm, quant = torch.ones(24).half(), ("group128", None, False, True)
    yield "gemm_rs", (*given, name, *how)
    yield "gemm_rs_out", (*given, name, out, *how)
    yield "ag_gemm", (x, [weight], [], False, True, name, how[0], [how[1]], *how[2:])
    yield "gemm_ar", (*given, None, name, *how)
    yield "gemm_ar_out", (*given, None, name, whole, *how)
    yield "gemm_ar_norm", (*given, None, norm, 1e-6, name, *how)
    yield "gemm_ar_quant", (*given, whole, norm, 1e-6, name, *quant, *how)
    yield "all_reduce_quant", (whole, None, norm, 1e-6, name, *quant)


def experts(rank: int, name: str) -> Checks:
    for ep_size in (1, 2):
        yield "moe_route", ((IDS + rank) % 4, torch.rand(6, 2), 4, ep_size, 6, name, None)
    routing = flux.moe.route((IDS + rank) % 4, torch.rand(6, 2), 4)
    tensors, sizes = [*routing[:10], routing.weights.requires_grad_()], (4, 1, 6, 6)
    yield "moe_tokens_of_rows", (routing.rows, routing.incoming, *sizes[1:3], name)
    yield "moe_ag_scatter_gemm", (leaf(6, 8), leaf(4, 12, 8), tensors, *sizes, "swiglu", name)
    yield "moe_gemm_gather_rs", (leaf(len(routing.rows), 6), leaf(4, 8, 6), tensors, *sizes, None, name)
    case = scaled_experts("block", 7, 37)
    routing = case.route(rank)
    given = ([*routing[:11]], *routing[11:15], None, name)
    (x, scale_x), (weight, scale_w) = case.x(rank), case.w1(rank)
    yield "moe_ag_scatter_gemm", (x, weight, *given, scale_x, scale_w, HALF, "promoted")
    (x, scale_x), (weight, scale_w) = case.hidden_rows(rank, len(routing.rows)), case.w2(rank)
    yield "moe_gemm_gather_rs", (x, weight, *given, scale_x, scale_w, HALF, "promoted")


def checked(rank: int, p: int) -> None:
    """Every operator, in the same order on all ranks; those without a group on one rank."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    checks = [*dense(p, name)]
    checks += [*without_group()] if p == 1 else [*of_fp8(rank, p, name), *experts(rank, name)]
    for op, arguments in checks:
        # The test of the schema compares tensors, which torch cannot do in fp8.
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        in_fp8 = any(isinstance(each, Tensor) and each.dtype == E4M3 for each in tree_leaves(arguments))
        torch.library.opcheck(getattr(torch.ops.flux, op).default, arguments, test_utils=tests[in_fp8:])
    names = {each.removeprefix("flux::") for each in torch._C._dispatch_get_all_op_names()}
    unseen = {each for each in names if ":" not in each and not each.startswith("_")}
    assert p == 1 or unseen == {op for op, _ in (*checks, *without_group())}


def with_gradients(x: Tensor, gate: Tensor, bias: Tensor, down: Tensor, scores: Tensor) -> list[Tensor]:
    (a, b), rows = flux.ag_gemm(x * 2, [gate, gate + 1], [bias, None], return_gathered=True)
    y = flux.gemm_rs(torch.nn.functional.silu(a) * b, down)
    dense = flux.gemm(y, y) + flux.all_gather(y).sum() + flux.reduce_scatter(rows * 2).sin().mean()
    routing = flux.moe.route(IDS[: len(x)], scores * 2, 4, group=dist.group.WORLD)
    rows = flux.moe.ag_scatter_gemm(x * 2, gate.expand(4, 6, 8), routing, activation="swiglu")
    of_experts = flux.moe.gemm_gather_rs(torch.tanh(rows), down[:, :3].expand(4, 5, 3), routing)
    return [dense, of_experts + 1, flux.grouped_gemm(x, gate.expand(4, 6, 8), OFFSETS.clamp(max=len(x)))]


def without_gradients(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    out = torch.empty(x.shape[0] * dist.get_world_size(), 6)
    flux.ag_gemm(x, weight, out=out, group=dist.group.WORLD)
    y, residual = flux.gemm_ar(x * 2, weight, bias, residual=residual, norm_weight=bias)
    z, residual = flux.all_reduce(y, residual=residual, norm_weight=bias)
    rounded = flux.gemm_rs(x, weight, wire="int8") + flux.reduce_scatter(x * 2, wire="int8")[:, :1]
    quantised = [each for quant in QUANTS for each in flux.quantize(x * 2, quant)]
    return [
        torch.relu(z) + flux.gemm_ar(x, weight).sum(),
        out,
        flux.all_reduce(residual),
        rounded,
        *quantised,
    ]


def of_scales(x: Tensor, scale_x: Tensor, weight: Tensor, scale_w: Tensor) -> list[Tensor]:
    how: Any = {"scale_x": scale_x, "scale_w": scale_w}
    flipped = flux.gemm(x, weight.t(), scale_x=scale_x, scale_w=scale_w.t(), transpose_weight=True)
    found = [flipped, flux.gemm_rs(x, weight, **how).relu(), flux.ag_gemm(x, weight, **how)]
    norm = torch.ones(24, dtype=torch.bfloat16)
    return [*found, *flux.gemm_ar(x, weight, norm_weight=norm, quant="row", **how)]


def compiled(rank: int, p: int) -> None:
    """Results and gradients are those of the functions themselves; of several numbers of rows."""
    given: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = []
    for rows in (4, 6):
        shapes = (rows, 8), (6, 8), (6,), (5, 6), (rows, 2)
        given.append((with_gradients, tuple(leaf(*shape) for shape in shapes)))
        rest = torch.ones(rows * p, 6), torch.randn(6, 8), torch.ones(6)
        given.append((without_gradients, (torch.randn(rows * p, 8), *rest)))
        for kind in KINDS if p * rows == 4 else ("block",):
            x, weight, (scale_x, scale_w, *_) = scaled(
                ScaledCase(rows * p, 24, 260, p, kind, sums=True), rank
            )
            given.append((of_scales, (x, scale_x, weight, scale_w)))
    for kind in KINDS if p == 1 else ():
        case = scaled_experts(kind, 8)
        how: Any = {"rows": torch.arange(8), "activation": "silu", "offsets": OFFSETS}
        call = functools.partial(
            lambda x, a, w, b, **how: flux.grouped_gemm(x, w, scale_x=a, scale_w=b, **how), **how
        )
        given.append((call, (*case.x(0), *case.w1(0))))
    if p == 2:
        given.append((flux.moe.MoEMLP(8, 16, 4, dtype=F32), (leaf(6, 8), IDS, torch.rand(6, 2))))
    by_torch = functools.cache(functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    for function, tensors in given:
        found = []
        for each in (function, by_torch(function)):
            copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
            results = tree_leaves(each(*copies))
            if results[0].requires_grad:
                sum(result.sin().sum() for result in results).backward()  # type: ignore[union-attr]
            found.append([*(result.detach().float() for result in results), *(copy.grad for copy in copies)])
        torch.testing.assert_close(*found)


def meta(rank: int, p: int) -> None:
    x, w, b = (torch.empty(shape, device="meta") for shape in ((2 * p, 3, 8), (6, 8), (6,)))
    (first, second), everybody = flux.ag_gemm(x, [w, w[:1]], return_gathered=True)
    found = [flux.gemm_rs(x, w), first, second, everybody, flux.all_gather(x[0, 0]), flux.gemm_ar(x, w)]
    found += [*flux.gemm_ar(x, w, norm_weight=b), flux.all_reduce(x), *flux.all_reduce(x, norm_weight=w[0])]
    found += [flux.reduce_scatter(x), flux.gemm(x, w)]
    m = 2 * p
    shapes = [(2, 3, 6), (m * p, 3, 6), (m * p, 3, 1), (m * p, 3, 8), (8 * p,), *[(m, 3, 6)] * 3]
    assert [tuple(t.shape) for t in found] == [*shapes, *[(m, 3, 8)] * 3, (2, 3, 8), (m, 3, 6)]
    # Of what has several results, also strides and types.
    x = torch.randn(6, 260)
    facts = [
        [(t.shape, t.dtype, t.stride()) for quant in QUANTS for t in flux.quantize(x.to(where), quant)]
        for where in ("cpu", "meta")
    ]
    assert facts[0] == facts[1]


test_operators = scenario_test([1, 2], checked, compiled, meta, timeout_s=300)
