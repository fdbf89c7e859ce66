"""fp8 linear layers in graphs of vLLM: what flux takes of them, the results, and what is left of vLLM's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import vllm_stand_in as stand_in
from cases import Answers, counted, run_scenarios
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import config as inductor
from torch.nn.functional import linear
from vllm_stand_in import define_all_reduce, define_norm, exact_norm, inputs, trace, vllms_operators  # noqa: F401  (a fixture)

from flux.fp8.scales import Scaling
from flux.integrations.vllm import graph as graphs
from flux.integrations.vllm import rows, sequence
from flux.integrations.vllm.behind_norm import drop_marks, fuse_quantisation
from flux.integrations.vllm.graph import unshard
from flux.integrations.vllm.op import linear_all_reduce

N, LAYERS, FROM, SEQUENCE_FROM = 256, 2, 3, 6
E4M3, FP32 = torch.float8_e4m3fn, torch.float32
ours, ir = torch.ops.flux_vllm, torch.ops.vllm_ir
# How x is quantised; all scales are powers of two, so that everything is exact.
QUANTS = ("tensor", "group128")


def weights(rank: int, quant: str) -> dict[str, torch.Tensor]:
    """Of each layer: its norms, the same on all ranks, and shards of linear layers with scales."""
    same, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(rank)
    made = {"static": torch.tensor(0.5)}
    for i in range(LAYERS):
        for name in ("qkv", "o", "up", "down"):
            made[f"{name}{i}"] = torch.randint(-2, 3, (N, N), generator=own).to(E4M3)
            shape = (2, 2) if quant.startswith("group128") else (N, 1) if name in ("o", "up") else ()
            made[f"{name}_scale{i}"] = 2.0 ** torch.randint(-2, 2, shape, generator=own).float()
        for name in ("norm1", "norm2", "bias"):
            made[f"{name}{i}"] = torch.randint(-1, 2, (N,), generator=same).float()
        made[f"qkv_bias{i}"] = torch.randint(-2, 3, (N,), generator=own).float()
    return made


def define_quantisation() -> Any:
    """In place of vLLM's kernel, which writes to its arguments."""
    torch_library: Any = torch.library
    library = torch_library.Library("vllm", "FRAGMENT")
    library.define("quantise_here(Tensor! q, Tensor x, Tensor scale) -> ()")

    def quantise(q: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
        q.copy_(x / scale)

    library.impl("quantise_here", quantise, "CPU")
    library.impl("quantise_here", lambda q, x, scale: None, "Meta")
    return library


@pytest.fixture(scope="module", autouse=True)
def operators(vllms_operators: None) -> Iterator[None]:  # noqa: F811
    library = define_quantisation()
    yield
    del library


def quantised(x: Any, w: dict[str, Any], quant: str) -> Any:
    """In place of vLLM's quantisation."""
    if quant == "written":
        q = torch.empty(x.shape, dtype=E4M3)
        torch.ops.vllm.quantise_here(q, x, w["static"])
        return q, w["static"]
    if quant == "tensor":
        return torch.ops.flux.quantize.default(x, quant, w["static"], False, E4M3)[0], w["static"]
    q, scale = torch.ops.flux.quantize.default(x, quant.split()[0], None, True, E4M3)
    return q, scale.contiguous() if quant == "group128 by rows" else scale


def spread(scale: Any, of_rows: int, of_columns: int) -> Any:
    return (
        scale if scale.numel() == 1 else scale.repeat_interleave(of_rows, 0).repeat_interleave(of_columns, 1)
    )


def product(q: Any, scale: Any, weight: Any, scale_w: Any, bias: Any = None) -> Any:
    """In place of vLLM's kernels."""
    by_block = scale_w.shape == (2, 2)
    values = q.to(FP32) * (spread(scale, 1, 128) if by_block else scale)
    return linear(values, weight.to(FP32) * (spread(scale_w, 128, 128) if by_block else scale_w), bias)


def model(x: Any, w: dict[str, Any], group: str, rank: int, quant: str, with_flux: bool = True) -> Any:
    """A transformer without attention, with fp8 layers, in vLLM's operators."""

    def column(x: Any, name: str, i: int, bias: Any = None) -> Any:
        weight, scale_w = w[f"{name}{i}"], w[f"{name}_scale{i}"]
        q, scale = quantised(x, w, quant)
        if not with_flux:
            return product(q, scale, weight, scale_w, bias)
        static = quant in ("tensor", "written")
        how = ("tensor" if static else quant.split()[0], w["static"] if static else None, not static)
        result = product(*ours.quantised_rows.default(q, scale, x, *how), weight, scale_w, bias)
        return ours.scaled_linear.default(result, x, weight, bias, scale_w, *how)

    def summed(x: Any, name: str, i: int) -> Any:
        weight, scale_w, bias = w[f"{name}{i}"], w[f"{name}_scale{i}"], w[f"bias{i}"]
        q, scale = quantised(x, w, quant)
        partial = product(*quantised(x, w, quant), weight, scale_w, None if rank else bias)
        if not with_flux:
            return torch.ops.vllm.all_reduce(partial, group_name="tp:0")
        how = (group, "tp:0", scale, scale_w, FP32, partial)
        return ours.linear_all_reduce.default(q, weight, bias, FROM, *how)

    hidden, residual = ir.rms_norm.default(x, w["norm10"], 1e-5, None), x
    for i in range(LAYERS):
        if i:
            hidden, residual = ir.fused_add_rms_norm.default(hidden, residual, w[f"norm1{i}"], 1e-5, None)
        attended = column(hidden, "qkv", i, w[f"qkv_bias{i}"]).remainder(5) - 2
        hidden, residual = ir.fused_add_rms_norm.default(
            summed(attended, "o", i), residual, w[f"norm2{i}"], 1e-5, None
        )
        hidden = summed(column(hidden, "up", i).relu().remainder(3) - 1, "down", i)
    return ir.fused_add_rms_norm.default(hidden, residual, w["norm10"], 1e-5, None)[:1]


@cache  # for whoever changes none of it: a trace takes seconds
def traced_once(group: str, rank: int, quant: str, with_flux: bool = True) -> fx.GraphModule:
    run = lambda x, w: model(x, w, group, rank, quant, with_flux)  # noqa: E731
    return trace(run, torch.zeros(9, N), weights(0, quant))


def traced(*what: Any) -> fx.GraphModule:
    return copy.deepcopy(traced_once(*what))


def begins(n: int, k: int, dtype: torch.dtype, group: str, scaling: Scaling | None) -> int:
    assert (n, k, dtype) == (N, N, E4M3)
    assert scaling is not None and scaling.out_dtype == FP32 and scaling.kind in ("row", "block")
    return SEQUENCE_FROM


def in_sequence(module: fx.GraphModule) -> fx.GraphModule:
    assert sequence.shard(module.graph, begins) == SEQUENCE_FROM
    module.graph.lint()
    module.recompile()
    return module


def computes_the_same(rank: int, world_size: int, quant: str) -> str:
    group, w, wrong = dist.group.WORLD.group_name, weights(rank, quant), []
    stock, layers = traced_once(group, rank, quant, False), traced_once(group, rank, quant)
    sharded = in_sequence(traced(group, rank, quant))
    for m in (1, FROM - 1, FROM, SEQUENCE_FROM - 1, SEQUENCE_FROM, 7, 8, 9, 13):
        x = torch.randint(-3, 4, (m, N), generator=torch.Generator().manual_seed(m)).float()
        (expected,) = stock(*inputs(stock.graph, x, w))
        for name, module in (("layers", layers), ("sharded", sharded)):
            with (
                mock.patch.object(rows, "row_norm", exact_norm),
                counted("gemm_ar", "gemm_rs", "ag_gemm") as (sums, scatters, gathers),
            ):
                (result,) = module(*inputs(module.graph, x, w))
            own = name == "sharded" and m >= SEQUENCE_FROM
            calls = [sums.call_count, scatters.call_count, gathers.call_count]
            fused = 2 * LAYERS if m >= FROM and not own else 0
            if calls != [fused, *((2 * LAYERS, 2 * LAYERS - 1) if own else (0, 0))]:
                wrong.append(f"{name}, {m} tokens: {calls} calls")
            if not torch.equal(result, expected):
                wrong.append(f"{name}, {m} tokens: {(result - expected).abs().max()} apart")
            for call in (*sums.call_args_list, *scatters.call_args_list, *gathers.call_args_list):
                if call.args[0].dtype != E4M3 or call.kwargs["out_dtype"] != FP32:
                    wrong.append(f"{name}, {m} tokens: {call.args[0].dtype}")
    return "; ".join(wrong)


@cache
def lowered_once(with_sequence: bool, group: str, rank: int, quant: str, with_flux: bool = True) -> fx.Graph:
    module = traced(group, rank, quant, with_flux)
    if with_sequence:
        in_sequence(module)
    values = inputs(module.graph, torch.zeros(9, N), weights(0, quant))
    if quant == "written":
        return functional(module, values)
    graph = stand_in.lowered(module, values)
    graph.eliminate_dead_code()
    return graph


def lowered(*what: Any, with_sequence: bool = False) -> fx.Graph:
    return copy.deepcopy(lowered_once(with_sequence, *what))


def functional(module: fx.GraphModule, values: list[Any]) -> fx.Graph:
    """As Inductor makes it: a kernel that writes to its arguments is one of `auto_functionalized`. vLLM turns
    off the second form of that.
    """
    found: list[fx.Graph] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        found.append(graph.graph)
        return graph.forward

    with torch.no_grad(), inductor.patch(enable_auto_functionalized_v2=False):
        aot_module_simplified(module, values, fw_compiler=keep)
    return found[0]


def kinds(graph: fx.Graph) -> list[str]:
    return sorted(str(node.target) for node in graph.nodes if node.op == "call_function")


def names(graph: fx.Graph) -> dict[str, int]:
    found = [node.target.__name__.partition(".")[0] for node in graph.nodes if node.op == "call_function"]
    of_interest = ("linear_", "norm_", "gather", "quanti", "mm", "addmm", "all_reduce", "scaled_linear")
    return {name: found.count(name) for name in sorted({*found}) if name.startswith(of_interest)}


@pytest.mark.parametrize("quant", [*QUANTS, "written"])
@pytest.mark.parametrize("with_sequence", [False, True])
def test_small_batches_are_vllms(quant: str, with_sequence: bool) -> None:
    """Below the first batch of flux, nothing of flux is left, and nothing of vLLM's is lost. With "written",
    neither is a quantisation whose result is what it has written to.
    """
    stock = lowered("7", 0, quant, False)
    graph = lowered("7", 0, quant, with_sequence=with_sequence)
    unshard(graph, FROM - 1)
    assert graphs.unfuse(graph, FROM - 1) == 2 * LAYERS
    graphs.drop_products(graph, 1)
    assert fuse_quantisation(graph) == 0
    drop_marks(graph)
    graph.eliminate_dead_code()
    graph.lint()
    assert kinds(graph) == kinds(stock)
    if quant == "written":
        # Each of vLLM's products reads what its own quantisation has written.
        written = graph.find_nodes(op="call_function", target=auto_functionalized)
        assert len(written) == 4 * LAYERS and all(node.users for node in written)


def with_norms(group: str, rank: int, quant: str, sums: str) -> fx.Graph:
    """The graph in a range that is not sequence parallel, in which norms are flux's."""
    graph = lowered(group, rank, quant)
    unshard(graph)
    if sums == "other sums":
        assert graphs.unfuse(graph, FROM - 1) == 2 * LAYERS
        assert (
            graphs.fuse_sum_and_norm(graph, 1, 512, {"tp:0": graphs.SumRule(group, 1, 1 << 30)}) == 2 * LAYERS
        )
    else:
        graphs.drop_products(graph, 512)
        assert graphs.fuse_norm(graph, 512) == 2 * LAYERS
    return graph


ENDS = ["tensor", "row", "group128", "group128 by rows", "written"]
SUMS = ["layers", "other sums"]


def quantises(rank: int, world_size: int, sums: str, quant: str) -> str:
    """Sums that give quantised rows give the bits that vLLM's quantisation would."""
    group, wrong = dist.group.WORLD.group_name, []
    module = traced_once(group, rank, quant)
    stock, fused = (with_norms(group, rank, quant, sums) for _ in range(2))
    drop_marks(stock)
    # Behind the last sum is the head.
    if fuse_quantisation(fused) != 2 * LAYERS - 1:
        wrong.append("not all are quantised")
    drop_marks(fused)
    fused.lint()
    of_sums = torch.ops.flux.all_reduce_quant.default if sums == "other sums" else "linear_all_reduce_norm"
    made = [node for node in graphs.calls_of(fused, of_sums) if isinstance(node.args[-1], bool)]
    if len(made) != 2 * LAYERS - 1 or "quantised_rows" in names(fused):
        wrong.append(str(names(fused)))
    # Of vLLM's quantisations there are those in front of row-parallel layers, and of the embedding.
    by = "auto_functionalized" if quant == "written" else "quantize"
    if sum(kind.startswith((by, f"flux.{by}")) for kind in kinds(fused)) != 2 * LAYERS + 1:
        wrong.append(str(kinds(fused)))
    x = torch.randn(9, N, generator=torch.Generator().manual_seed(1))
    values = inputs(module.graph, x, weights(rank, quant))
    tensors = [value for value in values if quant == "written" or isinstance(value, torch.Tensor)]
    results = [fx.GraphModule(module, graph)(*tensors) for graph in (stock, fused)]
    if not torch.equal(*(result[0] for result in results)):
        wrong.append("results differ")
    return "; ".join(wrong)


@pytest.mark.parametrize("case", ["another reader", "another layout", "another type"])
def test_what_flux_does_not_give(case: str) -> None:
    graph = with_norms("7", 0, "group128", "layers")
    mark = graph.find_nodes(op="call_function", target=ours.quantised_rows.default)[1]
    if case == "another reader":
        with graph.inserting_after(mark):
            other = graph.call_function(torch.ops.aten.neg.default, (mark.args[2],))
        graph.output_node().args = ((graph.output_node().args[0], other),)
    elif case == "another layout":
        with mark.args[1].meta["val"].fake_mode:
            mark.args[1].meta["val"] = torch.empty_strided((9, 2), (1, 32))
    else:
        with mark.args[0].meta["val"].fake_mode:
            mark.args[0].meta["val"] = torch.empty(9, N, dtype=torch.int8)
    assert fuse_quantisation(graph) == 2 * LAYERS - 1 - (case != "another reader")
    drop_marks(graph)
    graph.lint()
    nodes = [n for n in graphs.calls_of(graph, "linear_all_reduce_norm") if isinstance(n.args[-1], bool)]
    with_norm = [node for node in nodes if node.args[-1]]
    assert len(with_norm) == (case == "another reader")
    assert all(len(node.meta["val"]) == 3 + node.args[-1] for node in nodes)


def test_rows_that_others_read_are_gathered() -> None:
    """What vLLM makes of the rows is also for someone else: the layer's rows are not gathered in fp8."""
    module = traced("7", 0, "tensor")
    mark = module.graph.find_nodes(op="call_function", target=ours.scaled_linear.default)[1]
    with module.graph.inserting_before(module.graph.output_node()):
        other = module.graph.call_function(torch.neg, (mark.args[0],))
    other.meta["example_value"] = graphs.value(mark)
    (results,) = module.graph.output_node().args
    module.graph.output_node().args = ((*results, other),)
    assert sequence.shard(module.graph, begins) == SEQUENCE_FROM
    assert sequence.count_sharded(module.graph)["linear layers"] == 2 * LAYERS
    found = module.graph.find_nodes(op="call_function", target=ours.norm_gather_linear.default)
    assert len(found) == 2 * LAYERS - 2


def without_a_product(rank: int, world_size: int) -> None:
    """Operators without vLLM's product are flux's for any number of rows; opcheck."""
    group, w = dist.group.WORLD.group_name, weights(rank, "tensor")
    q, scale = quantised(torch.ones(4, N), w, "tensor")
    arguments = (q, w["o0"], w["bias0"], 100, group, "tp:0", scale, w["o_scale0"], FP32)
    expected = product(q, scale, w["o0"], w["o_scale0"])
    dist.all_reduce(expected)
    assert torch.equal(linear_all_reduce(*arguments), expected + w["bias0"])
    # Own rows of a number that the ranks do not divide, with a scale for each.
    q, scale = torch.ones(5, N).to(E4M3), torch.tensor([[1.0], [2.0], [0.5], [4.0], [8.0]])
    residual = torch.arange(5.0)[:, None].expand(5, N).contiguous()
    where = (1, group, "tp:0", residual, True, 1)
    own = rows.linear_scatter(q, w["o0"], w["bias0"], *where, scale, w["o_scale0"])
    whole = product(q, scale, w["o0"], w["o_scale0"])
    dist.all_reduce(whole)
    mine = (whole + w["bias0"] + residual)[3 * rank :][:3]
    assert torch.equal(own[: len(mine)], mine)
    mark = (expected, expected, w["o0"], None, w["o_scale0"], "tensor", scale, False)
    # The check of schemas multiplies inputs, which torch cannot with fp8.
    for operator, given in ((ours.linear_all_reduce.default, arguments), (ours.scaled_linear.default, mark)):
        torch.library.opcheck(operator, given, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


SCENARIOS: dict[str, Any] = {
    **{f"computes, {q}": partial(computes_the_same, quant=q) for q in (*QUANTS, "written")},
    **{f"{s} quantise, {q}": partial(quantises, sums=s, quant=q) for q in ENDS for s in SUMS},
    "without a product": without_a_product,
}
libraries: list[Any] = []  # as long as a rank lives


def define_operators() -> None:
    libraries.extend([define_all_reduce(), define_norm(), define_quantisation()])


answers = Answers(partial(run_scenarios, SCENARIOS, prepare=define_operators), timeout_s=400)


@pytest.mark.parametrize("name", SCENARIOS)
def test_between_ranks(name: str) -> None:
    told = answers.of(2, name)
    assert told == [""] * 2, "\n".join(told)
