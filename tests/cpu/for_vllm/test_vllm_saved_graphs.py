"""flux's rewrites of graphs that vLLM 0.26, 0.32 and 0.33 have made (vllm_graphs): models of two layers on
two ranks, as flux gets them. tests/with_vllm/save_graphs.py wrote them, with each version's Python and the
compiled operators of 0.32 for CPUs.
"""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import saved_graphs
import torch
from cases import Answers, by_name, run_scenarios
from torch import fx
from vllm_stand_in import define_all_reduce, define_moe_forward, define_norm

from flux.fp8.scales import Scaling
from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import sequence
from flux.integrations.vllm.behind_norm import (
    drop_marks,
    fuse_norm_gemm,
    fuse_quantisation,
    fuse_sum_norm_gemm,
)
from flux.integrations.vllm.graph import unshard, value

FOLDER = Path(__file__).with_name("vllm_graphs")
VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
LAYERS = 2
# The first batch that is flux's, and the first that is sequence parallel.
FROM, SEQUENCE_FROM = 17, 33
# Models with fp8 weights, and the kinds of their scales.
FP8 = {"fp8_tensor": "row", "fp8_channel": "row", "fp8_block": "block"}
OURS = (
    "linear_scatter",
    "norm_gather_linear",
    "linear_all_reduce_norm",
    "linear_all_reduce",
    "scaled_linear",
)
NEVER = {"tp:0": graphs.SumRule("7", 1, 0)}
ALWAYS = {"tp:0": graphs.SumRule("7", 1, 1 << 30)}
# With these parameters flux calls operators of vLLM.
OPERATORS = {
    "fused_add_rms_norm": ["x", "x_residual", "weight", "epsilon", "variance_size"],
    "rms_norm": ["x", "weight", "epsilon", "variance_size"],
    "all_reduce": ["tensor", "group_name"],
}


def all_checks(rank: int, world_size: int, version: str) -> dict[str, str]:
    """Runs the checks where nothing else defines vLLM's operators."""
    libraries = [define_all_reduce(), define_norm(), define_moe_forward(0, 2)]
    libraries[1].define(
        "fused_add_rms_norm.maybe_inplace(Tensor x, Tensor x_residual, Tensor? weight, float epsilon,"
        " int? variance_size=None) -> (Tensor, Tensor)"
    )
    given = partial(load, version)
    checks = {name: lambda *_, check=check: check(given) for name, check in CHECKS.items()}
    told = run_scenarios(checks, rank, world_size)
    del libraries
    return told


Load = Callable[[str, str], list[fx.Graph]]


def load(version: str, model: str, part: str) -> list[fx.Graph]:
    """Graphs of a model: the whole "model", or its "piece"s in the range of large batches."""
    with zipfile.ZipFile(FOLDER / f"{version}.zip") as archive:
        assert archive.comment.decode() == version
        names = [name for name in archive.namelist() if name.startswith(f"{model}/{part}-")]
        return [saved_graphs.load(archive.read(name).decode()) for name in names]


def count(found: list[fx.Graph], name: str) -> int:
    """Calls of operators of a name, also of those that have been made functional."""
    nodes = [node for graph in found for node in graph.nodes if node.op == "call_function"]
    called = [node.args[0] if "functionalized" in str(node.target) else node.target for node in nodes]
    return sum(target.__name__.partition(".")[0] == name for target in called)


def counts(found: list[fx.Graph], *names: str) -> list[int]:
    return [count(found, name) for name in names]


def calls(found: list[fx.Graph], name: str) -> list[fx.Node]:
    """Calls of one of flux's operators."""
    target = getattr(torch.ops.flux_vllm, name).default
    return [node for graph in found for node in graph.find_nodes(op="call_function", target=target)]


