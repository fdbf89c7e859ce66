"""MoE layers of the vLLM plugin: what ranks compute of their experts, and who sums it. No runner of vLLM."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vllm_stand_in as stand_in
from cases import asked_at, scenario_test
from torch._subclasses.fake_tensor import FakeTensorMode

import flux
from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import op
from flux.integrations.vllm.experts import experts_of_own_rows, own_experts, summed_experts
from flux.moe import reference

E4M3, TOP_K = torch.float8_e4m3fn, 2
vllms_operators = stand_in.vllms_operators


class Numbers:
    """Integers, the same on all ranks, and the experts of a layer: whole, as of one rank, and this rank's
    columns of all. Exact: gates are 0 or so large that silu changes nothing, and only integers and quarters
    of them are added up.
    """

    hidden, tolerance, counts = 16, 0.0, (150,)

    def __init__(self, rank: int, p: int) -> None:
        self.rank, self.p, self.experts, self.generator = rank, p, 2 * p, torch.Generator().manual_seed(p)
        # Of each rank: gates and ups, and w2; with scales, theirs too.
        parts = self.parts(p, self.experts)
        self.columns = [each[rank].flatten(1, -2) for each in parts]
        self.whole = [each.movedim(0, 2).flatten(*((1, 3) if each.ndim == 5 else (2, 3))) for each in parts]

    def parts(self, *of: int) -> list[torch.Tensor]:
        gates, ups = 32 * self.integers(0, 2, *of, 8, 16), self.integers(-2, 2, *of, 8, 16)
        return [torch.stack([gates, ups], 2), self.integers(-2, 2, *of, 16, 8)]

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).float()

    def x(self, *shape: int) -> torch.Tensor:
        return self.integers(0, 2, *shape)

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        """Rows, choices and their weights; and the result."""
        ids = torch.rand(count, self.experts, generator=self.generator).topk(TOP_K).indices.int()
        given = self.x(count, self.hidden), ids, self.integers(1, 4, count, TOP_K) / 4
        return *given, self.expected(*given)

    def expected(self, *given: torch.Tensor) -> torch.Tensor:
        return reference.moe_mlp(*given, *self.whole)


class Scaled(Numbers):
    """fp8 weights with a scale for each block, and rows that are not exact: an element of 8 bits may be
    rounded to the next one.
    """

    hidden, tolerance, counts = 256, 2e-3, (60,)

    def parts(self, *of: int) -> list[torch.Tensor]:
        w13, w2 = self.x(*of, 2, 128, 256).to(E4M3), self.x(*of, 256, 128).to(E4M3)
        return [w13, w2, *(2 ** self.integers(-6, -3, *shape) for shape in ((*of, 2, 1, 2), (*of, 2, 1)))]

    def x(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def expected(self, *given: torch.Tensor) -> torch.Tensor:
        x, ids, weights = given
        pairs = zip(self.whole[:2], self.whole[2:], strict=True)
        w13, w2 = (w.float() * s.repeat_interleave(128, -2).repeat_interleave(128, -1) for w, s in pairs)
        total = torch.zeros_like(x)
        for expert in range(self.experts):
            gate, up = (rounded(x) @ w13[expert].t()).chunk(2, -1)
            result = rounded(torch.nn.functional.silu(gate) * up) @ w2[expert].t()
            total += result * (weights * (ids == expert)).sum(-1, keepdim=True)
        return total


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What a quantised x stands for."""
    q, scale = flux.quantize(x, "group128")
    return q.float() * scale.repeat_interleave(128, -1)


def wrong_results(numbers: Numbers) -> list[str]:
    """In each way, on ranks that have columns of all experts, and whole experts."""
    rank, p, wrong, group = numbers.rank, numbers.p, [], dist.group.WORLD.group_name
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True).group_name
    mine = slice(2 * rank, 2 * rank + 2)
    here = torch.full((2 * p,), -1)
    here[mine] = torch.tensor([0, 1])

    def check(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        apart = (result - expected).abs().max()
        if result.shape != expected.shape or not apart <= numbers.tolerance * expected.abs().max():
            wrong.append(f"{name}, {tokens} tokens: {apart}")

    for tokens in (1, p - 1, p, 2 * p + 1, *numbers.counts):
        x, ids, weights, expected = numbers.tokens(tokens)
        share = -(-tokens // p)
        own = torch.arange(rank * share, (rank + 1) * share) % tokens  # the last ones again, as padding
        for name, experts, chosen, whole in (
            ("columns", numbers.columns, ids, 1),
            ("experts", [each[mine] for each in numbers.whole], here[ids.long()].int(), p),
        ):
            layer, scales = experts[:2], {"scales": tuple(experts[2:])} if experts[2:] else {}
            rows = (x[own], ids[own], weights[own])
            check(
                f"own rows, {name}", experts_of_own_rows(*rows, *layer, group, whole, **scales), expected[own]
            )
            total = own_experts(x, chosen, weights, *layer, alone, **scales)
            dist.all_reduce(total)
            check(f"parts, {name}", total, expected)
            if whole == 1:
                with mock.patch.object(flux.moe, "gemm_gather_rs", wraps=flux.moe.gemm_gather_rs) as layer1:
                    check("sum", summed_experts(x, ids, weights, *layer, group, rank, p, **scales), expected)
                if layer1.call_count != 1:
                    wrong.append(f"{tokens} tokens: {layer1.call_count} calls")
    return wrong


def experts(rank: int, p: int) -> list[str]:
    return wrong_results(Numbers(rank, p))


@asked_at(2)
def experts_with_scales(rank: int, p: int) -> list[str]:
    return wrong_results(Scaled(rank, p))


@asked_at(2)
def sums(rank: int, p: int) -> list[str]:
    answers = []
    library = stand_in.define_all_reduce()
    compiled = torch.compile(op.all_reduce_below, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.full((3, 8), rank + 1.0)
    for min_tokens, expected in ((3, rank + 1.0), (4, 3.0)):
        arguments = (x, min_tokens, "tp:0")
        for name, call in (("eager", op.all_reduce_below), ("compiled", compiled)):
            if not torch.equal(call(*arguments), torch.full((3, 8), expected)):
                answers.append(f"{name}, from {min_tokens} tokens: {call(*arguments)[0, 0]}")
        torch.library.opcheck(torch.ops.flux_vllm.all_reduce_below.default, arguments)
    del library
    return answers


test_between_ranks = scenario_test((2, 3), experts, experts_with_scales, sums)


@pytest.mark.usefixtures("vllms_operators")
@pytest.mark.parametrize("reduced", [False, True])
def test_settled_graph(reduced: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(7, 8)
    below = graph.call_function(torch.ops.flux_vllm.all_reduce_below.default, (x, 5, "tp:0"))
    graph.output(below)
    assert graphs.settle_sums(graph, 4, 5) == 0, "each call decides"
    assert graphs.settle_sums(graph, *((5, 9) if reduced else (1, 4))) == 1
    graph.lint()
    (after,) = graph.output_node().args
    if reduced:
        assert after is x
    else:
        assert after.target is torch.ops.vllm.all_reduce.default
        assert after.args == (x, "tp:0") and after.meta["val"].shape == (7, 8)
