"""Sequence parallelism in graphs of vLLM: what becomes of a model, its results, and the way back."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import asked_at, counted, scenario_test
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.nn.functional import linear
from vllm_stand_in import (
    define_all_reduce,
    define_moe_forward,
    define_norm,
    exact_norm,
    inputs,
    lowered,
    trace,
    vllms_operators,  # noqa: F401  (a fixture)
)

from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import rows, sequence
from flux.integrations.vllm.behind_norm import fuse_sum_norm_gemm
from flux.integrations.vllm.graph import unshard
from flux.ops import add_norm

N, K, LAYERS, FROM = 16, 8, 3, 6
# From where on flux's experts include the sum over ranks, and vLLM's: never.
SUMMED, NEVER = 8, 1000
ours, ir = torch.ops.flux_vllm, torch.ops.vllm_ir

pytestmark = pytest.mark.usefixtures("vllms_operators")


def weights(rank: int) -> dict[str, torch.Tensor]:
    """Of each layer: norms, which are the same on all ranks, and shards of linear layers."""
    same, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(rank)
    made = {"name_True": torch.tensor(NEVER), "name_False": torch.tensor(SUMMED)}
    for i in range(LAYERS):
        for name, shape in (("qkv", (24, N)), ("o", (N, K)), ("up", (K, N)), ("down", (N, K))):
            made[f"{name}{i}"] = torch.randint(-1, 2, shape, generator=own).float()
        for name in ("norm1", "norm2", "bias"):
            made[f"{name}{i}"] = torch.randint(-1, 2, (N,), generator=same).float()
        made[f"qkv_bias{i}"] = torch.randint(-2, 3, (24,), generator=own).float()
        made[f"gate{i}"] = torch.randint(-2, 3, (4, N), generator=same).float()
    return made


def experts(x: Any, w: dict[str, Any], i: int, kind: str) -> Any:
    """Experts with a "gate" before them, or one of their "own"; of flux, or of "vLLM", whose sums flux does
    not include; or that are chosen by something "else", or "wide" ones, which have more columns.
    """
    hidden = x.view(-1, N)
    if kind == "wide":
        wide = torch.nn.functional.pad(hidden, (0, 4))
        partial = torch.ops.vllm.moe_forward(wide, wide, None, None, w["name_True"], 0)
        return torch.ops.vllm.all_reduce(partial, group_name="tp:0")[..., :N].view(x.shape)
    choose = {"gate": lambda x: linear(x, w[f"gate{i}"]), "else": torch.relu}.get(kind)
    logits = choose(hidden) if choose else hidden
    partial = torch.ops.vllm.moe_forward(hidden, logits, None, None, w[f"name_{kind == 'vLLM'}"], 0)
    if kind == "vLLM":
        return torch.ops.vllm.all_reduce(partial, group_name="tp:0").view(x.shape)
    return ours.all_reduce_below.default(partial, SUMMED, "tp:0").view(x.shape)


def model(
    x: Any,
    w: dict[str, Any],
    group: str,
    bias: bool = True,
    aux: int = 0,
    stage: bool = False,
    kind: str = "dense",
) -> Any:
    """A transformer without attention, in vLLM's operators.

    aux: before how many layers it also gives the states. stage: ends before the last norm, as stages of a
    pipeline do. kind: of experts(), or "dense".
    """

    def sums(x: Any, name: str, i: int) -> Any:
        given = w[f"bias{i}"] if bias else None
        return ours.linear_all_reduce.default(x, w[f"{name}{i}"], given, 3, group, "tp:0")

    hidden, residual, seen = ir.rms_norm.default(x, w["norm10"], 1e-5, None), x, []
    for i in range(LAYERS):
        if i:
            if i <= aux:
                seen.append(hidden + residual)
            hidden, residual = ir.fused_add_rms_norm.default(hidden, residual, w[f"norm1{i}"], 1e-5, None)
        q = linear(hidden, w[f"qkv{i}"], w[f"qkv_bias{i}"] if bias else None)
        attended = (q[:, :K] + q[:, K : 2 * K] - q[:, 2 * K :]).remainder(5) - 2
        hidden, residual = ir.fused_add_rms_norm.default(
            sums(attended, "o", i), residual, w[f"norm2{i}"], 1e-5, None
        )
        if kind == "dense":
            hidden = sums(linear(hidden, w[f"up{i}"]).relu().remainder(3) - 1, "down", i)
        else:
            hidden = experts(hidden, w, i, kind)
    if stage:
        return hidden, residual
    return (ir.fused_add_rms_norm.default(hidden, residual, w["norm10"], 1e-5, None)[0], *seen)


# What a model may be.
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False},
    {"stage": True},
    {"aux": 1},
    *({"kind": kind} for kind in ("own", "gate", "else", "vLLM", "wide")),
)


@cache  # a trace takes seconds
def traced_once(group: str, form: tuple[tuple[str, Any], ...]) -> fx.GraphModule:
    return trace(lambda x, w: model(x, w, group, **dict(form)), torch.zeros(9, N), weights(0))


def traced(group: str, **form: Any) -> fx.GraphModule:
    return copy.deepcopy(traced_once(group, tuple(form.items())))


def begins(n: int, k: int, dtype: torch.dtype, group: str, scaling: Any) -> int:
    assert (n, k, dtype, scaling) == (N, K, torch.float32, None)
    return FROM


def targets(graph: fx.Graph) -> dict[str, int]:
    names = [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]
    of_interest = ("linear_", "norm_", "sum_", "gather", "fused_add", "rms_norm", "linear", "moe", "all_")
    return {name: names.count(name) for name in sorted({*names}) if name.startswith(of_interest)}


def rewritten(group: str, **form: Any) -> tuple[fx.GraphModule, int | str]:
    return sharded(traced(group, **form))


def sharded(module: fx.GraphModule) -> tuple[fx.GraphModule, int | str]:
    done = sequence.shard(module.graph, begins)
    module.graph.lint()
    module.recompile()
    return module, done


def computes_the_same(rank: int, world_size: int) -> list[str]:
    group, w = dist.group.WORLD.group_name, weights(rank)
    wrong = []
    # What is made of a graph does not depend on how many ranks there are.
    for form in FORMS if world_size == 2 else (FORMS[0], FORMS[4]):
        stock, (ours, done) = traced(group, **form), rewritten(group, **form)
        if done != FROM:
            wrong.append(f"{form}: {done}")
        for m in (1, FROM - 1, FROM, 7, 8, 9):
            x = torch.randint(-3, 4, (m, N), generator=torch.Generator().manual_seed(m)).float()
            with (
                mock.patch.object(rows, "row_norm", exact_norm),
                counted("gemm_rs", "ag_gemm") as (scatters, gathers),
            ):
                results = ours(*inputs(ours.graph, x, w))
            expected = stock(*inputs(stock.graph, x, w))
            calls = [scatters.call_count, gathers.call_count]
            sums = 2 * LAYERS - form.get("stage", 0) - form.get("aux", 0)
            behind = 2 * LAYERS - 1 - form.get("aux", 0)
            if "kind" in form:
                sums, behind = LAYERS, LAYERS - 1
            if calls != ([sums, behind] if m >= FROM else [0, 0]):
                wrong.append(f"{form}, {m} tokens: {calls}")
            if not all(torch.equal(*pair) for pair in zip(results, expected, strict=True)):
                wrong.append(f"{form}, {m} tokens differ")
    return wrong


@asked_at(2)
def rms_norms(rank: int, world_size: int) -> None:
    """The operators with the norm that they have, on data that is not exact."""
    group, g = dist.group.WORLD.group_name, torch.Generator().manual_seed(0)
    x, residual = torch.randn(7, K, generator=g), torch.randn(7, N, generator=g)
    weight, norm_weight, column = (torch.randn(s, generator=g) for s in ((N, K), (N,), (24, N)))
    total = ours.linear_scatter(x, weight, None, 1, group, "tp:0", residual, True, FROM)
    normed = torch.nn.functional.rms_norm(world_size * (x @ weight.t()) + residual, (N,), norm_weight, 1e-3)
    torch.testing.assert_close(ours.norm_gather(total, norm_weight, 1e-3, FROM, group), normed)
    product = ours.norm_gather_linear(total, norm_weight, 1e-3, column, None, FROM, group)
    torch.testing.assert_close(product, normed @ column.t(), atol=1e-4, rtol=1e-4)
    for name, arguments in (
        ("linear_scatter", (x, weight, None, 1, group, "tp:0", residual, True, FROM)),
        ("norm_gather_linear", (total, norm_weight, 1e-3, column, None, FROM, group)),
        ("norm_gather", (total, norm_weight, 1e-3, FROM, group)),
        ("scatter_norm_gather", (x, weight, None, group, residual, True, norm_weight, 1e-3, column, None)),
        ("gather", (total, FROM, group)),
    ):
        # Rows of other ranks are not written, so results may differ there.
        utils = ("test_schema", "test_faketensor") if name == "linear_scatter" else ("test_schema",)
        torch.library.opcheck(getattr(ours, name).default, arguments, test_utils=utils)


def pieces(module: fx.GraphModule) -> list[str]:
    """The code of the pieces between attentions, as vLLM splits graphs and inductor's cache compares them."""
    numbers, number = {}, 0
    for node in module.graph.nodes:
        attention = node.target == "remainder" and node.args[1] == 5
        numbers[node] = number + attention
        number += 2 * attention
    split = split_module(module, None, lambda node: numbers[node], keep_original_order=True)
    codes = []
    for name, piece in split.named_children():
        for i, given in enumerate(piece.graph.find_nodes(op="placeholder")):
            given.target = f"p_{i}"
            given._rename(given.target)
        piece.recompile()
        if int(name.removeprefix("submod_")) % 2 == 0:
            codes.append(piece.code)
    return codes


