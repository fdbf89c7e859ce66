"""Products behind a norm of flux (docs/design/vllm.md). In graphs for few tokens they are flux's, too. In
CUDA graphs its kernels start while the sum in front of them ends, and a gate is applied where its columns
are.

In sequence-parallel pieces, a sum over ranks, its norm and the product become one operator. A call of an
operator takes the host as long as a small kernel takes the GPU, and a layer of a prompt of a thousand tokens
has little more work for the GPU than for the host.

    linear_scatter (gemm_rs, residual)
    norm_gather_linear (norm, ag_gemm)   →   scatter_norm_gather

Column-parallel layers with fp8 weights mark in the traced graph what vLLM's quantisation of their rows gives
(fp8.py). Behind a norm of flux, its sum gives them quantised:

    linear_all_reduce_norm, flux's all_reduce_norm           linear_all_reduce_norm, all_reduce_quant
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
from flux.integrations.vllm.graph import argument_of, call, calls_of, have_same_shape, replace, value

# A weight with K columns has at least K / 8 rows. Those of routers have fewer, and were not measured.
_MOST_COLUMNS_OF_ROWS = 8
# Of twice as large a weight, what is loaded early is a small part, and cuBLAS is faster on some GPUs.
_MOST_BYTES = 224 << 20
_aten: Any = torch.ops.aten
_ours: Any = torch.ops.flux_vllm
_TRANSPOSED = (_aten.permute.default, _aten.t.default)
_CONVERTED: Any = torch.ops.prims.convert_element_type.default
_VIEWS = (_aten.view.default, _aten.reshape.default)
# Where vLLM's norm and its residual are among the results of flux's sums: without quantisation, and with it.
_PLACES = {0: 3, 1: 2}


def fuse_norm_gemm(graph: fx.Graph) -> tuple[int, int]:
    """Makes products of flux's norms, and SwiGLU behind them, one operator; how many, and with SwiGLU."""
    served = gated = 0
    for node in calls_of(graph, "linear_all_reduce_norm"):
        if argument_of(node, "quant") is not None:
            continue
        norms = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        for product in [user for norm in norms for user in norm.users]:
            weight = _weight_of(product)
            if weight is None:
                continue
            end = _swiglu_of(product)
            replaced = end or product
            ours = call(replaced, _ours.linear_behind_norm.default, product.args[0], weight, end is not None)
            replaced.replace_all_uses_with(ours)
            served, gated = served + 1, gated + (end is not None)
    if served:
        graph.eliminate_dead_code()
    return served, gated


def fuse_sum_norm_gemm(graph: fx.Graph, start: int) -> int:
    """Joins pairs of 16 bits that are sequence parallel from `start` tokens on or before; how many."""
    count = 0
    for node in calls_of(graph, "linear_scatter"):
        behind = _gather_of(node)
        if behind is None or argument_of(node, "from_tokens") > start:
            continue
        of_sum = (*node.args[:3], node.args[4], argument_of(node, "residual"), argument_of(node, "whole"))
        pair = call(node, _ours.scatter_norm_gather.default, *of_sum, *behind.args[1:5])
        total, product = (call(node, operator.getitem, pair, i) for i in (0, 1))
        replace(behind, product)
        replace(node, total)
        count += 1
    return count


def _gather_of(node: fx.Node) -> fx.Node | None:
    """The norm_gather_linear of a linear_scatter, if both are of 16 bits and its arguments come first."""
    target = _ours.norm_gather_linear.default
    found = [user for user in node.users if user.target is target and user.args[0] is node]
    if len(found) != 1 or argument_of(node, "scale_x") is not None:
        return None
    (behind,) = found
    # Placeholders come before everything else.
    early = all(given.op == "placeholder" for given in behind.args[1:5] if isinstance(given, fx.Node))
    return behind if early and argument_of(behind, "quant") is None else None


def fuse_quantisation(graph: fx.Graph) -> int:
    """Lets flux's sums with norm quantise the rows for the layer behind them. Returns how many do."""
    made = []
    for mark in calls_of(graph, "quantised_rows"):
        total, normed = _sum_before(mark)
        if total is not None and _fits(mark, normed) and (found := _fuse(mark, total)) is not None:
            made.append(found)
    if made:
        graph.eliminate_dead_code()  # vLLM's quantisation, and norms that only it read
    for node in made:
        if all(_place(part) != _PLACES[0] for part in node.users):  # nothing reads the norm
            node.update_arg(len(node.args) - 1, False)
            node.meta["val"] = node.meta["val"][:-1]
    return len(made)


def drop_marks(graph: fx.Graph) -> None:
    """Replaces marks by what vLLM's quantisation gives."""
    for mark in calls_of(graph, "quantised_rows"):
        _replace_mark(mark, *mark.args[:2])


