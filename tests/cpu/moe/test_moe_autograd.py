"""Gradients of mixtures of experts between CPU processes: exact ones on integers, whole layers in float64
against one rank that holds all experts, what travels, torch.compile. One set of processes per world size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from cases import Calls, asked_at, scenario_test
from row_kernels import kernels_on_cpus

import flux
from flux._sharded import local
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


def dense(
    x: Tensor, ids: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """All experts for every token [T, H], most of them times zero; w1 [E, N, H], w2 [E, H, I]."""
    experts = len(w1)
    gates = x.new_zeros(len(x), experts + 1)
    gates = gates.scatter_add(1, torch.where(ids < 0, experts, ids), scores.to(x.dtype))
    out = torch.zeros_like(x)
    for e in range(experts):
        out = out + gates[:, e, None] * (act(x @ w1[e].t()) @ w2[e].t())
    return out


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    None: lambda z: z,
}


def whole_layer(rank: int, p: int) -> str:
    """float64, every activation and layout; a token may name an expert twice, or none."""
    hidden, intermediate, experts, k = 8, 8, 4, 3
    sizes = [5 + 2 * r for r in range(p)]
    sizes[0] = 0 if p > 1 else 6
    for ep_size in (d for d in (1, 2, 4) if p % d == 0):
        for number, (activation, act) in enumerate(ACTIVATIONS.items()):
            tp, gates = p // ep_size, 2 if activation == "swiglu" else 1
            g = torch.Generator().manual_seed(number)

            def normal(*shape: int, g: torch.Generator = g) -> Tensor:
                return torch.randn(shape, generator=g, dtype=torch.float64)

            w1 = leaf(normal(experts, gates, intermediate, hidden))
            w2 = leaf(normal(experts, hidden, intermediate))
            xs = [leaf(normal(n, hidden)) for n in sizes]
            ids = [torch.randint(-1, experts, (n, k), generator=g) for n in sizes]
            scores = [leaf(torch.rand(n, k, generator=g)) for n in sizes]
            for x, i, s in zip(xs, ids, scores, strict=True):
                dense(x, i, s, w1.flatten(1, 2), w2, act).sin().sum().backward()
            mine = slice(rank // tp * (experts // ep_size), (rank // tp + 1) * (experts // ep_size))
            columns = slice(rank % tp * (intermediate // tp), (rank % tp + 1) * (intermediate // tp))
            layer = flux.moe.MoEMLP(
                hidden, intermediate, experts, ep_size=ep_size, activation=activation,
                max_tokens=max(sizes), dtype=torch.float64,
            )  # fmt: skip
            layer.load_state_dict({"w1": w1.detach().flatten(1, 2), "w2": w2.detach()})
            x, s = leaf(xs[rank].detach()), leaf(scores[rank].detach())
            layer(x, ids[rank], s).sin().sum().backward()
            of_w1, of_w2 = w1.grad, w2.grad
            assert of_w1 is not None and of_w2 is not None
            pairs = [
                (x.grad, xs[rank].grad),
                (local(layer.w1.grad).flatten(1, -2), of_w1[mine, :, columns].flatten(1, 2)),
                (local(layer.w2.grad), of_w2[mine, :, columns]),
            ]
            for got, expected in pairs:
                # Routing weights are float32, but these are the same in both types.
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(s.grad, scores[rank].grad, rtol=1e-5, atol=1e-5)
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