def test_pieces_of_layers_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each is compiled once, however many layers there are."""
    monkeypatch.setitem(globals(), "LAYERS", 5)
    first, *layers = pieces(rewritten("8")[0])
    assert "linear_scatter" not in first and len(layers) == 5
    # The residual of the first layer is whole, and the last one's norm gives all rows.
    assert all("norm_gather_linear" in code for code in layers[:-1])
    assert layers[1] == layers[2] == layers[3]
    assert len({*layers}) == 3


def change(graph: fx.Graph, case: str) -> None:
    """Makes of a graph with experts one of which these cannot have own rows."""
    call, *_ = graph.find_nodes(op="call_function", target=torch.ops.vllm.moe_forward)
    hidden = call.args[0]
    if case == "shared experts":
        call.update_arg(2, hidden)
    elif case == "ids":
        call.update_arg(3, hidden)
    elif case == "cut off":
        call.update_arg(5, 8)
    else:
        with graph.inserting_after(call):
            user = graph.call_function(torch.neg, ({"rows": hidden, "result": call}[case],))
        user.meta["example_value"] = graphs.value(call)


@pytest.mark.parametrize("case", ["shared experts", "ids", "cut off", "rows", "result"])
def test_experts_that_need_all_rows(case: str) -> None:
    module = traced("7", kind="own")
    change(module.graph, case)
    assert sequence.shard(module.graph, begins) == FROM
    module.graph.lint()
    assert sequence.count_sharded(module.graph) == {"linear layers": 3, "other sums": 1, "MoE layers": 2}
    assert targets(module.graph)["norm_gather"] == 2


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("gathers", "its 6 sums would need 6 gathers"),
        ("never", "for some of its layers it is not faster, or would run unfused"),
        ("norm", "no row-parallel layer of flux is followed by a plain fused_add_rms_norm"),
        ("groups", "its layers sum over different groups"),
        ("no values", "its graph holds no example values"),
    ],
)
def test_models_that_are_left_alone(case: str, why: str) -> None:
    module = traced("7")
    for node in module.graph.find_nodes(op="call_function", target=linear) if case == "gathers" else []:
        with module.graph.inserting_before(node):
            module.graph.call_function(torch.neg, node.args[:1])
    found = module.graph.find_nodes(op="call_function", target=ours.linear_all_reduce.default)
    if case == "groups":
        found[1].args = (*found[1].args[:4], "8", "dp:0")
    for node in found if case == "norm" else []:
        (norm,) = node.users
        norm.args = (*norm.args[:4], N // 2)
    if case == "no values":
        found[1].meta.clear()
    before = str(module.graph)
    nothing = mock.Mock(return_value=None)
    assert sequence.shard(module.graph, nothing if case == "never" else begins) == why
    assert str(module.graph) == before


def after_gradients(module: fx.GraphModule, m: int) -> fx.Graph:
    return lowered(module, inputs(module.graph, torch.zeros(m, N), weights(0)))


@asked_at(2)
def pairs_compute_the_same(rank: int, world_size: int) -> list[str]:
    group, w = dist.group.WORLD.group_name, weights(rank)
    wrong = []
    # Of 9 tokens, the last rank has padding. Behind the last sum is the norm for the head.
    for form, m, pairs, alone in (({}, 9, 5, 1), ({"bias": False}, 8, 5, 1), ({"aux": 1}, 9, 4, 1)):
        x = torch.randint(-3, 4, (m, N), generator=torch.Generator().manual_seed(m)).float()
        stock, (module, _) = traced(group, **form), rewritten(group, **form)
        expected = stock(*inputs(stock.graph, x, w))
        graph = after_gradients(module, m)
        given = [each for each in inputs(module.graph, x, w) if isinstance(each, torch.Tensor)]
        if fuse_sum_norm_gemm(graph, FROM - 1):
            wrong.append(f"{form}: pairs that are not sequence parallel in all of a range")
        joined = fuse_sum_norm_gemm(graph, FROM)
        graph.lint()
        left = targets(graph)
        if (joined, left["linear_scatter"], left.get("norm_gather_linear", 0)) != (pairs, alone, 0):
            wrong.append(f"{form}: {joined} pairs, {left}")
        with (
            mock.patch.object(rows, "row_norm", exact_norm),
            mock.patch.object(add_norm, "row_norm", exact_norm),
        ):
            results = fx.GraphModule(torch.nn.Module(), graph)(*given)
        if not all(torch.equal(*each) for each in zip(results, expected, strict=True)):
            wrong.append(f"{form}, {m} tokens differ")
    return wrong


def define_operators() -> None:
    of_rank = define_moe_forward(dist.get_rank(), dist.get_world_size())
    libraries.extend([define_all_reduce(), define_norm(), of_rank])


libraries: list[Any] = []  # as long as a rank lives
scenarios = (computes_the_same, rms_norms, pairs_compute_the_same)
test_between_ranks = scenario_test((2, 4), *scenarios, prepare=define_operators, timeout_s=400)


def kinds(graph: fx.Graph) -> list[str]:
    """The operators of a graph, as one of two ways spells them."""
    functional = graph.find_nodes(op="call_function", target=auto_functionalized)
    parts = {user for node in functional for user in node.users}
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in parts]
    names = [str(node.args[0] if node in functional else node.target) for node in nodes]
    same = {"aten.t.default": "transpose", "aten.permute.default": "transpose"}
    return sorted(same.get(name, name) for name in names if "view" not in name)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_small_batches_are_as_without(form: dict[str, Any]) -> None:
    stock = after_gradients(traced("7", **form), 9)
    ours = after_gradients(rewritten("7", **form)[0], 9)
    unshard(ours, FROM)
    fewer = form.get("stage", 0) + form.get("aux", 0)
    assert sum(sequence.count_sharded(ours).values()) == 2 * LAYERS - fewer
    unshard(ours, FROM - 1)
    for graph in (stock, ours):
        graphs.settle_sums(graph, 1, FROM - 1)
        graph.lint()
        assert not any(sequence.count_sharded(graph).values())
        assert all(graphs.value(node).numel() for node in graph.find_nodes(op="placeholder"))
    assert kinds(ours) == kinds(stock)
    assert graphs.fuse_norm(ours, 3) == graphs.fuse_norm(stock, 3) > 0, "vLLM's patterns are there"
    rules = {"tp:0": graphs.SumRule("7", 1, 1 << 20)}
    experts = LAYERS if form.get("kind", "wide") != "wide" else 0
    assert graphs.fuse_sum_and_norm(ours, 1, FROM - 1, rules) == experts


def test_a_piece_without_the_norm() -> None:
    """The norm of a sum may be in another piece: each alone is right."""
    module = fx.symbolic_trace(
        lambda x, w, r: ours.linear_scatter(x, w, None, 3, "7", "tp:0", r, False, FROM)
    )
    first = make_fx(module, tracing_mode="fake")(
        torch.zeros(9, K), torch.zeros(N, K), torch.zeros(9, N)
    ).graph
    module = fx.symbolic_trace(lambda r, n, w: ours.norm_gather_linear(r, n, 1e-5, w, None, FROM, "7"))
    second = make_fx(module, tracing_mode="fake")(torch.zeros(9, N), torch.zeros(N), torch.zeros(24, N)).graph
    for graph, made in ((first, ["linear_all_reduce", "add"]), (second, ["rms_norm", "permute", "mm"])):
        unshard(graph)
        graph.lint()
        names = [n.target.__name__.partition(".")[0] for n in graph.nodes if n.op == "call_function"]
        assert names == made
