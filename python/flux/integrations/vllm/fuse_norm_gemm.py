"""Products behind a norm of flux, in graphs for few tokens: by flux, too. In CUDA graphs its kernels start
while the sum in front of them ends, and a gate is applied where its columns are (docs/design/vllm.md).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from flux.integrations.vllm.graph import value

# A weight with K columns has at least K / 8 rows. Those of routers have fewer, and were not measured.
_MOST_COLUMNS_OF_ROWS = 8
# Of twice as large a weight, what is loaded early is a small part, and cuBLAS is faster on some GPUs.
_MOST_BYTES = 224 << 20
_aten: Any = torch.ops.aten
_ours: Any = torch.ops.flux_vllm
_TRANSPOSED = (_aten.permute.default, _aten.t.default)
_CONVERTED: Any = torch.ops.prims.convert_element_type.default


def fuse_norm_gemm(graph: fx.Graph) -> tuple[int, int]:
    """Makes products of a norm of linear_all_reduce_norm with a weight, and the SwiGLU behind them,
    linear_behind_norm. Returns how many there were, and how many of them had a SwiGLU.
    """
    served = gated = 0
    for node in graph.find_nodes(op="call_function", target=_ours.linear_all_reduce_norm.default):
        norms = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        for product in [user for norm in norms for user in norm.users]:
            weight = _weight_of(product)
            if weight is None:
                continue
            end = _swiglu_of(product)
            replaced = end or product
            with graph.inserting_before(replaced):
                given = (product.args[0], weight, end is not None)
                ours = graph.call_function(_ours.linear_behind_norm.default, given)
                ours.meta["val"] = replaced.meta["val"]
            replaced.replace_all_uses_with(ours)
            served, gated = served + 1, gated + (end is not None)
    if served:
        graph.eliminate_dead_code()
    return served, gated


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
