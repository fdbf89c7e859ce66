"""Gradients of the operators between CPU processes: exact ones on marked integers, directional derivatives in
float64, what travels in a backward pass, torch.compile. One set of processes per world size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Calls, integers, scenario_test
from torch.distributed.tensor import DTensor

import flux
from flux.calls import front
from flux.layers import ParallelMLP
from flux.ops.gemm_rs_with_gather import gemm_rs_with_gather
from flux.testing import AgGemmCase, GemmRsCase, spawn

WORLD_SIZES = [1, 2, 3]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ROWS, N, K = 130, 72, 40  # of one rank


def leaf(x: torch.Tensor | None) -> Any:
    return None if x is None else x.clone().requires_grad_()


def exact(grad: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Sum of products of integers: exact in float64, rounded once."""
    a, b = rows
    return (a.double().t() @ b.double()).to(grad.dtype)


def compare(**pairs: tuple[torch.Tensor | None, torch.Tensor]) -> str:
    wrong = [
        name
        for name, (got, expected) in pairs.items()
        if got is None or got.dtype != expected.dtype or not torch.equal(got, expected)
    ]
    return f"wrong: {wrong}" if wrong else ""


def gemm_rs_exact(rank: int, p: int) -> str:
    """The gradient of x is an AllGather+GEMM whose every element carries the mark of its source."""
    told = []
    for number, dtype in enumerate(DTYPES):
        for transpose_weight in (False, True):
            case = AgGemmCase(ROWS * p, K, N, p, dtype, not transpose_weight, seed=number)
            grad, weight, _ = case.inputs(rank)
            x, weight = leaf(integers(rank, ROWS * p, K, dtype=dtype)), leaf(weight)
            bias = leaf(integers(7, N, dtype=dtype))
            flux.gemm_rs(x, weight, bias, transpose_weight=transpose_weight).backward(grad)
            of_weight = exact(grad, case.gathered(), x.detach())
            ones = torch.ones(ROWS, 1, dtype=dtype)
            told.append(
                compare(
                    x=(x.grad, case.expected(rank)),
                    weight=(weight.grad, of_weight.t() if transpose_weight else of_weight),
                    bias=(bias.grad, exact(grad, ones, grad)[0]),
                )
            )
    return "; ".join(t for t in told if t)