def sharded(load: Load, model: str, sums: int = 2 * LAYERS) -> list[fx.Graph]:
    """A whole model, after flux has made it sequence parallel."""
    (graph,) = load(model, "model")
    assert count([graph], "fused_add_rms_norm") == sums
    asked = []

    def begins(n: int, k: int, dtype: torch.dtype, group: str, scaling: Scaling | None) -> int:
        asked.append((n, k))
        assert (None if scaling is None else scaling.kind) == FP8.get(model)
        assert dtype == (torch.float8_e4m3fn if scaling else torch.float32)
        return SEQUENCE_FROM

    assert sequence.shard(graph, begins) == SEQUENCE_FROM
    attention = (256, 256 if model == "fp8_block" else 128)
    assert asked == ([attention, (256, 256)] if model in ("qwen3", *FP8) else [attention]) * LAYERS
    graph.lint()
    before = str(graph)
    assert sequence.shard(graph, begins) == SEQUENCE_FROM and str(graph) == before, "as from vLLM's cache"
    # All users of the first residual and of the last rows are there: the model's input and output.
    assert counts([graph], "linear_all_reduce", "fused_add_rms_norm", "gather") == [0, 0, 0]
    return [graph]


def fp8_models_become_sequence_parallel(load: Load) -> None:
    for model in FP8:
        found = sharded(load, model)
        assert counts(found, "linear_scatter", "norm_gather_linear") == [2 * LAYERS, 2 * LAYERS - 1]
        # All rows are for batches that are not sequence parallel, and for the head. The first qkv_proj is
        # behind the embedding, whose rows are whole.
        assert counts(found, "norm_gather", "scaled_linear") == [2 * LAYERS, 1]


def fp8_layers_in_each_range(load: Load) -> None:
    for model in FP8:
        product = "matmul" if model == "fp8_block" else "_scaled_mm"
        # Behind the last norm is the head. Some graphs are older than marks of quantised rows.
        marked = count(load(model, "model"), "quantised_rows")
        assert marked in (0, 2 * LAYERS) and (marked or model != "fp8_channel")
        last = 1 if marked else 2 * LAYERS
        quantised = {"linear_all_reduce_norm": 2 * LAYERS}
        ranges = (
            (SEQUENCE_FROM, 512, {"linear_scatter": 2 * LAYERS, "norm_gather_linear": 2 * LAYERS - 1}, 1),
            (FROM, SEQUENCE_FROM - 1, quantised, 2 * LAYERS),
            (1, FROM - 1, {"all_reduce": 2 * LAYERS, "fused_add_rms_norm": 2 * LAYERS}, 4 * LAYERS),
        )
        for start, end, ours, products in ranges:
            pieces = settled(load, model, start, end)
            given_back = sum(graphs.unfuse(piece, end) for piece in pieces)
            before = count(pieces, product)
            for piece in pieces:
                graphs.drop_products(piece, start - 1)
            if start > 1:
                assert count(pieces, product) == before, "this range begins below"
            for piece in pieces:
                graphs.drop_products(piece, start)
                assert fuse_sum_norm_gemm(piece, start) == 0, "fp8 stays apart"
                graphs.fuse_norm(piece, start)
                fuse_quantisation(piece)
                drop_marks(piece)
                piece.lint()
            of_rows = [
                n.args[-1] for n in calls(pieces, "linear_all_reduce_norm") if isinstance(n.args[-1], bool)
            ]
            assert of_rows == [False] * (2 * LAYERS - last if ours is quantised else 0)
            assert count(pieces, "quantised_rows") == 0
            assert given_back == (2 * LAYERS if start == 1 else 0)
            sums = {**dict.fromkeys(OURS, 0), **ours}
            sums["all_reduce"] = sums.get("all_reduce", 0) + 1  # that of the embedding
            assert {name: count(pieces, name) for name in sums} == sums, (model, start)
            # What is left of vLLM's products: of row-parallel layers none where flux is used.
            found = count(pieces, product) + (count(pieces, "mm") if product == "matmul" else 0)
            assert found == products, (model, start)


def dense_models_become_sequence_parallel(load: Load) -> None:
    found = counts(sharded(load, "qwen3"), "linear_scatter", "norm_gather_linear", "norm_gather")
    assert found == [2 * LAYERS, 2 * LAYERS - 1, 1]


