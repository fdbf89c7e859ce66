"""Nothing to compute: rows, columns or inner dimensions of 0, through everything, forward and backward. As
torch: empty results, sums of nothing are zero, and gradients have the shapes of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_calls import is_exact
from test_modes import FeedForward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import flux
from flux.integrations import async_tp
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import ParallelMLP, RMSNorm, column_linear, row_linear
from flux.testing import spawn

E = 4
# x of each rank besides its columns (dimension 0 is gathered or scattered), and N and K: one of them is 0.
LEADING = [(0,), (4, 0), (0, 3), (4, 3), (4,)]
SIZES = [(leading, n, k) for leading, n, k in product(LEADING, (0, 6), (0, 8)) if 0 in (*leading, n, k)]
Call = Callable[[Tensor], Any]


def rank_ones(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, rank + 1.0)


def operators(
    rank: int, p: int, leading: tuple[int, ...], n: int, k: int
) -> Iterator[tuple[str, Call, list[Tensor], list[tuple[int, ...]], float]]:
    """Name, call of x, tensors besides x that need gradients, shapes of results, and their value."""
    w, b, up = (rank_ones(rank, *shape).requires_grad_() for shape in ((n, k), (n,), (n, k)))
    more, less = (leading[0] * p, *leading[1:]), (leading[0] // p, *leading[1:])
    own, gathered, scattered = (*leading, n), (*more, n), (*less, n)
    # With K = 0, what is added remains; with N = 0 or no rows there is no element that has a value.
    bias = rank + 1.0
    yield "gemm", lambda x: flux.gemm(x, w, b), [w, b], [own], bias
    yield "gemm_rs", lambda x: flux.gemm_rs(x, w, b), [w, b], [scattered], bias
    yield "gemm_rs, no bias", lambda x: flux.gemm_rs(x, w), [w], [scattered], 0
    yield "ag_gemm", lambda x: flux.ag_gemm(x, w, b), [w, b], [gathered], bias
    yield (
        "ag_gemm [K, N]",
        lambda x: flux.ag_gemm(x, w.t(), b, transpose_weight=True),
        [w, b],
        [gathered],
        bias,
    )
    both = [gathered, gathered]
    yield "ag_gemm of two", lambda x: flux.ag_gemm(x, [w, up], [b, None]), [w, up, b], both, -1
    both = [gathered, (*more, k)]
    yield "gathered", lambda x: flux.ag_gemm(x, w, return_gathered=True), [w], both, -1
    yield "all_gather", flux.all_gather, [], [(*more, k)], -1
    yield "reduce_scatter", flux.reduce_scatter, [], [(*less, k)], -1
    yield "column", lambda x: column_linear(x, [w, up], [b, None]), [w, up, b], [gathered] * 2, -1
    keep: Any = {"save_gathered": True}
    yield "column saved", lambda x: column_linear(x, [w], **keep), [w], [gathered], 0
    plain: Any = {"sequence_parallel": False}
    yield "column plain", lambda x: column_linear(x, [w], [b], **plain), [w, b], [own], bias
    yield "row", lambda x: row_linear(x, w, b), [w, b], [scattered], bias
    yield "row plain", lambda x: row_linear(x, w, b, **plain), [w, b], [own], bias
    if len(leading) == 1:
        offsets, experts = torch.tensor([0, 0, 0, 0, *leading], dtype=torch.int32), rank_ones(rank, E, n, k)
        experts.requires_grad_()
        yield "grouped_gemm", lambda x: flux.grouped_gemm(x, experts, offsets), [experts], [own], 0


def without_gradients(rank: int, p: int, leading: tuple[int, ...], n: int, k: int) -> Iterator[str]:
    x, w, b = rank_ones(rank, *leading, k), rank_ones(rank, n, k), torch.ones(n)
    residual, norm = torch.full((*leading, n), 2.0), torch.ones(n)
    total = torch.full((*leading, n), 3.0)
    like_x = torch.full((*leading, k), 2.0)
    summed = torch.full((*leading, k), p * (p + 1) / 2)
    how: Any = {"residual": residual, "norm_weight": norm}
    of_x: Any = {"residual": like_x, "norm_weight": torch.ones(k)}
    normed = torch.nn.functional.rms_norm(total, [n], norm) if n else total
    of_sum = torch.nn.functional.rms_norm(summed + 2, [k], torch.ones(k)) if k else summed
    rows = x.new_empty(leading[0] * p, *leading[1:], k)
    calls: dict[str, tuple[Any, list[Tensor | None]]] = {
        "gemm_ar": (lambda: flux.gemm_ar(x, w, b, residual=residual), [total]),
        "gemm_ar, norm": (lambda: flux.gemm_ar(x, w, b, **how), [normed, total]),
        "gemm_ar, out": (lambda: flux.gemm_ar(x, w, b, residual=residual, out=residual.clone()), [total]),
        "all_reduce": (lambda: flux.all_reduce(x), [summed]),
        "all_reduce, norm": (lambda: flux.all_reduce(x, **of_x), [of_sum, summed + 2]),
        "all_gather, out": (lambda: flux.all_gather(x, out=rows), [None]),
        "ag_gemm, out": (lambda: flux.ag_gemm(x, w, out=x.new_empty(*rows.shape[:-1], n)), [None]),
        "gemm_rs, out": (
            lambda: flux.gemm_rs(x, w, out=x.new_empty(leading[0] // p, *leading[1:], n)),
            [None],
        ),
        "int8": (lambda: flux.reduce_scatter(x, wire="int8"), [None]),
        "quant": (lambda: flux.gemm_ar(x, w, b, **how, quant="row"), [None, None, total]),
        "quant of sum": (lambda: flux.all_reduce(x, **of_x, quant="row"), [None, None, summed + 2]),
    }
    for name, (call, expected) in calls.items():
        results = call()
        results = [results] if isinstance(results, Tensor) else results
        for got, wanted in zip(results, expected, strict=True):
            if wanted is not None and not torch.allclose(got, wanted, rtol=1e-6):
                yield f"{name}: {got}, expected {wanted}"


def scaled(p: int, leading: tuple[int, ...], n: int, k: int) -> Iterator[str]:
    """With fp8 operands."""
    for quant, of_weight in (("tensor", "tensor"), ("row", "row"), ("group128", "block128")):
        (x, scale_x), (w, scale_w) = (
            flux.quantize(torch.ones(shape), kind)
            for shape, kind in (((*leading, k), quant), ((n, k), of_weight))
        )
        scale_w = scale_w.view(-1) if quant == "row" else scale_w
        how: Any = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": torch.float32}
        product, gathered, scales = flux.ag_gemm(x, w, return_gathered=True, **how)
        rows = (leading[0] * p, *leading[1:])
        shapes = [(*rows, n), (*rows, k), (*rows, scale_x.shape[-1] if quant == "group128" else 1)]
        found = [product, flux.gemm_ar(x, w, **how), flux.gemm(x, w, **how), flux.gemm_rs(x, w, **how)]
        wanted = [(*rows, n), (*leading, n), (*leading, n), (leading[0] // p, *leading[1:], n)]
        told = [tuple(each.shape) for each in (product, gathered, scales, *found)]
        if told != [*shapes, *wanted] or any(each.any() for each in found):
            yield f"fp8 with scales of a {quant}: {told}, or not zero"


def check(run: Call, x: Tensor, leaves: list[Tensor], shapes: list[Any], value: float) -> str:
    """What is wrong with results and gradients. value: of results; below 0: not looked at."""
    leaf = x.clone().requires_grad_()
    for each in leaves:
        each.grad = None
    results = run(leaf)
    results = [results] if isinstance(results, Tensor) else list(results)
    if [tuple(each.shape) for each in results] != shapes:
        return f"shapes {[tuple(each.shape) for each in results]}, expected {shapes}"
    if value >= 0 and any((each != value).any() for each in results):
        return f"{results}, expected {value}"
    sum(each.sum() for each in results).backward()  # type: ignore[union-attr]
    for each in (leaf, *leaves):
        if each.grad is None or each.grad.shape != each.shape:
            return f"gradient of {list(each.shape)}: {each.grad}"
    products = [*leaves, leaf]
    if any(each.numel() for each in results):  # biases have gradients, and rows that are only moved
        products = [each for each in leaves if each.dim() > 1] + ([leaf] if value >= 0 else [])
    if any(getattr(each.grad, "_local_tensor", each.grad).any() for each in products):
        return "a gradient that is not zero"
    return ""


def modules(p: int) -> Iterator[tuple[str, Call, Tensor, list[Tensor], tuple[int, ...]]]:
    """Name, call of x, x, parameters, and the shape of the result."""
    mesh = init_device_mesh("cpu", (p,))
    for shape in ((0, 8), (0, 3, 8), (4, 0, 8)):
        x = torch.ones(shape)
        for sp in (True, False):
            mlp = nn.Sequential(RMSNorm(8, sequence_parallel=sp), ParallelMLP(8, 12, sequence_parallel=sp))
            yield f"MLP {sp}", mlp, x, list(mlp.parameters()), shape
        moe = flux.moe.MoEMLP(8, 12, E, dtype=torch.float32)
        scores = torch.ones(*shape[:-1], 2)

        def experts(x: Tensor, moe: Any = moe, scores: Tensor = scores) -> Tensor:
            return moe(x, scores.long(), scores)  # type: ignore[no-any-return]

        yield "MoEMLP", experts, x, list(moe.parameters()), shape
        for out in (Shard(0), Replicate()) if p > 1 else ():  # torch's of one rank refuse such a view
            for shared in (True, False):
                of: Any = {"input_layouts": Shard(0)}
                plan: Any = {name: FluxColwiseParallel(**of) for name in ("a", "b")}
                plan = {"": FluxSharedColwiseParallel("a", "b", **of)} if shared else plan
                plan |= {"c": FluxRowwiseParallel(output_layouts=out)}
                styled = parallelize_module(FeedForward(8, 4, torch.float32), mesh, plan)
                rows = shape[0] if out == Shard(0) else shape[0] * p
                yield f"styles {out} {shared}", styled, x, list(styled.parameters()), (rows, *shape[1:])


def experts(p: int, tokens: int, hidden: int, columns: int) -> str:
    """Both layers, for which this rank has that many tokens of at most 3."""
    ids, scores = torch.arange(2 * tokens).view(tokens, 2) % E, torch.ones(tokens, 2, requires_grad=True)
    x, w1, w2 = (
        torch.ones(shape, requires_grad=True)
        for shape in ((tokens, hidden), (E, columns, hidden), (E, hidden, columns))
    )
    routing = flux.moe.route(ids, scores, E, max_tokens=3 if p > 1 else None)
    made = flux.moe.ag_scatter_gemm(x, w1, routing)
    y = flux.moe.gemm_gather_rs(made, w2, routing)
    y.sum().backward()
    if y.shape != x.shape or any(each.grad is None for each in (x, w1, w2, scores)):
        return f"{tuple(y.shape)}, expected {tuple(x.shape)}, or no gradient"
    return "" if torch.equal(y, torch.full_like(y, 2.0 * p * hidden * columns)) else f"{y}"


def layers(rank: int, p: int) -> Iterator[str]:
    for name, run, x, parameters, shape in modules(p):
        if found := check(run, x, parameters, [shape], 0):
            yield f"{name}, {tuple(x.shape)}: {found}"
    for tokens, hidden, columns in ((0, 8, 6), (3 * (rank == 0), 8, 6), (3, 0, 6), (3, 8, 0), (0, 0, 0)):
        if found := experts(p, tokens, hidden, columns):
            yield f"experts, {tokens} {hidden} {columns}: {found}"
    group = dist.group.WORLD.group_name
    async_tp.install()
    for leading, n, k in SIZES:
        a, b = torch.ones(*leading, k), torch.ones(k, n)
        rows, dims = leading[0] * p, leading[1:]
        every, (product_,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group, return_A=True)
        shard = torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "avg", 0, group)
        shapes = [tuple(each.shape) for each in (every, product_, shard)]
        if shapes != [(rows, *dims, k), (rows, *dims, n), (leading[0] // p, *dims, n)]:
            yield f"async TP, {leading} {n} {k}: {shapes}"
        elif product_.any() or shard.any():
            yield f"async TP, {leading} {n} {k}: not zero"
    async_tp.uninstall()


def dense(rank: int, p: int) -> Iterator[str]:
    for leading, n, k in SIZES:
        for name, run, leaves, shapes, value in operators(rank, p, leading, n, k):
            if found := check(run, rank_ones(rank, *leading, k), leaves, shapes, value):
                yield f"{name}, {leading} {n} {k}: {found}"
        yield from (f"{each}, {leading} {n} {k}" for each in without_gradients(rank, p, leading, n, k))
        yield from (f"{each}, {leading} {n} {k}" for each in scaled(p, leading, 16 * n, 16 * k))


def work(rank: int, p: int, wrongs: Callable[[int, int], Iterator[str]]) -> list[str]:
    """What is wrong, and whether a call that is not empty is exact afterwards."""
    wrong = list(wrongs(rank, p))
    return wrong if is_exact("gemm_rs", 0) else [*wrong, "not exact"]


@pytest.mark.parametrize("wrongs", [dense, layers])
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, None), (4, 2), (1, None)])
def test_empty(wrongs: Any, ranks: int, ranks_per_node: int | None) -> None:
    how: Any = {"ranks_per_node": ranks_per_node, "backend": "gloo", "timeout_s": 100}
    assert spawn(work, ranks, wrongs, **how) == [[]] * ranks
