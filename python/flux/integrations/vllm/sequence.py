"""Sequence parallelism in the graph of a whole model, before vLLM splits it at its attentions.

    linear_all_reduce                        linear_scatter (gemm_rs, residual)       own rows
    fused_add_rms_norm  ── residual   →      norm_gather_linear (norm, ag_gemm)       all rows
    linear

All of a model is rewritten, or nothing: what is sharded is known here, where every user of a residual is
seen. Anything that needs all rows of one gets them by a gather. In ranges of token counts in which the model
is not to be sequence parallel, unshard() turns each piece back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flux.integrations.vllm import rows  # noqa: F401  (defines the operators)
from flux.integrations.vllm.graph import call, norm_behind, norm_operators, value
from flux.ops.plan_ar import VECTOR

_ours: Any = torch.ops.flux_vllm
_aten: Any = torch.ops.aten
# A gather is a collective that no GEMM hides. With as many as this for each of them, sums are sharded.
_SUMS_PER_GATHER = 4
_NORMS = (_ours.norm_gather_linear.default, _ours.norm_gather.default)


@dataclass(frozen=True)
class Sharded:
    """What shard() did.

    Attributes:
        sums: how many row-parallel layers became linear_scatter; 0 if the graph is as it was.
        from_tokens: the smallest batch that is sequence parallel.
        why_not: why there are none.
    """

    sums: int
    from_tokens: int = 0
    why_not: str = ""


@dataclass
class _Sum:
    """A row-parallel layer and the norm behind it."""

    linear: fx.Node
    norm: fx.Node

    @property
    def residual(self) -> fx.Node:
        node = self.norm.args[1]
        assert isinstance(node, fx.Node)
        return node

    def users(self, output: int) -> dict[fx.Node, fx.Node]:
        """Users of an output of the norm, each with the node through which it has it."""
        parts = [part for part in self.norm.users if part.args[1] == output]
        return {user: part for part in parts for user in part.users}


def shard(graph: fx.Graph, begins: Callable[[int, int, torch.dtype, str], int | None]) -> Sharded:
    """Makes the graph of a model, as dynamo has traced it, sequence parallel.

    Args:
        begins: from how many tokens on a layer with a weight [n, k] of a dtype, whose results are summed over
            a group, is faster so, or None if it never is.
    """
    done = graph.find_nodes(op="call_function", target=_ours.linear_scatter.default)
    if done:  # a graph from vLLM's cache
        return Sharded(len(done), int(done[0].args[8]))
    if not _has_values(graph):
        return Sharded(0, why_not="its graph holds no example values")
    sums = _sums(graph)
    if not sums:
        return Sharded(0, why_not="no row-parallel layer of flux is followed by a plain fused_add_rms_norm")
    if len({each.linear.args[4:6] for each in sums}) > 1:
        return Sharded(0, why_not="its layers sum over different groups")
    starts = [begins(*_problem(each.linear)) for each in sums]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return Sharded(0, why_not="for some of its layers it is not faster, or would run unfused")
    gathers = _count_gathers(sums)
    if gathers * _SUMS_PER_GATHER > len(sums):
        return Sharded(0, why_not=f"its {len(sums)} sums would need {gathers} gathers")
    for each in sums:
        _rewrite(graph, each, max(known))
    _gather_for_others(graph)
    return Sharded(len(sums), max(known))


def _has_values(graph: fx.Graph) -> bool:
    """Whether the shapes of linear layers and of their arguments are known, as in graphs of dynamo."""
    targets = (_ours.linear_all_reduce.default, torch.nn.functional.linear)
    layers = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    nodes = {*layers, *(argument for node in layers for argument in node.all_input_nodes)}
    return all({"val", "example_value"} & node.meta.keys() for node in nodes)


def _problem(linear: fx.Node) -> tuple[int, int, torch.dtype, str]:
    weight = value(linear.args[1])
    n, k = weight.shape
    return int(n), int(k), weight.dtype, str(linear.args[4])


def _sums(graph: fx.Graph) -> list[_Sum]:
    targets = norm_operators()
    found = []
    for node in graph.find_nodes(op="call_function", target=_ours.linear_all_reduce.default):
        norm = norm_behind(node, targets)
        if norm is None:
            continue
        parts = all(part.target is operator.getitem for part in norm.users)
        if parts and value(node).dim() == 2 and value(node.args[0]).dim() == 2:
            found.append(_Sum(node, norm))
    return found


def _column_linear(each: _Sum) -> fx.Node | None:
    """The only user of the normalised rows, if that is a linear layer that flux.ag_gemm can run."""
    users = list(each.users(0))
    node = users[0] if len(users) == 1 else None
    if node is None or node.target is not torch.nn.functional.linear or node.kwargs or len(node.args) < 2:
        return None
    x, weight = node.args[:2]
    dtype = value(each.linear).dtype
    fits = isinstance(weight, fx.Node) and value(weight).dim() == 2 and value(weight).dtype == dtype
    whole_x = x in each.norm.users and weight is not x
    return node if fits and whole_x and value(weight).shape[0] % VECTOR == 0 else None


def _count_gathers(sums: list[_Sum]) -> int:
    norms = {each.norm for each in sums}
    of_norms = sum(bool(each.users(0)) and _column_linear(each) is None for each in sums)
    of_residuals = sum(
        any(user not in norms or user.args[1] is not via for user, via in each.users(1).items())
        for each in sums
    )
    return of_norms + of_residuals


def _rewrite(graph: fx.Graph, each: _Sum, from_tokens: int) -> None:
    """Replaces a layer and its norm, and the linear layer behind it if there is one."""
    norm_weight, eps = each.norm.args[2:4]
    group_name = each.linear.args[4]
    column = _column_linear(each)
    normed = [part for part in each.norm.users if part.args[1] == 0]
    with graph.inserting_before(each.norm):
        whole = each.residual.target is not _ours.linear_scatter.default
        target = _ours.linear_scatter.default
        total = graph.call_function(target, (*each.linear.args, each.residual, whole, from_tokens))
        total.meta["example_value"] = value(each.linear)
    if column is not None:
        weight, bias = (*column.args[1:], None)[:2]
        with graph.inserting_before(column):
            arguments = (total, norm_weight, eps, weight, bias, from_tokens, group_name)
            product = graph.call_function(_ours.norm_gather_linear.default, arguments)
        product.meta["example_value"] = value(column)
        column.replace_all_uses_with(product)
        graph.erase_node(column)
    elif any(part.users for part in normed):
        with graph.inserting_before(each.norm):
            rows_of_all = (total, norm_weight, eps, from_tokens, group_name)
            whole_norm = graph.call_function(_ours.norm_gather.default, rows_of_all)
        whole_norm.meta["example_value"] = value(each.linear)
        for part in normed:
            part.replace_all_uses_with(whole_norm)
    for part in list(each.norm.users):
        if part not in normed:
            part.replace_all_uses_with(total)
        graph.erase_node(part)
    graph.erase_node(each.norm)
    graph.erase_node(each.linear)


def _gather_for_others(graph: fx.Graph) -> None:
    """Gives all rows of a residual to users that do not know of shards."""
    reads_rows = {
        _ours.linear_scatter.default: 6,
        _ours.norm_gather_linear.default: 0,
        _ours.norm_gather.default: 0,
    }
    for total in graph.find_nodes(op="call_function", target=_ours.linear_scatter.default):
        others = []
        for user in total.users:
            at = reads_rows.get(user.target)
            if at is None or user.args[at] is not total or user.all_input_nodes.count(total) > 1:
                others.append(user)
        if others:
            group_name, from_tokens = total.args[4], total.args[8]
            with graph.inserting_after(total):
                rows_of_all = graph.call_function(_ours.gather.default, (total, from_tokens, group_name))
            rows_of_all.meta["example_value"] = value(total)
            for user in others:
                user.replace_input_with(total, rows_of_all)


def count_sharded(graph: fx.Graph) -> int:
    """How many row-parallel layers of a graph are sequence parallel."""
    return len(graph.find_nodes(op="call_function", target=_ours.linear_scatter.default))


def unshard(graph: fx.Graph, end: int | None = None) -> None:
    """Turns a piece back into linear_all_reduce, vLLM's fused_add_rms_norm and matrix products, in a range
    that ends at `end` tokens if sequence parallelism begins later; None: in any range.
    """

    def found(target: Any, from_tokens: int) -> list[fx.Node]:
        nodes = graph.find_nodes(op="call_function", target=target.default)
        return [node for node in nodes if end is None or end < node.args[from_tokens]]

    for node in found(_ours.linear_scatter, 8):
        _unshard_sum(graph, node)
    for node in [*found(_ours.norm_gather_linear, 5), *found(_ours.norm_gather, 3)]:
        _unshard_norm(graph, node)
    for node in found(_ours.gather, 1):
        _replace(graph, node, node.args[0])


def _unshard_sum(graph: fx.Graph, node: fx.Node) -> None:
    """The layer and the residual, with the norm of their sum if that is in the same piece."""
    residual = node.args[6]
    norms = [user for user in node.users if user.target in _NORMS]
    with graph.inserting_before(node):
        product = call(graph, _ours.linear_all_reduce.default, *node.args[:6])
        fused = norm_operators()[:1]
        # Placeholders come before everything else.
        early = len(norms) == 1 and getattr(norms[0].args[1], "op", "") == "placeholder"
        if not fused or not early:
            _replace(graph, node, call(graph, _aten.add.Tensor, product, residual))
            return
        pair = call(graph, fused[0], product, residual, *norms[0].args[1:3])
        normed, total = (call(graph, operator.getitem, pair, i) for i in (0, 1))
    with graph.inserting_before(norms[0]):
        _replace(graph, norms[0], _product(graph, norms[0], normed))
    _replace(graph, node, total)


def _unshard_norm(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        normed = call(graph, torch.ops.vllm_ir.rms_norm.default, *node.args[:3])
        _replace(graph, node, _product(graph, node, normed))


def _product(graph: fx.Graph, node: fx.Node, normed: fx.Node) -> fx.Node:
    """What a norm_gather_linear, or norm_gather, is of normalised rows."""
    if node.target is _ours.norm_gather.default:
        return normed
    weight, bias = node.args[3:5]
    transposed = call(graph, _aten.permute.default, weight, [1, 0])
    if bias is None:
        return call(graph, _aten.mm.default, normed, transposed)
    return call(graph, _aten.addmm.default, bias, normed, transposed)


def _replace(graph: fx.Graph, node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