def a_stage_gives_all_rows(load: Load) -> None:
    """The last sum of a pipeline's first stage has no norm behind it; the next stage gets the residual."""
    (graph,) = load("first_stage", "model")
    sums = 2 * LAYERS - 1
    assert counts([graph], "linear_all_reduce", "fused_add_rms_norm") == [sums + 1, sums]
    assert sequence.shard(graph, lambda *layer: SEQUENCE_FROM) == SEQUENCE_FROM
    graph.lint()
    found = counts([graph], "linear_scatter", "norm_gather_linear", "norm_gather", "linear_all_reduce")
    assert found == [sums, sums, 0, 1]
    (output,) = graph.find_nodes(op="output")
    (given,) = graph.find_nodes(op="call_function", target=torch.ops.flux_vllm.gather.default)
    assert list(given.users) == [output]
    pieces = settled(load, "first_stage", SEQUENCE_FROM, 512)
    assert counts(pieces, "linear_scatter", "gather", "linear_all_reduce") == [sums, 1, 1]
    pieces = settled(load, "first_stage", FROM, SEQUENCE_FROM - 1)
    assert counts(pieces, "linear_scatter", "gather", "linear_all_reduce") == [0, 0, sums + 1]
    assert sum(graphs.fuse_norm(piece, FROM) for piece in pieces) == sums


def layers_with_biases_in_each_range(load: Load) -> None:
    """Biases of row-parallel layers are added once: by flux's operator, or behind vLLM's all-reduce. The last
    sum of a stage has no norm behind it.
    """
    targets = ("linear_scatter", "norm_gather_linear", "linear_all_reduce_norm", "linear_all_reduce")
    ours = [getattr(torch.ops.flux_vllm, name).default for name in targets]
    place = dict(zip(ours, (2, 4, 2, 2), strict=True))
    sums = 2 * LAYERS - 1
    for start, end, counted in (
        (SEQUENCE_FROM, 512, [sums, sums, 0, 1]),
        (FROM, SEQUENCE_FROM - 1, [0, 0, sums, 1]),
        (1, FROM - 1, [0, 0, 0, 0]),
    ):
        pieces = settled(load, "first_stage", start, end)
        for piece in pieces:
            graphs.unfuse(piece, end)
            graphs.fuse_norm(piece, start)
            piece.lint()
        assert counts(pieces, *targets) == counted, start
        for node in (node for piece in pieces for node in piece.nodes if node.target in ours):
            bias = node.args[place[node.target]]
            assert isinstance(bias, fx.Node) and value(bias).dim() == 1, (start, node)
        if start == 1:
            found = [node for piece in pieces for node in piece.nodes if is_sum_of_a_layer(node)]
            assert len(found) == sums + 1
            assert all(user.target is torch.ops.aten.add.Tensor for node in found for user in node.users)
            biases = [user.args[1] for node in found for user in node.users]
            assert all(isinstance(bias, fx.Node) and value(bias).shape == (256,) for bias in biases)


def is_sum_of_a_layer(node: fx.Node) -> bool:
    """vLLM also sums the embedding, which no matrix product gives."""
    if node.target is not torch.ops.vllm.all_reduce.default:
        return False
    return isinstance(node.args[0], fx.Node) and node.args[0].target is torch.ops.aten.mm.default


def experts_get_and_give_own_rows(load: Load) -> None:
    for model in ("qwen3_moe", "mixtral"):
        found = sharded(load, model)
        assert counts(found, "linear_scatter", "norm_experts_scatter") == [LAYERS, LAYERS]
        assert counts(found, "norm_gather_linear", "norm_gather", "moe_forward") == [LAYERS - 1, 1, 0]
        (graph,) = found
        for node in graph.nodes:
            if "norm_experts_scatter" in str(node.target):
                names = [str(argument) for argument in node.args]
                assert ("gate_parameters_weight" in names[3]) == (model == "mixtral")
                assert all(isinstance(node.args[i], fx.Node) for i in (0, 1, 7)), names


