"""Rows that vLLM quantises behind a norm which flux computes: flux's sum gives them quantised.

Column-parallel layers with fp8 weights mark in the traced graph what vLLM's quantisation gives (fp8.py):

    linear_all_reduce_norm, flux's all_reduce_norm           linear_all_reduce_norm_quant, all_reduce_quant
    vLLM's quantisation                               →      (nothing)
    quantised_rows                                           (nothing)
    vLLM's GEMM                                              vLLM's GEMM

The pass takes all marks out of every graph; where flux does not compute the norm, vLLM's quantisation stays.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from flux.fp8.scales import BLOCK
from flux.integrations.vllm.graph import call, value

_ours: Any = torch.ops.flux_vllm
_aten: Any = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)
# Where vLLM's norm and its residual are among the results of flux's sums: without quantisation, and with it.
_PLACES = {0: 3, 1: 2}


def fuse_quantisation(graph: fx.Graph) -> int:
    """Lets flux's sums with norm quantise the rows for the layer behind them. Returns how many do."""
    count = 0
    for mark in graph.find_nodes(op="call_function", target=_ours.quantised_rows.default):
        total, normed = _sum_before(mark)
        if total is not None and _fits(mark, normed):
            count += _fuse(graph, mark, total)
    if count:
        # vLLM's quantisation, and norms that only it read.
        graph.eliminate_dead_code()
        for node in _quantising(graph):
            _leave_out_norm(node)
    return count


def drop_marks(graph: fx.Graph) -> None:
    """Replaces marks by what vLLM's quantisation gives."""
    for mark in graph.find_nodes(op="call_function", target=_ours.quantised_rows.default):
        _replace_mark(graph, mark, dict(enumerate(mark.args[:2])))


def _sum_before(mark: fx.Node) -> tuple[fx.Node | None, Any]:
    """The sum of flux that gives the rows, if it does, and the rows."""
    rows = mark.args[2]
    while isinstance(rows, fx.Node) and rows.target in _VIEWS and _same_shape(rows, rows.args[0]):
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem or rows.args[1] != 0:
        return None, rows
    total: Any = rows.args[0]
    sums = (_ours.linear_all_reduce_norm.default, torch.ops.flux.all_reduce_norm.default)
    return (total if total.target in sums else None), rows


def _same_shape(one: Any, other: Any) -> bool:
    # Symbols are compared by name: a comparison of their values would add guards.
    return isinstance(other, fx.Node) and _names(value(one).shape) == _names(value(other).shape)


def _names(sizes: Any) -> list[str]:
    return [str(size) for size in sizes]


def _fits(mark: fx.Node, normed: fx.Node) -> bool:
    """Whether flux can give what the mark has."""
    q, quant, fixed = mark.args[0], mark.args[3], mark.args[4]
    rows = value(normed)
    if rows.dim() != 2 or value(q).dtype != torch.float8_e4m3fn or not _same_shape(normed, q):
        return False
    if quant == "group128" and int(rows.shape[1]) % BLOCK:
        return False
    # The sum comes before what else is computed; arguments of the graph are there already.
    return fixed is None or (isinstance(fixed, fx.Node) and fixed.op == "placeholder")


def _fuse(graph: fx.Graph, mark: fx.Node, total: fx.Node) -> bool:
    """Replaces a sum and a mark behind it by one call, unless that gives scales in another layout."""
    how = (*mark.args[3:6], True)
    if total.target is _ours.linear_all_reduce_norm.default:
        scales = (*total.args[7:], None, None)[:2]
        target, arguments = _ours.linear_all_reduce_norm_quant.default, (*total.args[:7], *scales, *how)
    else:
        target, arguments = torch.ops.flux.all_reduce_quant.default, (*total.args, *how)
    with graph.inserting_before(total):
        made = call(graph, target, *arguments)
        q, scale, *_ = (call(graph, operator.getitem, made, place) for place in (0, 1))
        scale_or_none = _in_layout(graph, scale, mark)
    if scale_or_none is None:
        for node in (scale, q, made):
            graph.erase_node(node)
        return False
    for part in list(total.users):
        part.update_arg(0, made)
        part.update_arg(1, _PLACES[_place(part)])
    graph.erase_node(total)
    _replace_mark(graph, mark, {0: q, 1: scale_or_none})
    return True


def _in_layout(graph: fx.Graph, scale: fx.Node, mark: fx.Node) -> Any:
    """The scales in memory as vLLM's GEMM gets them, or None."""
    if mark.args[4] is not None:
        return mark.args[1]  # one for all rows, which the layer has
    made, wanted = value(scale), value(mark.args[1])
    if made.dtype != wanted.dtype or _names(made.shape) != _names(wanted.shape):
        return None
    if wanted.shape[1] == 1 or _names(made.stride()) == _names(wanted.stride()):
        return scale
    if wanted.stride(1) != 1:
        return None
    node = graph.call_function(_aten.clone.default, (scale,), {"memory_format": torch.contiguous_format})
    node.meta["val"] = made.clone(memory_format=torch.contiguous_format)
    return node


def _replace_mark(graph: fx.Graph, mark: fx.Node, by: dict[int, Any]) -> None:
    for part in list(mark.users):
        part.replace_all_uses_with(by[_place(part)])
        graph.erase_node(part)
    graph.erase_node(mark)


def _place(part: fx.Node) -> int:
    """Which of the results of a call a node is."""
    place: Any = part.args[1]
    return int(place)


def _quantising(graph: fx.Graph) -> list[fx.Node]:
    targets = (_ours.linear_all_reduce_norm_quant.default, torch.ops.flux.all_reduce_quant.default)
    return [node for each in targets for node in graph.find_nodes(op="call_function", target=each)]


def _leave_out_norm(node: fx.Node) -> None:
    """Lets a sum not write a norm that nothing reads."""
    if node.args[-1] and all(_place(part) != _PLACES[0] for part in node.users):
        node.update_arg(len(node.args) - 1, False)
        node.meta["val"] = node.meta["val"][:-1]