def _weight_of(product: fx.Node) -> fx.Node | None:
    """The weight [N, K] of a product without bias, if it has the norm's type and is none of a router."""
    if product.target is not _aten.mm.default:
        return None
    rows, columns = product.args
    if not isinstance(columns, fx.Node) or columns.target not in _TRANSPOSED:
        return None
    weight = columns.args[0]
    if not isinstance(weight, fx.Node) or weight.op not in ("placeholder", "get_attr"):
        return None
    what = value(weight)
    n, k = what.shape
    fits = k <= _MOST_COLUMNS_OF_ROWS * n and n * k * what.dtype.itemsize <= _MOST_BYTES
    return weight if fits and what.dtype == value(rows).dtype and what.is_contiguous() else None


def _swiglu_of(product: fx.Node) -> fx.Node | None:
    """silu(first half of the columns) * second half, if nothing else uses a product."""
    columns = int(value(product).shape[1])
    halves = {user.args[2]: user for user in product.users if user.target is _aten.slice.Tensor}
    if len(product.users) != 2 or set(halves) != {0, columns // 2} or columns % 2:
        return None
    first, second = halves[0], halves[columns // 2]
    end: Any = second.args[3]
    if not (first.args[1] == second.args[1] == 1 and first.args[3] == columns // 2 and end >= columns):
        return None
    gate = _converted(first)
    users = {user.target: user for user in gate.users}
    if set(users) != {_aten.neg.default, _aten.div.Tensor}:
        return None
    quotient = users[_aten.div.Tensor]
    denominator = _only_user(_only_user(users[_aten.neg.default], _aten.exp.default), _aten.add.Tensor)
    if denominator is None or denominator.args[1] != 1 or quotient.args != (gate, denominator):
        return None
    silu = _converted(quotient)
    result = _only_user(silu, _aten.mul.Tensor)
    gates = result is not None and set(result.args) == {silu, second} and _only_user(second) is result
    return result if gates else None


def _converted(node: fx.Node) -> fx.Node:
    """The node in another type, if nothing else uses it."""
    return _only_user(node, _CONVERTED) or node


def _only_user(node: fx.Node | None, target: Any = None) -> fx.Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and target in (None, users[0].target) else None


def _sum_before(mark: fx.Node) -> tuple[fx.Node | None, Any]:
    """The sum of flux that gives the rows, if it does, and the rows."""
    rows = mark.args[2]
    while isinstance(rows, fx.Node) and rows.target in _VIEWS:
        if not have_same_shape(value(rows), value(rows.args[0])):
            break
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem or rows.args[1] != 0:
        return None, rows
    total: Any = rows.args[0]
    sums = (_ours.linear_all_reduce_norm.default, torch.ops.flux.all_reduce_norm.default)
    return (total if total.target in sums else None), rows


def _fits(mark: fx.Node, normed: fx.Node) -> bool:
    """Whether flux can give what the mark has."""
    q, quant, fixed = value(mark.args[0]), mark.args[3], mark.args[4]
    rows = value(normed)
    if rows.dim() != 2 or q.dtype != torch.float8_e4m3fn or not have_same_shape(rows, q):
        return False
    if quant == "group128" and int(rows.shape[1]) % BLOCK:
        return False
    # The sum comes before what else is computed; arguments of the graph are there already.
    return fixed is None or (isinstance(fixed, fx.Node) and fixed.op == "placeholder")


def _fuse(mark: fx.Node, total: fx.Node) -> fx.Node | None:
    """Replaces a sum and a mark behind it by one call, unless that gives scales in another layout."""
    target: Any = torch.ops.flux.all_reduce_quant.default
    arguments: tuple[Any, ...] = total.args
    if total.target is _ours.linear_all_reduce_norm.default:
        target, arguments = total.target, (*total.args, None, None)[:9]  # scales of fp8 operands, or none
    made = call(total, target, *arguments, *mark.args[3:6], True)
    q, scale = (call(total, operator.getitem, made, place) for place in (0, 1))
    scale_or_none = _in_layout(total, scale, mark)
    if scale_or_none is None:
        for node in (scale, q, made):
            total.graph.erase_node(node)
        return None
    for part in list(total.users):
        part.update_arg(0, made)
        part.update_arg(1, _PLACES[_place(part)])
    total.graph.erase_node(total)
    _replace_mark(mark, q, scale_or_none)
    return made


def _in_layout(before: fx.Node, scale: fx.Node, mark: fx.Node) -> Any:
    """The scales in memory as vLLM's GEMM gets them, or None."""
    if mark.args[4] is not None:
        return mark.args[1]  # one for all rows, which the layer has
    made, wanted = value(scale), value(mark.args[1])
    if made.dtype != wanted.dtype or not have_same_shape(made, wanted):
        return None
    if wanted.shape[1] == 1 or list(map(str, made.stride())) == list(map(str, wanted.stride())):
        return scale
    if wanted.stride(1) != 1:
        return None
    return call(before, _aten.clone.default, scale, memory_format=torch.contiguous_format)


def _replace_mark(mark: fx.Node, *by: Any) -> None:
    for part in list(mark.users):
        replace(part, by[_place(part)])
    mark.graph.erase_node(mark)


def _place(part: fx.Node) -> int:
    """Which of the results of a call a node is."""
    place: Any = part.args[1]
    return int(place)
