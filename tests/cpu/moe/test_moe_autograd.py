"""Gradients of mixtures of experts between CPU processes: exact ones on integers, whole layers in float64
against one rank that holds all experts, what travels, torch.compile. One set of processes per world size.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from cases import Calls, asked_at, scenario_test
from dense_calls import ACTIVATIONS, check_experts
from row_kernels import kernels_on_cpus

import flux
from flux.moe import autograd, reference
from flux.moe.rows import activate_rows, activation_grad
from flux.testing import spawn
from flux.testing.moe_data import MoeCase

Tensor = torch.Tensor
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Odd sizes: sums of an odd number of 1 and -1 are never zero, so that nothing left out goes unnoticed.
HIDDEN, COLUMNS = 9, 7
LAYOUTS = {
    1: [(1, (150,))],
    2: [(1, (140, 140)), (2, (140, 20)), (2, (0, 5))],
    4: [(1, (9, 9, 0, 140)), (2, (140, 20, 0, 135)), (4, (5, 6, 7, 8))],
}


def signs(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(2, shape, generator=g) - 1).to(dtype)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def cases(p: int) -> list[MoeCase]:
    """Every layout, and with one of them every type."""
    made = []
    for number, (ep_size, tokens) in enumerate(LAYOUTS[p]):
        for dtype in DTYPES if p == 2 and number == 1 else DTYPES[:1]:
            case = MoeCase(tokens, HIDDEN, COLUMNS, 8, 3, ep_size, dtype, dropped=0.2, seed=number)
            made.append(case)
    return made


def route(case: MoeCase, ids: Tensor, weights: Tensor) -> flux.moe.Routing:
    return flux.moe.route(ids, weights, case.num_experts, ep_size=case.ep_size, max_tokens=case.max_tokens)


def padded(rows: Tensor, routing: flux.moe.Routing) -> Tensor:
    """As many rows as a routing has, those after the last not numbers."""
    more = routing.rows.shape[0] - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, more), value=float("nan"))


def differ(got: Tensor | None, expected: Tensor) -> bool:
    return got is None or got.dtype != expected.dtype or not torch.equal(got, expected)


def marked(case: MoeCase, what: int, rank: int, *shape: int) -> Tensor:
    return signs(1000 * what + 10 * case.seed + rank, *shape, dtype=case.dtype)


def layer0_exact(rank: int, p: int) -> str:
    """The gradient of x sums products that are odd, of all ranks and experts that a token went to."""
    for case in cases(p):
        rows = [case.rows(r).tolist() for r in range(p)]
        xs = [marked(case, 1, r, case.tokens[r], HIDDEN) for r in range(p)]
        ws = [marked(case, 2, r, case.local_experts, COLUMNS, HIDDEN) for r in range(p)]
        grads = [marked(case, 3, r, len(rows[r]), COLUMNS) for r in range(p)]
        of_x = torch.zeros(case.tokens[rank], HIDDEN, dtype=torch.float64)
        of_w = torch.zeros(ws[rank].shape, dtype=torch.float64)
        for r in range(p):
            first = case.slice_of(r) * case.local_experts
            for (expert, source, token), g in zip(rows[r], grads[r].double(), strict=True):
                if source == rank:
                    of_x[token] += g @ ws[r][expert - first].double()
                if r == rank:
                    of_w[expert - first] += torch.outer(g, xs[source][token].double())
        x, w = leaf(xs[rank]), leaf(ws[rank])
        routing = route(case, *case.routing(rank))
        flux.moe.ag_scatter_gemm(x, w, routing).backward(padded(grads[rank], routing))
        for name, got, expected in (("x", x.grad, of_x), ("weight", w.grad, of_w)):
            if differ(got, expected.to(case.dtype)):
                return f"{case}: {name}"
    return ""


def layer1_exact(rank: int, p: int) -> str:
    for case in cases(p):
        rows = [case.rows(r).tolist() for r in range(p)]
        hs = [marked(case, 1, r, len(rows[r]), COLUMNS) for r in range(p)]
        ws = [marked(case, 2, r, case.local_experts, HIDDEN, COLUMNS) for r in range(p)]
        grads = [marked(case, 3, r, case.tokens[r], HIDDEN) for r in range(p)]
        chosen = [case.routing(r) for r in range(p)]
        of_h = torch.zeros(hs[rank].shape, dtype=torch.float64)
        of_w = torch.zeros(ws[rank].shape, dtype=torch.float64)
        of_scores = torch.zeros(chosen[rank][1].shape, dtype=torch.float64)
        for r in range(p):
            first = case.slice_of(r) * case.local_experts
            for i, (expert, source, token) in enumerate(rows[r]):
                ids, weights = (t[token] for t in chosen[source])
                g, h = grads[source][token].double(), hs[r][i].double()
                back = g @ ws[r][expert - first].double()
                score = weights[ids == expert].sum()
                if source == rank:
                    of_scores[token, ids == expert] += back @ h
                if r == rank:
                    of_h[i] = score * back
                    of_w[expert - first] += score * torch.outer(g, h)
        weights = leaf(chosen[rank][1])
        routing = route(case, chosen[rank][0], weights)
        h, w = leaf(padded(hs[rank], routing)), leaf(ws[rank])
        flux.moe.gemm_gather_rs(h, w, routing).backward(grads[rank])
        assert h.grad is not None
        if h.grad[len(of_h) :].any():
            return f"{case}: rows after the last have a gradient"
        found = (
            ("x", h.grad[: len(of_h)], of_h.to(case.dtype)),
            ("weight", w.grad, of_w.to(case.dtype)),
            ("topk_weights", weights.grad, of_scores.float()),
        )
        for name, got, expected in found:
            if differ(got, expected):
                return f"{case}: {name}"
    return ""


def whole_layer(rank: int, p: int) -> str:
    """Every activation and layout."""
    for ep_size, activation in product((d for d in (1, 2, 4) if p % d == 0), ACTIVATIONS):
        check_experts(rank, p, ep_size, [0 if p > 1 else 6, *range(7, 5 + 2 * p, 2)], activation)
    return ""


def what_travels(rank: int, p: int) -> str:
    """Each gradient alone: nothing is communicated or computed that it does not need."""
    ids, scores = torch.arange(2 * p * 4).view(-1, 2) % 4, torch.ones(4 * p, 2)
    told = []
    by_layer = {
        "layer 0": {
            (True, False, False): ["gemm_gather_rs"],
            (False, True, False): ["all_gather", "gather_rows", "grouped_wgrad"],
            (True, True, False): ["all_gather", "gather_rows", "grouped_wgrad", "gemm_gather_rs"],
        },
        "layer 1": {
            (True, False, False): ["ag_scatter_gemm", "finish_rows"],
            (False, True, False): ["all_gather", "gather_rows", "grouped_wgrad"],
            (False, False, True): ["ag_scatter_gemm", "finish_rows", "reduce_scatter"],
            (True, True, True): [
                *("all_gather", "gather_rows", "grouped_wgrad"),
                *("grouped_gemm", "finish_rows", "reduce_scatter"),
            ],
        },
    }
    for layer, cases_of in by_layer.items():
        for needs, names in cases_of.items():
            s = scores.clone().requires_grad_(needs[2])
            routing = flux.moe.route(ids, s, 4)
            w = torch.randn(4, 8, 8).requires_grad_(needs[1])
            if layer == "layer 0":
                x = torch.randn(4 * p, 8).requires_grad_(needs[0])
                result = flux.moe.ag_scatter_gemm(x, w, routing)
            else:
                x = torch.randn(routing.rows.shape[0], 8).requires_grad_(needs[0])
                result = flux.moe.gemm_gather_rs(x, w, routing)
            with Calls() as calls:
                result.sum().backward()
            has = tuple(t.grad is not None for t in (x, w, s))
            called = [name.removeprefix("moe_") for name in calls.names if name != "moe_tokens_of_rows"]
            if called != names or has != needs:
                told.append(f"{layer} {needs}: {called} {has}")
    return "; ".join(told)


@asked_at(2)
def activation_in_layer1(rank: int, p: int) -> str:
    """The activation's gradient as part of layer 1's is that of both, one after the other."""
    case = MoeCase((140, 20, 33, 7)[:p], HIDDEN, COLUMNS, 8, 3, 2, torch.float64, dropped=0.2)
    routing = route(case, *case.routing(rank))
    end, offsets = int(routing.offsets[-1]), routing.offsets
    product = padded(torch.randn(end, 2 * COLUMNS, dtype=case.dtype), routing)
    weight = torch.randn(case.local_experts, HIDDEN, COLUMNS, dtype=case.dtype)
    grad = torch.randn(case.tokens[rank], HIDDEN, dtype=case.dtype)
    given = (weight, routing, autograd.Wanted(True, True, autograd.expert_grads))
    rows = activate_rows(product, offsets, "swiglu")
    of_rows, *others = autograd.layer1_grads(grad, rows, *given)
    assert of_rows is not None
    expected = [activation_grad(of_rows, product, offsets, "swiglu")[:end], *others]
    told = []
    for graph, manager in ((True, nullcontext), (False, nullcontext), (False, kernels_on_cpus)):
        with torch.set_grad_enabled(graph), manager():
            of_product, *found = autograd.layer1_grads(grad, product, *given, activation="swiglu")
        assert of_product is not None
        for got, want in zip((of_product[:end], *found), expected, strict=True):
            if not torch.allclose(got, want, rtol=1e-6):
                told.append(f"{manager.__name__} {graph}: {(got - want).abs().max()}")
    return "; ".join(told)


@asked_at(2)
def steps_of_kernels(rank: int, p: int) -> str:
    """Nothing depends on rows that the kernels of flux.moe.rows do not write."""
    with kernels_on_cpus() as ran:
        told = layer0_exact(rank, p) + layer1_exact(rank, p) + whole_layer(rank, p)
    return told or ("" if min(ran[name] for name in ("gather", "finish", "activation_grad")) else f"{ran}")


SCENARIOS = (
    *(layer0_exact, layer1_exact, whole_layer, what_travels),
    *(activation_in_layer1, steps_of_kernels),
)
test_gradients = scenario_test(list(LAYOUTS), *SCENARIOS, timeout_s=300)


OFFSETS = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32)


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 4, 0, 6, 4, -1, -1], dtype=torch.int32)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_gemm(rows: Tensor | None, activation: str | None) -> None:
    """Gradients, and gradients of gradients; what rows after the last hold is read nowhere."""
    g = torch.Generator().manual_seed(3)
    x = leaf(torch.randn(7, 4, generator=g, dtype=torch.float64))
    w = leaf(torch.randn(4, 6, 4, generator=g, dtype=torch.float64))

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        return flux.grouped_gemm(x, w, OFFSETS, rows=rows, activation=activation)[:5]

    assert torch.autograd.gradcheck(grouped, (x, w))
    assert torch.autograd.gradgradcheck(grouped, (x, w))
    result = flux.grouped_gemm(x, w, OFFSETS, rows=rows, activation=activation)
    seed = torch.ones_like(result)
    expected = torch.autograd.grad(result, (x, w), seed, retain_graph=True)
    seed[5:] = float("nan")
    torch.testing.assert_close(torch.autograd.grad(result, (x, w), seed), expected)


def one_rank(rank: int, world_size: int) -> None:
    ids = torch.tensor([[0, 2], [2, 2], [-1, 1]])
    x, scores = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2)
    w1, w2 = torch.randn(3, 6, 4, dtype=torch.float64), torch.randn(3, 4, 3, dtype=torch.float64)
    routing = flux.moe.route(ids, scores, 3)

    def layer(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = flux.moe.ag_scatter_gemm(x, w1, routing, activation="swiglu")
        return flux.moe.gemm_gather_rs(rows, w2, routing)

    leaves = [leaf(t) for t in (x, w1, w2)]
    torch.testing.assert_close(layer(*leaves), reference.moe_mlp(x, ids, scores, w1, w2))
    torch.autograd.gradcheck(layer, leaves)
    torch.autograd.gradgradcheck(layer, leaves)


def test_gradcheck_of_one_rank() -> None:
    spawn(one_rank, 1, backend="gloo")
