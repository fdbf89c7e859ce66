"""Random valid calls of flux.gemm and the dense collectives, and layers of experts, each beside its exact
result: in any group, on CPUs and GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, silu

import flux
from flux.ops import gemm as products
from flux.ops.gemm_rs_with_gather import gemm_rs_with_gather
from flux.ops.norm_and_quant import rms_norm
from flux.testing import AgGemmCase, GemmRsCase
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import MoeCase

Tensor = torch.Tensor
COLLECTIVES = ("gemm_rs", "ag_gemm", "all_gather", "gemm_ar", "all_reduce", "reduce_scatter")
# What a call gave, what that is, and how to make what it should be.
Found = list[tuple[str, Tensor, Callable[[], Tensor]]]
Sizes = Callable[[random.Random], tuple[int, int, int]]
OPTIONS = 102  # of is_exact


def size(dice: random.Random, most: int) -> int:
    """Mostly small, sometimes 1, sometimes next to a tile's edge."""
    edge = dice.choice((1, 127, 128, 129, 256, 257))
    return min(most, dice.choice((dice.randint(1, 40), dice.randint(1, most), edge)))


def mixed(dice: random.Random) -> tuple[int, int, int]:
    """Rows of a shard, columns of the result, K."""
    return size(dice, 300), size(dice, 300), size(dice, 64) + 1