def sums_of_other_experts_give_own_rows(load: Load) -> None:
    for model, operator in (("qwen2_moe", "moe_forward_shared"), ("vllms_experts", "moe_forward")):
        found = sharded(load, model)
        assert counts(found, "linear_scatter", "sum_scatter", operator) == [LAYERS] * 3
        assert counts(found, "norm_gather_linear", "norm_gather") == [LAYERS - 1, LAYERS + 1]
        # vLLM also sums the embedding, in front of a norm that adds nothing.
        assert count(found, "all_reduce") == 1


def settled(load: Load, model: str, start: int, end: int) -> list[fx.Graph]:
    """The pieces of a model in a range, as vLLM would have them of flux's pass before it fuses."""
    pieces = load(model, "piece")
    assert len(pieces) == LAYERS + 1
    for piece in pieces:
        unshard(piece, end)
        graphs.settle_sums(piece, start, end)
        piece.lint()
    return pieces


def large_batches_stay_sequence_parallel(load: Load) -> None:
    for model, kinds in (
        ("qwen3", {"linear layers": 2 * LAYERS}),
        ("qwen3_moe", {"linear layers": LAYERS, "MoE layers": LAYERS}),
        ("mixtral", {"linear layers": LAYERS, "MoE layers": LAYERS}),
        ("qwen2_moe", {"linear layers": LAYERS, "other sums": LAYERS}),
        ("vllms_experts", {"linear layers": LAYERS, "other sums": LAYERS}),
    ):
        pieces = settled(load, model, SEQUENCE_FROM, 512)
        found = [sequence.count_sharded(piece) for piece in pieces]
        assert {kind: n for kind in found[0] if (n := sum(each[kind] for each in found))} == kinds, model
        # The norm behind the last sum is for the head, and experts take own rows.
        behind = count(pieces, "norm_gather_linear") if model == "qwen3" else 0
        assert behind == (2 * LAYERS - 1 if model == "qwen3" else 0)
        assert sum(fuse_sum_norm_gemm(piece, SEQUENCE_FROM - 1) for piece in pieces) == 0
        assert sum(fuse_sum_norm_gemm(piece, SEQUENCE_FROM) for piece in pieces) == behind, model
        assert counts(pieces, "scatter_norm_gather") == [behind]
        for piece in pieces:
            piece.lint()


def products_behind_norms_are_served(pieces: list[fx.Graph]) -> None:
    """Those of gate_up, with SwiGLU, and of the next layer's qkv. The head is in no graph."""
    found = [fuse_norm_gemm(piece) for piece in pieces]
    assert [sum(each) for each in zip(*found, strict=True)] == [2 * LAYERS - 1, LAYERS]
    assert count(pieces, "linear_behind_norm") == 2 * LAYERS - 1
    assert (
        sum(len(piece.find_nodes(op="call_function", target=torch.ops.aten.exp.default)) for piece in pieces)
        == 0
    )
    for piece in pieces:
        piece.lint()
        for node in piece.find_nodes(
            op="call_function", target=torch.ops.flux_vllm.linear_behind_norm.default
        ):
            x, weight, swiglu = node.args
            assert x.args[0].target is torch.ops.flux_vllm.linear_all_reduce_norm.default and x.args[1] == 0
            columns = weight.meta["val"].shape[0] // (2 if swiglu else 1)
            assert list(node.meta["val"].shape[1:]) == [columns]
            (user,) = node.users
            assert (user.target is torch.ops.flux_vllm.linear_all_reduce_norm.default) == swiglu


