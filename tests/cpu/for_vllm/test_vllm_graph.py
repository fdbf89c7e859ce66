"""The operator that the vLLM plugin puts into vLLM's graphs, and what becomes of it there."""

from __future__ import annotations

import operator as operator_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import asked_at, scenario_test
from pytest import MonkeyPatch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from vllm_stand_in import define_all_reduce, vllms_operators  # noqa: F401  (a fixture)

import flux
from flux.integrations.vllm import behind_norm as fuse
from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import op
from flux.integrations.vllm.behind_norm import fuse_norm_gemm
from flux.integrations.vllm.experts import experts_of_own_rows, own_experts, summed_experts
from flux.moe import reference
from flux.testing import spawn

pytestmark = pytest.mark.usefixtures("vllms_operators")


def operator(rank: int, world_size: int) -> list[str]:
    library = define_all_reduce()
    group = dist.group.WORLD.group_name
    g = torch.Generator().manual_seed(rank)
    weight = torch.randint(-2, 3, (24, 16), generator=g).float()
    bias = torch.arange(24.0)
    answers = []
    compiled = torch.compile(op.linear_all_reduce, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens, min_tokens, with_bias in ((4, 5, True), (5, 5, True), (6, 5, False), (3, 5, False)):
        x = torch.randint(-2, 3, (tokens, 16), generator=g).float()
        expected = x @ weight.t()
        dist.all_reduce(expected)
        arguments = (x, weight, bias if with_bias else None, min_tokens, group, "tp:0")
        expected += bias if with_bias else 0
        with mock.patch.object(flux, "gemm_ar", wraps=flux.gemm_ar) as ours:
            result = op.linear_all_reduce(*arguments)
        if not torch.equal(result, expected) or ours.called != (tokens >= min_tokens):
            answers.append(f"{tokens} tokens: {(result - expected).abs().max()}, {ours.call_count} calls")
        if not torch.equal(compiled(*arguments), expected):
            answers.append(f"{tokens} tokens: compiled differs")
    torch.library.opcheck(torch.ops.flux_vllm.linear_all_reduce.default, arguments)
    residual, norm_weight = torch.arange(72.0).view(3, 24), torch.arange(24.0) + 1
    arguments = (x, weight, bias, residual, norm_weight, 1e-5, group)
    normalised, total = torch.ops.flux_vllm.linear_all_reduce_norm(*arguments)
    expected += bias + residual
    if not torch.equal(total, expected):
        answers.append("the next residual differs")
    torch.testing.assert_close(normalised, torch.nn.functional.rms_norm(expected, (24,), norm_weight, 1e-5))
    torch.library.opcheck(torch.ops.flux_vllm.linear_all_reduce_norm.default, arguments)
    for swiglu in (False, True):
        torch.library.opcheck(torch.ops.flux_vllm.linear_behind_norm.default, (x, weight, swiglu))
    del library
    return answers


def test_operator() -> None:
    assert spawn(operator, 2, backend="gloo") == [[]] * 2


def graph_of(**values: torch.Tensor) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    """A graph with arguments like these tensors."""
    graph, nodes = torch.fx.Graph(), []
    for name, value in values.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = value
    return graph, nodes


def calls(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def with_norm(case: str, *values: torch.Tensor, total: Any) -> tuple[torch.fx.Graph, list[Any], Any]:
    """A sum by the call `total` of its arguments, and vLLM's norm behind it: the graph, its arguments with
    residual and norm's weight last, and what the norm gives.
    """
    graph, nodes = graph_of(**{f"argument{i}": value for i, value in enumerate(values)})
    *_, residual, norm_weight = nodes
    node = graph.call_function(*total(nodes))
    node.meta["val"] = values[-2]
    pair = (residual, node) if case == "as residual" else (node, residual)
    others = {"part of a row": (norm_weight, 1e-5, 8), "no weight": (None, 1e-5)}
    more = others.get(case, (norm_weight, 1e-5, None))
    norm = graph.call_function(torch.ops.vllm_ir.fused_add_rms_norm.default, (*pair, *more))
    norm.meta["val"] = (values[-2], values[-2])
    first, second = (graph.call_function(operator_module.getitem, (norm, i)) for i in (0, 1))
    graph.output((first, second, node) if case == "another user" else (first, second))
    if case == "no norm":
        norm.target = torch.ops.aten.add.Tensor
    return graph, nodes, first


def norm_weight(n: int, case: str) -> torch.Tensor:
    return torch.empty(n, dtype=torch.bfloat16 if case == "another dtype" else torch.float32)


COMMON = ["plain", "another user", "another dtype", "part of a row", "no weight", "as residual"]


@pytest.mark.parametrize("case", [*COMMON, "cube"])
def test_norm_is_taken_in(case: str) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 8) if case == "cube" else torch.empty(6, 8)
        weight, bias, residual = torch.empty(16, 8), torch.empty(16), x.new_empty(*x.shape[:-1], 16)
        values = (x, weight, bias, residual, norm_weight(16, case))
    target = torch.ops.flux_vllm.linear_all_reduce.default
    graph, nodes, first = with_norm(case, *values, total=lambda given: (target, (*given[:3], 5, "7", "tp:0")))
    assert graphs.fuse_norm(graph, 4) == 0, "flux begins at 5 tokens"
    assert graphs.fuse_norm(graph, 5) == (case == "plain")
    assert graphs.count_kept(graph) == 1
    graph.lint()
    if case == "plain":
        fused, getitem = first.args[0], operator_module.getitem
        assert calls(graph) == [torch.ops.flux_vllm.linear_all_reduce_norm.default, getitem, getitem]
        assert fused.args == (*nodes, 1e-5, "7") and len(fused.meta["val"]) == 2
    else:
        assert calls(graph)[0] is target
        # What has a norm that flux does not take is given back, where flux begins later.
        assert graphs.unfuse(graph, 5) == 0, "flux begins at 5 tokens"
        assert graphs.unfuse(graph, 4) == (case != "cube"), "vLLM's patterns know matrices only"
        aten, total = torch.ops.aten, torch.ops.vllm.all_reduce.default
        made = [aten.permute.default, aten.mm.default, total, aten.add.Tensor]
        assert calls(graph)[: 1 if case == "cube" else 4] == ([target] if case == "cube" else made)


@pytest.mark.parametrize(
    "case", [*COMMON, "another group", "columns", "too many bytes", "too few tokens", "no norm"]
)
def test_a_sum_and_its_norm(case: str) -> None:
    n = 12 if case == "columns" else 16
    with FakeTensorMode():
        values = torch.empty(6, n), torch.empty(6, n), norm_weight(n, case)
    target, group = torch.ops.vllm.all_reduce.default, "pp:0" if case == "another group" else "tp:0"
    graph, nodes, first = with_norm(case, *values, total=lambda given: (target, (given[0], group)))
    rules = {"tp:0": graphs.SumRule("7", 3, 8 * n * 4)}
    start, end = (2 if case == "too few tokens" else 3), (9 if case == "too many bytes" else 8)
    assert graphs.fuse_sum_and_norm(graph, start, end, rules) == (case == "plain")
    graph.lint()
    if case == "plain":
        fused, getitem = first.args[0], operator_module.getitem
        assert calls(graph) == [torch.ops.flux.all_reduce_norm.default, getitem, getitem]
        assert fused.args == (*nodes, 1e-5, "7") and len(fused.meta["val"]) == 2
    else:
        assert calls(graph)[0] is target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["swiglu", "product is used", "gate is used", "halves swapped", "transposed", "router", "large"]
)
def test_products_behind_norms(dtype: torch.dtype, case: str, monkeypatch: MonkeyPatch) -> None:
    """As they are in graphs behind inductor's decompositions; in 16 bits these compute in fp32."""

    def layer(norm: torch.Tensor, weight: torch.Tensor) -> Any:
        if case == "transposed":
            return norm @ weight
        product = torch.ops.aten.mm(norm, torch.ops.aten.permute(weight, [1, 0]))
        gate, others = (torch.ops.aten.slice(product, 1, at, at + 16) for at in (0, 16))
        if case == "halves swapped":
            gate, others = others, gate
        silu = torch.nn.functional.silu(gate)
        return silu * others, {"product is used": product, "gate is used": silu}.get(case, norm)

    if case == "large":
        monkeypatch.setattr(fuse, "_MOST_BYTES", 32 * 24 * dtype.itemsize - 1)
    k = {"transposed": 32, "router": 257}.get(case, 24)
    norm, weight = torch.randn(5, k).to(dtype), torch.randn(32, k).to(dtype)
    traced = make_fx(layer, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(norm, weight)
    graph = traced.graph
    given, *_ = [node for node in graph.nodes if node.op == "placeholder"]
    (first,) = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    with graph.inserting_before(first):  # the norm is flux's
        rest = (given, given, None, given, given, 1e-5, "g")
        sums = graph.call_function(torch.ops.flux_vllm.linear_all_reduce_norm.default, rest)
        of_flux = graph.call_function(operator_module.getitem, (sums, 0))
        of_flux.meta["val"] = given.meta["val"]
    first.update_arg(0, of_flux)
    found = {"swiglu": (1, 1), "transposed": (0, 0), "router": (0, 0), "large": (0, 0)}.get(case, (1, 0))
    assert fuse_norm_gemm(graph) == found
    graph.lint()
    of_flux.replace_all_uses_with(given)
    graph.eliminate_dead_code()
    result = torch.fx.GraphModule(traced, graph)(norm, weight)
    expected = layer(norm, weight)
    if case == "transposed":
        torch.testing.assert_close(result, expected)
    else:
        torch.testing.assert_close(result[0], expected[0], rtol=2e-2, atol=1e-1)


# What ranks compute of the experts of MoE layers, and who sums it. No runner of vLLM.
E4M3, TOP_K = torch.float8_e4m3fn, 2


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
    library = define_all_reduce()
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