def differs(what: object, result: Tensor, expected: Tensor) -> str:
    """Empty if the result is exact."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{what}: {list(result.shape)} {result.dtype}, not {list(expected.shape)} {expected.dtype}"
    wrong = int((result != expected).sum())
    return f"{what}: {wrong} of {result.numel()} elements are wrong" if wrong else ""


def wrong(found: Found) -> list[str]:
    told = (differs(what, result, expected()) for what, result, expected in found)
    return [each for each in told if each]


def wrong_layers(case: MoeCase, rank: int, group: Any = None, device: str = "cpu") -> list[str]:
    """What is wrong with the results of both layers of experts."""
    ids, weights = (tensor.to(device) for tensor in case.routing(rank))
    sizes = {"ep_size": case.ep_size, "max_tokens": case.max_tokens}
    routing = flux.moe.route(ids, weights, case.num_experts, group=group, **sizes)
    x, w1, w2 = (make(rank).to(device) for make in (case.x, case.w1, case.w2))
    hidden = case.hidden_rows(rank, len(routing.rows)).to(device)
    first, expected = flux.moe.ag_scatter_gemm(x, w1, routing), case.layer0(rank)
    results = [("0", first[: len(expected)], expected)]
    results += [("1", flux.moe.gemm_gather_rs(hidden, w2, routing), case.layer1(rank))]
    told = [differs(f"layer {name} of {case}", got.cpu(), right) for name, got, right in results]
    return [each for each in told if each]


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda z: silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "silu": silu,
    "gelu": gelu,
    None: lambda z: z,
}


def check_experts(
    rank: int, p: int, ep_size: int, tokens: list[int], activation: Any = "swiglu", nodes: int = 1
) -> None:
    """Results and gradients of a layer in float64 are those of one rank that gives every expert all tokens,
    most of them times zero. A token may name an expert twice, or none.

    nodes: of which no more than a share of the tokens, most of which name no expert, goes to another one.
    """
    hidden, wide, experts, k = 8, 4 * p, 2 * p, 3 if nodes == 1 else 2
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    w1 = normal(experts, (2 if activation == "swiglu" else 1) * wide, hidden)
    w2, x = normal(experts, hidden, wide), normal(sum(tokens), hidden)
    ids = torch.randint(-1, experts, (sum(tokens), k), generator=g)
    scores = torch.rand(ids.shape, generator=g).requires_grad_()
    share = None
    if nodes > 1:
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.8, -1, ids)
        share = max(
            int(((of >= 0) & (of * nodes // experts == node)).any(1).sum())
            for source, of in enumerate(ids.split(tokens))
            for node in range(nodes)
            if node != source * nodes // p
        )
    gates = x.new_zeros(len(x), experts + 1)
    gates = gates.scatter_add(1, torch.where(ids < 0, experts, ids), scores.to(x.dtype))
    act = ACTIVATIONS[activation]
    whole = sum(gates[:, e, None] * (act(x @ w1[e].t()) @ w2[e].t()) for e in range(experts))
    marks = torch.cat([torch.full((count, 1), 1.0 + r) for r, count in enumerate(tokens)])
    (whole.sin() * marks).sum().backward()  # type: ignore[union-attr]
    cut: Any = {"ep_size": ep_size, "max_tokens": max(tokens), "max_node_tokens": share}
    layer = flux.moe.MoEMLP(hidden, wide, experts, activation=activation, dtype=torch.float64, **cut)
    layer.load_state_dict({"w1": w1.detach(), "w2": w2.detach()})
    own, chosen, own_scores = (each.detach().split(tokens)[rank] for each in (x, ids, scores))
    own, own_scores = own.clone().requires_grad_(), own_scores.clone().requires_grad_()
    routing = flux.moe.route(chosen, own_scores, experts, **cut)
    assert share is None or routing.incoming.shape[1] != max(tokens), "all tokens cross"
    result = layer(own[None], chosen[None], own_scores[None])[0]  # of any number of dimensions
    assert torch.equal(layer(own, chosen, own_scores), result)
    (result.sin() * (1.0 + rank)).sum().backward()
    of_rank = [each.split(tokens)[rank] for each in (whole, x.grad, scores.grad)]  # type: ignore[union-attr]
    of_weights = [each.grad.full_tensor().view_as(w) for each, w in ((layer.w1, w1), (layer.w2, w2))]
    found = (result, own.grad, own_scores.grad, *of_weights)
    for got, expected in zip(found, (*of_rank, w1.grad, w2.grad), strict=True):
        error = 1e-5 if got.dtype == torch.float32 else 1e-9  # routing weights are float32
        largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(got, expected, rtol=error, atol=error * largest)


class Call:
    """One random call of an operator; it follows from the dice, which show all ranks of a group the same.

    Args:
        seed: of the data; number the calls of a test 0, 1, 2, ...
        sizes: rows of a shard, n and k.
    """

    def __init__(
        self,
        dice: random.Random,
        seed: int,
        group: dist.ProcessGroup | None = None,
        sizes: Sizes = mixed,
        dtypes: Sequence[torch.dtype] = tuple(EXACT_LIMIT),
        device: str = "cpu",
    ) -> None:
        self.dice, self.seed, self.group, self.device = dice, seed, group, device
        self.rank, self.p = dist.get_rank(group), dist.get_world_size(group)
        self.rows, self.n, self.k = sizes(dice)
        self.dtype = dice.choice(dtypes)
        self.layout = {"transpose_weight": dice.random() < 0.4}
        self.bias, self.gives_out = dice.random() < 0.4, dice.random() < 0.3
        self.middle = (1,) if dice.random() < 0.3 else ()  # x has three dimensions

    def make(self, op: str) -> Found:
        """Makes the call. x is overwritten then: a peer must not read it later."""
        found: Found = getattr(self, op)()
        return [(f"{op} {what}", result, expected) for what, result, expected in found]

    def products(self, m: int, p: int = 0) -> GemmRsCase:
        p = p or self.p
        return GemmRsCase(m, self.n, self.k, p, self.dtype, bias=self.bias, seed=self.seed, **self.layout)

    def rows_of_all(self) -> AgGemmCase:
        m = self.rows * self.p
        return AgGemmCase(
            m, self.n, self.k, self.p, self.dtype, bias=self.bias, seed=self.seed, **self.layout
        )

    def out(self, rows: int, columns: int) -> Tensor | None:
        shape = (rows, *self.middle, columns)
        return torch.full(shape, 77, dtype=self.dtype, device=self.device) if self.gives_out else None

    def deep(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], *self.middle, x.shape[1])

    def end(self, what: str, x: Tensor, result: Tensor, out: Tensor | None, expected: Any) -> Found:
        assert out is None or result is out
        if out is not x:
            x.fill_(7)
        return [(what, result.reshape(-1, result.shape[-1]), expected)]

    def gemm(self) -> Found:
        case, out = self.products(self.rows, 1), self.out(self.rows, self.n)
        x, weight, bias = case.inputs(0, self.device)
        result = flux.gemm(self.deep(x), weight, bias, out=out, **self.layout)
        return self.end(str(case), x, result, out, partial(case.expected, 0, self.device))

    def gemm_rs(self) -> Found:
        case, out = self.products(self.rows * self.p), self.out(self.rows, self.n)
        x, weight, bias = case.inputs(self.rank, self.device)
        result = flux.gemm_rs(self.deep(x), weight, bias, group=self.group, out=out, **self.layout)
        return self.end(str(case), x, result, out, partial(case.expected, self.rank, self.device))

    def ag_gemm(self) -> Found:
        """With one weight or a list of them, with and without the gathered rows."""
        case, count = self.rows_of_all(), self.dice.choice((0, 0, 0, 1, 2, 3))  # 0: no list
        cases = [replace(case, n=self.n if i == 0 else size(self.dice, 200)) for i in range(max(count, 1))]
        inputs = [each.inputs(self.rank, self.device) for each in cases]
        x, weights, biases = inputs[0][0], [each[1] for each in inputs], [each[2] for each in inputs]
        outs = [self.out(case.m, each.n) for each in cases]
        gathers = self.dice.random() < 0.4
        given: Any = (weights, biases) if count else (weights[0], biases[0])
        options: Any = {"group": self.group, "return_gathered": gathers, **self.layout}
        if self.gives_out:
            options["out"] = outs if count else outs[0]
        result: Any = flux.ag_gemm(self.deep(x), *given, **options)
        result, gathered = result if gathers else (result, None)
        found = []
        for each, one, out in zip(cases, result if count else [result], outs, strict=True):
            found += self.end(str(each), x, one, out, partial(each.expected, self.rank, self.device))
        if gathered is not None:
            found += self.end(f"gathered {case}", x, gathered, None, partial(case.gathered, self.device))
        return found

    def all_gather(self) -> Found:
        case, out = self.rows_of_all(), self.out(self.rows * self.p, self.k)
        x = case._x(self.rank, self.device)
        result = flux.all_gather(self.deep(x), group=self.group, out=out)
        return self.end(str(case), x, result, out, partial(case.gathered, self.device))

    def gemm_rs_with_gather(self) -> Found:
        self.gives_out, self.bias = False, False
        case, beside = self.products(self.p * size(self.dice, 200)), self.rows_of_all()
        (left, right, _), x = case.inputs(self.rank, self.device), beside._x(self.rank, self.device)
        total, gathered = gemm_rs_with_gather(left, right, x, group=self.group, **self.layout)
        found = self.end(str(case), left, total, None, partial(case.expected, self.rank, self.device))
        return found + self.end(f"beside {beside}", x, gathered, None, partial(beside.gathered, self.device))

    def gemm_ar(self) -> Found:
        case = self.products(self.rows_of_sum())
        x, weight, bias = case.inputs(self.rank, self.device)
        call = partial(flux.gemm_ar, self.deep(x), weight, bias, **self.layout)
        return self.sum(case, x, call, self.out(case.m, self.n))

    def all_reduce(self) -> Found:
        self.bias = False
        case = self.products(self.rows_of_sum())
        x = self.partial_sum(case)
        out = self.dice.choice((None, x, self.out(case.m, self.n)))
        if out is x:
            self.middle = ()
        return self.sum(case, x, partial(flux.all_reduce, self.deep(x) if out is not x else x), out)

    def reduce_scatter(self) -> Found:
        self.bias = False
        case, out = self.products(self.rows * self.p), self.out(self.rows, self.n)
        x = self.partial_sum(case)
        result = flux.reduce_scatter(self.deep(x), group=self.group, out=out)
        return self.end(str(case), x, result, out, partial(case.expected, self.rank, self.device))

    def rows_of_sum(self) -> int:
        return self.dice.choice((self.rows, self.rows * self.p, self.rows * self.p + 1))

    def partial_sum(self, case: GemmRsCase) -> Tensor:
        return products.reference(*case.inputs(self.rank, self.device)[:2], None, case.transpose_weight)

    def sum(self, case: GemmRsCase, x: Tensor, call: Callable[..., Any], out: Tensor | None) -> Found:
        """A sum, with or without a residual, and its norm."""
        total, added = partial(case.expected_sum, self.device), None
        # The sum must stay exact: 16 bits have room for a bias or a residual.
        if self.dice.random() < 0.5 and not (self.bias and self.dtype == torch.bfloat16):
            added = case.residual(self.device)

            def total() -> Tensor:
                return case.expected_sum(self.device) + case.residual(self.device)

        options: Any = {"group": self.group, "residual": None if added is None else self.deep(added)}
        if out is x and added is not None:
            options["residual"] = added
        if out is not None or self.dice.random() < 0.5:
            return self.end(str(case), x, call(out=out, **options), out, total)
        norm_weight = torch.arange(self.n, device=self.device).remainder(3).add(1).to(self.dtype)
        norm, summed = call(norm_weight=norm_weight, eps=1e-5, **options)
        found = self.end(f"sum of {case}", x, summed, None, total)
        if self.device == "cpu":  # kernels add the squares of a row in another order
            found += self.end(f"norm of {case}", x, norm, None, lambda: rms_norm(total(), norm_weight, 1e-5))
        return found


def is_exact(op: str, seed: int, rows: int = 10, n: int = 24, k: int = 16, **how: Any) -> bool:
    """Whether one call with these sizes is exact. It has a bias, gathered rows, a residual and a norm.

    how: a group, or other types than fp32.
    """
    given = {"sizes": lambda _: (rows, n, k), "dtypes": (torch.float32,), **how}
    return not wrong(Call(random.Random(OPTIONS), seed, **given).make(op))
