"""Nothing to compute: rows, columns or inner dimensions of 0, through everything, forward and backward. As
torch: empty results, sums of nothing are zero, and gradients have the shapes of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import references
import torch
import torch.distributed as dist
from bad_calls import Good, good, good_dense, integers, scaled_arguments
from dense_calls import is_exact
from test_bad_calls import same, tensors_of
from test_modes import FeedForward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_map_only

import flux
from flux.integrations import async_tp
from flux.integrations.dtensor import FluxColwiseParallel, FluxRowwiseParallel, FluxSharedColwiseParallel
from flux.layers import ParallelMLP, RMSNorm
from flux.testing import spawn

E = 4
# x of each rank besides its columns (dimension 0 is gathered or scattered), and N and K: one of them is 0.
LEADING = [(0,), (4, 0), (0, 3), (4, 3), (4,)]
SIZES = [(leading, n, k) for leading, n, k in product(LEADING, (0, 6), (0, 8)) if 0 in (*leading, n, k)]
Call = Callable[[Tensor], Any]


def operators(p: int, *leading: int, n: int, k: int) -> Iterator[str]:
    """Results are torch's, and gradients as they must be."""
    for each in (*good_dense(p, *leading, n=n, k=k), *others(p, *leading, n=n, k=k)):
        given = {name: value for name, value in each.arguments.items() if name != "out"}
        expected = each.reference(**each.arguments)
        for arguments in (each.arguments, given):
            if not same(got := each.call(**arguments), expected):
                yield f"{each.op}: {got}, expected {expected}"
        if each.op in ("gemm_ar", "all_reduce") or "scale_x" in given:
            continue  # have no gradients
        given = tree_map_only(Tensor, lambda tensor: tensor.clone().requires_grad_(), given)
        sum(result.sum() for result in tensors_of(each.call(**given))).backward()  # type: ignore[union-attr]
        for tensor in tensors_of(list(given.values())):
            # Biases have gradients where there are rows, and rows that are only moved.
            zero = tensor is not given["x"] if each.op in MOVES else tensor.dim() > 1 or 0 in leading
            if tensor.grad is None or tensor.grad.shape != tensor.shape or zero and tensor.grad.any():
                yield f"{each.op}: gradient of {list(tensor.shape)}: {tensor.grad}"


MOVES = ("all_gather", "reduce_scatter", "gathered")


def others(p: int, *leading: int, n: int, k: int) -> Iterator[Good]:
    x, weight, bias = integers(*leading, k), integers(n, k), integers(n)
    yield good("ag_gemm", x=x, weight=weight.t(), bias=bias, transpose_weight=True)
    gathers: Any = lambda **given: (references.ag_gemm(**given), references.all_gather(given["x"]))  # noqa: E731
    yield Good("gathered", partial(flux.ag_gemm, return_gathered=True), gathers, {"x": x, "weight": weight})
    if 0 in (*leading, k):
        yield good("reduce_scatter", partial(flux.reduce_scatter, wire="int8"), x=x)
    residual, like_x = integers(*leading, n), integers(*leading, k)
    for op, sizes, added in (("gemm_ar", {"weight": weight}, residual), ("all_reduce", {}, like_x)):
        how = {"norm_weight": torch.ones(added.shape[-1]), "quant": "row"}
        total: Any = lambda op=op, how=how, **given: getattr(flux, op)(**given, **how)[2]  # noqa: E731
        yield good(op, total, x=x, **sizes, residual=added)
    for kind in ("tensor", "row", "block"):
        given = scaled_arguments(kind, torch.float32, *leading, n=n, k=k)
        for op in ("gemm", "gemm_rs", "ag_gemm", "gemm_ar"):
            yield good(op, **given)
        product, gathered, scales = flux.ag_gemm(**given, return_gathered=True)
        rows = (leading[0] * p, *leading[1:])
        of_rows = given["scale_x"].shape[-1] if kind == "block" else 1
        shapes = [(*rows, n), (*rows, given["x"].shape[-1]), (*rows, of_rows)]
        assert [tuple(each.shape) for each in (product, gathered, scales)] == shapes, kind


def check(run: Call, x: Tensor, leaves: list[Tensor], shape: tuple[int, ...]) -> str:
    """What is wrong with a result and its gradients, which are all zero or empty; but of biases."""
    leaf = x.clone().requires_grad_()
    for each in leaves:
        each.grad = None
    result = run(leaf)
    if result.shape != shape or result.any():
        return f"{result}, expected zeros {shape}"
    result.sum().backward()
    for each in (leaf, *leaves):
        if each.grad is None or each.grad.shape != each.shape:
            return f"gradient of {list(each.shape)}: {each.grad}"
        if (each.dim() > 1 or not result.numel()) and getattr(each.grad, "_local_tensor", each.grad).any():
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
        if found := check(run, x, parameters, shape):
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
        yield from (f"{each}, {leading} {n} {k}" for each in operators(p, *leading, n=n, k=k))
        if len(leading) == 1:
            offsets, weight = torch.tensor([0, 0, 0, 0, *leading], dtype=torch.int32), torch.ones(E, n, k)
            run = partial(flux.grouped_gemm, weight=weight.requires_grad_(), offsets=offsets)
            if found := check(run, torch.ones(*leading, k), [weight], (*leading, n)):
                yield f"grouped_gemm, {leading} {n} {k}: {found}"


def work(rank: int, p: int, wrongs: Callable[[int, int], Iterator[str]]) -> list[str]:
    """What is wrong, and whether a call that is not empty is exact afterwards."""
    wrong = list(wrongs(rank, p))
    return wrong if is_exact("gemm_rs", 0) else [*wrong, "not exact"]


@pytest.mark.parametrize("wrongs", [dense, layers])
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, None), (4, 2), (1, None)])
def test_empty(wrongs: Any, ranks: int, ranks_per_node: int | None) -> None:
    how: Any = {"ranks_per_node": ranks_per_node, "backend": "gloo", "timeout_s": 100}
    assert spawn(work, ranks, wrongs, **how) == [[]] * ranks
