"""The way back from sequence parallelism (sequence.py), piece by piece, in ranges of token counts in which
the model is not to be so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from flux.integrations.vllm.expert_rows import OURS_BEFORE, OURS_BEHIND
from flux.integrations.vllm.graph import argument_of, call, norm_operators, value

_ours: Any = torch.ops.flux_vllm
_aten: Any = torch.ops.aten
_NORMS = (_ours.norm_gather_linear.default, _ours.norm_gather.default)


def unshard(graph: fx.Graph, end: int | None = None) -> None:
    """Turns a piece back into linear_all_reduce, vLLM's fused_add_rms_norm and matrix products, in a range
    that ends at `end` tokens if sequence parallelism begins later; None: in any range. Takes the marks of fp8
    layers out in any range.
    """
    for node in graph.find_nodes(op="call_function", target=_ours.scaled_linear.default):
        _replace(graph, node, argument_of(node, "product"))

    def found(name: str) -> list[fx.Node]:
        if not hasattr(_ours, name):
            return []
        nodes = graph.find_nodes(op="call_function", target=getattr(_ours, name).default)
        return [node for node in nodes if end is None or end < argument_of(node, "from_tokens")]

    for node in found("norm_experts_scatter"):
        _take_experts_apart(graph, node)
    for node in found("norm_gather_linear"):
        product = argument_of(node, "product")
        if product is not None:
            _replace(graph, node, product)
    for node in found("linear_scatter"):
        scales = [argument_of(node, name) for name in ("scale_x", "scale_w")]
        of_fp8 = (*scales, value(node).dtype, argument_of(node, "product")) if scales[0] is not None else ()
        with graph.inserting_before(node):
            total = call(graph, _ours.linear_all_reduce.default, *node.args[:6], *of_fp8)
        _unshard_total(graph, node, total)
    for node in found("sum_scatter"):
        x, min_tokens, _, vllm_group = node.args[:4]
        with graph.inserting_before(node):
            total = call(graph, _ours.all_reduce_below.default, x, min_tokens, vllm_group)
            columns = value(node).shape[1]
            if value(total).shape[1] > columns:
                total = call(graph, _aten.slice.Tensor, total, 1, 0, columns)
        _unshard_total(graph, node, total)
    for node in [*found("norm_gather_linear"), *found("norm_gather")]:
        _unshard_norm(graph, node)
    for node in found("gather"):
        _replace(graph, node, node.args[0])


def _take_experts_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Makes of it a norm_gather, vLLM's experts and a sum_scatter."""
    residual, norm_weight, eps, gate, gate_bias = node.args[:OURS_BEFORE]
    min_tokens, from_tokens, *groups = node.args[-OURS_BEHIND:]
    vllms = torch.ops.vllm.moe_forward.default
    names = [argument.name for argument in vllms._schema.arguments]
    with graph.inserting_before(node):
        rows = (residual, norm_weight, eps, from_tokens, groups[0])
        normed = call(graph, _ours.norm_gather.default, *rows)
        logits = normed if gate is None else _product(graph, normed, gate, gate_bias)
        given = (normed, logits, *node.args[OURS_BEFORE:-OURS_BEHIND])
        # As in graphs that have been made functional: vLLM's operator may overwrite its first argument.
        pair = graph.call_function(auto_functionalized, (vllms,), dict(zip(names, given, strict=True)))
        pair.meta["val"] = (value(node), value(node))
        partial = graph.call_function(operator.getitem, (pair, 0))
        partial.meta["val"] = value(node)
        scattered = (partial, min_tokens, *groups, residual, False, from_tokens)
        _replace(graph, node, call(graph, _ours.sum_scatter.default, *scattered))


def _unshard_total(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    """A sum over ranks and the residual, with the norm of the two if that is in the same piece."""
    residual = argument_of(node, "residual")
    norms = [user for user in node.users if user.target in _NORMS]
    with graph.inserting_before(node):
        fused = norm_operators()[:1]
        # Placeholders come before everything else.
        early = len(norms) == 1 and getattr(norms[0].args[1], "op", "") == "placeholder"
        if not fused or not early:
            _replace(graph, node, call(graph, _aten.add.Tensor, total, residual))
            return
        pair = call(graph, fused[0], total, residual, *norms[0].args[1:3])
        normed, next_residual = (call(graph, operator.getitem, pair, i) for i in (0, 1))
    with graph.inserting_before(norms[0]):
        _replace(graph, norms[0], _behind(graph, norms[0], normed))
    _replace(graph, node, next_residual)


def _unshard_norm(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        normed = call(graph, torch.ops.vllm_ir.rms_norm.default, *node.args[:3])
        _replace(graph, node, _behind(graph, node, normed))


def _behind(graph: fx.Graph, node: fx.Node, normed: fx.Node) -> fx.Node:
    """What a norm_gather_linear, or norm_gather, is of normalised rows."""
    return normed if node.target is _ours.norm_gather.default else _product(graph, normed, *node.args[3:5])


def _product(graph: fx.Graph, normed: fx.Node, weight: Any, bias: Any) -> fx.Node:
    transposed = call(graph, _aten.permute.default, weight, [1, 0])
    if bias is None:
        return call(graph, _aten.mm.default, normed, transposed)
    return call(graph, _aten.addmm.default, bias, normed, transposed)


def _replace(graph: fx.Graph, node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
