"""The operator that the vLLM plugin puts into vLLM's graphs, and what becomes of it there."""

from __future__ import annotations

import operator as operator_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
