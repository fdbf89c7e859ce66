"""Weights that linear_all_reduce_norm fetches into the L2 while ranks wait for each other."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from flux.integrations.vllm.graph import argument_of, set_argument

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.flux_vllm
# Products, and the arguments with rows and columns.
_PRODUCTS = {_aten.mm.default: (0, 1), _aten.addmm.default: (1, 2)}
_TRANSPOSED = (_aten.permute.default, _aten.t.default)


def fetch_ahead(graph: fx.Graph) -> int:
    """Gives each linear_all_reduce_norm of 16-bit operands the weight that its norm is multiplied by first,
    if the graph has it. Returns how many got one.
    """
    count = 0
    for node in graph.find_nodes(op="call_function", target=_ours.linear_all_reduce_norm.default):
        weight = _multiplied_first(node)
        if weight is not None and argument_of(node, "scale_x") is None:
            set_argument(node, "ahead", weight)
            count += 1
    return count


def _multiplied_first(node: fx.Node) -> fx.Node | None:
    norms = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    products = [user for norm in norms for user in norm.users if user.target in _PRODUCTS]
    for product in sorted(products):
        rows, columns = (product.args[i] for i in _PRODUCTS[product.target])
        if rows in norms and isinstance(columns, fx.Node) and columns.target in _TRANSPOSED:
            weight = columns.args[0]
            if isinstance(weight, fx.Node) and weight.op in ("placeholder", "get_attr"):
                return weight
    return None