def ag_gemm_exact(rank: int, p: int) -> str:
    """The gradient of x is a GEMM+ReduceScatter to which every rank's contribution is odd."""
    told = []
    for number, dtype in enumerate(DTYPES):
        for transpose_weight, widths, keep in ((False, [N], False), (True, [N // 2, 8, N], True)):
            case = GemmRsCase(ROWS * p, K, sum(widths), p, dtype, not transpose_weight, seed=number)
            grad, weight, _ = case.inputs(rank)
            grads = grad.split(widths, 1)
            weights = [leaf(w) for w in weight.split(widths, 1 if transpose_weight else 0)]
            xs = [integers(r, ROWS, K, dtype=dtype) for r in range(p)]
            x = leaf(xs[rank])
            biases = [None if i == 1 else leaf(integers(i, w, dtype=dtype)) for i, w in enumerate(widths)]
            results = flux.ag_gemm(
                x, weights, biases, transpose_weight=transpose_weight, return_gathered=keep
            )
            torch.autograd.backward(list(results[0] if keep else results), list(grads))
            told.append(compare(x=(x.grad, case.expected(rank))))
            for w, b, g in zip(weights, biases, grads, strict=True):
                of_weight = exact(g, g, torch.cat(xs))
                told.append(compare(weight=(w.grad, of_weight.t() if transpose_weight else of_weight)))
                if b is not None:
                    ones = torch.ones(ROWS * p, 1, dtype=dtype)
                    told.append(compare(bias=(b.grad, exact(g, ones, g)[0])))
    return "; ".join(t for t in told if t)


def gathers_exact(rank: int, p: int) -> str:
    """all_gather, and ag_gemm whose gathered x is used as well: gradients come back from every rank."""
    told = []
    for dtype in DTYPES:
        grads = [integers(50 + r, ROWS * p, K, dtype=dtype) + 100 * (r + 1) for r in range(p)]
        own = torch.stack([g.double() for g in grads]).sum(0)[rank * ROWS : (rank + 1) * ROWS]
        x = leaf(integers(rank, ROWS, K, dtype=dtype))
        flux.all_gather(x).backward(grads[rank])
        scale = integers(9, ROWS, K, dtype=dtype)
        parts = leaf(integers(rank, ROWS * p, K, dtype=dtype))
        flux.reduce_scatter(parts).backward(scale + rank)
        # Each rank's rows reach the sums through the rank that owns them.
        told.append(compare(scattered=(parts.grad, torch.cat([scale + owner for owner in range(p)]))))
        if dtype in (torch.float32, torch.float64):
            told.append(compare(all_gather=(x.grad, own.to(dtype))))
        else:  # summed in fp32, rounded once
            told.append(compare(all_gather_rounded=(x.grad, own.float().to(dtype))))
        if dtype == torch.float32:
            weight = integers(3, N, K, dtype=dtype)
            again = leaf(x.detach())
            product, gathered = flux.ag_gemm(again, weight, return_gathered=True)
            product.backward(torch.ones_like(product), retain_graph=True)
            of_product = again.grad.clone()
            gathered.backward(grads[rank])
            told.append(compare(both=(again.grad, of_product + own.to(dtype))))
    return "; ".join(t for t in told if t)


def directional(rank: int, p: int) -> str:
    """float64: the sum of all ranks' losses along random directions of all ranks' inputs."""
    g = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def chain(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        gate, up, bias, down, square = tensors
        (a, b), rows = flux.ag_gemm(x, [gate, up], [bias, None], return_gathered=True)
        hidden = torch.sin(a) * b
        y = flux.gemm_rs(hidden.view(p, -1, hidden.shape[-1]), down, transpose_weight=True)
        z = flux.gemm(flux.all_gather(y.flatten(0, -2)), square)
        u, both = gemm_rs_with_gather(hidden, down, y, transpose_weight=True)
        return (z * z).sum() + rows.cos().sum() + u.cos().sum() + both.sin().sum()

    tensors = [random(6, 5), random(4, 5), random(4, 5), random(4), random(4, 5), random(5, 5)]
    steps = [random(*t.shape) for t in tensors]
    leaves = [leaf(t) for t in tensors]
    chain(*leaves).backward()
    slope = sum((t.grad * step).sum() for t, step in zip(leaves, steps, strict=True))
    h = 1e-6
    ends = [chain(*(t + s * h * d for t, d in zip(tensors, steps, strict=True))) for s in (1, -1)]
    both = torch.stack([slope, (ends[0] - ends[1]) / (2 * h)])
    dist.all_reduce(both)
    # Central differences err by about h² relative, and by roundoff / h.
    return "" if abs(both[0] / both[1] - 1) < 1e-7 else f"slope {both[0]}, differences {both[1]}"


def called(backward: Callable[[], Any]) -> list[str]:
    with Calls() as calls:
        backward()
    return calls.names


def what_travels(rank: int, p: int) -> str:
    x, wide = torch.randn(4 * p, 8), torch.randn(4, 8)
    weight = torch.randn(6, 8)
    expected = [
        (flux.gemm_rs, x, True, True, {}, ["ag_gemm"]),
        (flux.gemm_rs, x, True, False, {}, ["ag_gemm"]),
        (flux.gemm_rs, x, False, True, {}, ["all_gather"]),
        (flux.ag_gemm, wide, True, True, {}, ["gemm_rs_with_gather"]),
        (flux.ag_gemm, wide, True, False, {}, ["gemm_rs"]),
        (flux.ag_gemm, wide, False, True, {}, ["all_gather"]),
        (flux.ag_gemm, wide, True, True, {"return_gathered": True}, ["gemm_rs"]),
        (flux.ag_gemm, wide, False, True, {"return_gathered": True}, []),
    ]
    told = []
    for op, rows, of_x, of_weight, options, names in expected:
        a, b = rows.clone().requires_grad_(of_x), weight.clone().requires_grad_(of_weight)
        result = op(a, b, **options)
        result = result[0] if options else result
        found = called(lambda result=result: result.sum().backward())
        if found != names or (a.grad is not None) != of_x or (b.grad is not None) != of_weight:
            told.append(f"{op.__name__} {of_x} {of_weight} {options}: {found}")
    return "; ".join(told)


def memory(rank: int, p: int) -> str:
    """Operands are kept only for gradients that are wanted, and a gathered x only if it was asked for."""
    x, weight = torch.randn(4 * p, 8), torch.randn(6, 8)

    def kept(op: Any, of_x: bool, of_weight: bool, **options: Any) -> list[tuple[int, ...]]:
        shapes = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            op(x.clone().requires_grad_(of_x), weight.clone().requires_grad_(of_weight), **options)
        return shapes

    for op in (flux.gemm, flux.gemm_rs, flux.ag_gemm):
        assert kept(op, True, True) == [(4 * p, 8), (6, 8)]
        assert kept(op, False, True) == [(4 * p, 8)]
        assert kept(op, True, False) == [(6, 8)]
    with torch.no_grad():  # otherwise refused: test_bad_calls.py
        assert not flux.gemm(leaf(x), weight, out=torch.empty(4 * p, 6)).requires_grad
    assert kept(flux.ag_gemm, False, True, return_gathered=True) == [(4 * p * p, 8)]
    return ""


SCENARIOS = (
    *(gemm_rs_exact, ag_gemm_exact, gathers_exact, directional),
    *(what_travels, memory),
)
test_gradients = scenario_test(WORLD_SIZES, *SCENARIOS, timeout_s=300)


def second_derivatives(rank: int, world_size: int) -> None:
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (2, 3), (2,))]
    for op in (flux.gemm, flux.gemm_rs, flux.ag_gemm):
        torch.autograd.gradcheck(op, tensors)
        torch.autograd.gradgradcheck(op, tensors)
    torch.autograd.gradgradcheck(flux.all_gather, tensors[:1])
    torch.autograd.gradgradcheck(lambda x, w: gemm_rs_with_gather(x, w, x), tensors[:2])
    for activation in ("swiglu", "gelu"):
        mlp = ParallelMLP(3, 2, activation=activation, dtype=torch.float64)
        held: dict[str, Any] = dict(mlp.named_parameters())

        def call(x: torch.Tensor, *parts: torch.Tensor, mlp: Any = mlp, held: Any = held) -> Any:
            like = zip(held.items(), parts, strict=True)
            placed = {n: DTensor.from_local(part, q.device_mesh, q.placements) for (n, q), part in like}
            return torch.func.functional_call(mlp, placed, x)

        parts = [leaf(parameter.to_local().detach()) for parameter in held.values()]
        torch.autograd.gradgradcheck(call, (tensors[0], *parts))


def test_gradcheck_of_one_rank() -> None:
    spawn(second_derivatives, 1, backend="gloo")


def test_only_calls_without_gradient_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = []
    run = front.run
    monkeypatch.setattr(front, "may_skip_dispatch", lambda *_: True)

    def seen(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "enter":  # and not what the dispatcher has called
            skipped.append(args)
        return run(*args)

    monkeypatch.setattr(front, "run", seen)
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    assert flux.gemm(x, weight).requires_grad and not skipped
    with torch.no_grad():
        assert not flux.gemm(x, weight).requires_grad and len(skipped) == 1
    flux.gemm(x, weight.detach())
    assert len(skipped) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_wgrad_accum_is_exact(dtype: torch.dtype, wide: bool) -> None:
    main_dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    main_grad = integers(0, N, K, dtype=main_dtype)
    expected = main_grad.double()
    for seed in (1, 2):
        grad, x = integers(seed, 5, 6, N, dtype=dtype), integers(seed + 9, 5, 6, K, dtype=dtype)
        flux.wgrad_accum(grad, x, main_grad)
        expected += grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        expected = expected.to(main_dtype).double()  # rounded once a call
    assert torch.equal(main_grad.double(), expected)
    transposed = torch.zeros(K, N, dtype=main_dtype)
    flux.wgrad_accum(x, grad, transposed)
    assert torch.equal(transposed.double(), (x.flatten(0, 1).double().t() @ grad.flatten(0, 1).double()))
