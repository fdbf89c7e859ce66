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

EXPERTS, HIDDEN, TOP_K = 6, 16, 2
vllms_operators = stand_in.vllms_operators


class Numbers:
    """Integers, the same on all ranks, and the experts of a layer: of all ranks, as vLLM has them, and this
    rank's columns of all. Exact: gates are 0 or so large that silu changes nothing, and only integers and
    quarters of them are added up.
    """

    def __init__(self, rank: int, p: int, experts: int) -> None:
        self.experts, self.generator = experts, torch.Generator().manual_seed(p)
        gates, ups = (
            32 * self.integers(0, 2, experts, p, 8, HIDDEN),
            self.integers(-2, 2, experts, p, 8, HIDDEN),
        )
        w13, w2 = torch.stack([gates, ups], 2), self.integers(-2, 2, experts, HIDDEN, p, 8)
        self.columns = w13[:, rank].reshape(experts, 16, HIDDEN), w2[:, :, rank].contiguous()
        self.whole = w13.transpose(1, 2).reshape(experts, 16 * p, HIDDEN), w2.reshape(experts, HIDDEN, 8 * p)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).float()

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, choices and their weights; and the result."""
        ids = torch.rand(count, self.experts, generator=self.generator).topk(TOP_K).indices.int()
        given = self.integers(0, 2, count, HIDDEN), ids, self.integers(1, 4, count, TOP_K) / 4
        return *given, reference.moe_mlp(*given, *self.whole)


def experts_of_all_ranks(rank: int, p: int) -> list[str]:
    answers, group, numbers = [], dist.group.WORLD.group_name, Numbers(rank, p, EXPERTS)
    for tokens in (1, p - 1, p, 2 * p + 1, 150):
        x, ids, weights, expected = numbers.tokens(tokens)
        with mock.patch.object(flux.moe, "gemm_gather_rs", wraps=flux.moe.gemm_gather_rs) as layer1:
            result = summed_experts(x, ids, weights, *numbers.columns, group, rank, p)
        if not torch.equal(result, expected) or layer1.call_count != 1:
            answers.append(f"{tokens} tokens: {(result - expected).abs().max()}, {layer1.call_count} calls")
        share = -(-tokens // p)
        own = torch.arange(rank * share, (rank + 1) * share) % tokens  # the last ones again, as padding
        parts = experts_of_own_rows(x[own], ids[own], weights[own], *numbers.columns, group)
        if not torch.equal(parts, expected[own]):
            answers.append(f"own rows of {tokens} tokens: {(parts - expected[own]).abs().max()}")
    whole = [each[rank * EXPERTS // p : (rank + 1) * EXPERTS // p] for each in numbers.whole]
    parts = experts_of_own_rows(x[own], ids[own], weights[own], *whole, group, p)
    if not torch.equal(parts, expected[own]):
        answers.append(f"whole experts: {(parts - expected[own]).abs().max()}")
    return answers


@asked_at(2)
def own_parts(rank: int, p: int) -> list[str]:
    """Ranks' parts, summed up: of columns of all experts, and of whole experts."""
    answers, numbers = [], Numbers(rank, p, 2 * p)
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True).group_name
    mine = slice(2 * rank, 2 * rank + 2)
    here = torch.full((2 * p,), -1)
    here[mine] = torch.tensor([0, 1])
    for tokens in (1, 2 * p + 1, 150):
        x, ids, weights, expected = numbers.tokens(tokens)
        for name, arguments in (
            ("columns", (ids, weights, *numbers.columns)),
            ("experts", (here[ids.long()].int(), weights, *(each[mine] for each in numbers.whole))),
        ):
            total = own_experts(x, *arguments, alone)
            dist.all_reduce(total)
            if not torch.equal(total, expected):
                answers.append(f"{name}, {tokens} tokens: {(total - expected).abs().max()}")
    return answers


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


test_between_ranks = scenario_test((2, 3), experts_of_all_ranks, own_parts, sums)


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