def smaller_batches_are_sums_with_norm(load: Load) -> None:
    pieces = settled(load, "qwen3", FROM, SEQUENCE_FROM - 1)
    assert count(pieces, "linear_scatter") == 0 and sum(map(graphs.count_kept, pieces)) == 2 * LAYERS
    assert sum(graphs.unfuse(piece, SEQUENCE_FROM - 1) for piece in pieces) == 0
    assert sum(graphs.fuse_norm(piece, FROM) for piece in pieces) == 2 * LAYERS
    assert counts(pieces, "linear_all_reduce_norm", "fused_add_rms_norm") == [2 * LAYERS, 0]
    products_behind_norms_are_served(pieces)
    for model in ("qwen3_moe", "mixtral", "qwen2_moe", "vllms_experts"):
        pieces = settled(load, model, FROM, SEQUENCE_FROM - 1)
        # That of the embedding is one more.
        assert counts(pieces, "all_reduce", "fused_add_rms_norm") == [LAYERS + 1, 2 * LAYERS], model
        assert count(pieces, "moe_forward") + count(pieces, "moe_forward_shared") == LAYERS
        assert sum(graphs.fuse_norm(piece, FROM) for piece in pieces) == LAYERS
        end = SEQUENCE_FROM - 1
        assert sum(graphs.fuse_sum_and_norm(piece, FROM, end, ALWAYS) for piece in pieces) == LAYERS, model
        assert counts(pieces, "all_reduce", "fused_add_rms_norm") == [1, 0]
        for piece in pieces:
            piece.lint()


def the_smallest_batches_are_vllms(load: Load) -> None:
    for rules, with_norm in ((NEVER, 0), (ALWAYS, 2 * LAYERS)):
        pieces = settled(load, "qwen3", 1, FROM - 1)
        assert sum(graphs.unfuse(piece, FROM - 1) for piece in pieces) == 2 * LAYERS
        assert counts(pieces, "all_reduce", "fused_add_rms_norm") == [2 * LAYERS + 1, 2 * LAYERS]
        fused = sum(graphs.fuse_sum_and_norm(piece, 1, FROM - 1, rules) for piece in pieces)
        assert fused == count(pieces, "all_reduce_norm") == with_norm
        for piece in pieces:
            piece.lint()


def sums_of_quantised_layers_take_the_norm(load: Load) -> None:
    (graph,) = load("int8", "model")
    before = str(graph)
    why = "no row-parallel layer of flux is followed by a plain fused_add_rms_norm"
    assert sequence.shard(graph, lambda *layer: SEQUENCE_FROM) == why
    assert str(graph) == before
    pieces = load("int8", "piece")
    fused = sum(graphs.fuse_sum_and_norm(piece, SEQUENCE_FROM, 512, ALWAYS) for piece in pieces)
    assert fused == count(pieces, "all_reduce_norm") == 2 * LAYERS


def the_graphs_call_operators_as_flux_does(load: Load) -> None:
    """Every call fits the parameters with which flux calls the operator."""
    called: set[str] = set()
    for graph in [*load("qwen3", "model"), *load("qwen3", "piece"), *load("vllms_experts", "model")]:
        for node in graph.nodes:
            name = str(getattr(node.target, "__name__", "")).partition(".")[0]
            if node.op == "call_function" and name in OPERATORS:
                signature(OPERATORS[name]).bind(*node.args, **node.kwargs)
                called.add(name)
    assert called == OPERATORS.keys()


def signature(names: list[str]) -> inspect.Signature:
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = {"variance_size": None}
    empty = inspect.Parameter.empty
    return inspect.Signature([inspect.Parameter(n, kind, default=defaults.get(n, empty)) for n in names])


CHECKS = by_name(
    dense_models_become_sequence_parallel,
    a_stage_gives_all_rows,
    layers_with_biases_in_each_range,
    experts_get_and_give_own_rows,
    sums_of_other_experts_give_own_rows,
    large_batches_stay_sequence_parallel,
    smaller_batches_are_sums_with_norm,
    the_smallest_batches_are_vllms,
    sums_of_quantised_layers_take_the_norm,
    the_graphs_call_operators_as_flux_does,
    fp8_models_become_sequence_parallel,
    fp8_layers_in_each_range,
)
answers = {version: Answers(partial(all_checks, version=version)) for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("check", CHECKS)
def test_saved_graphs(version: str, check: str) -> None:
    (told,) = answers[version].of(1, check)
    assert not told, told
