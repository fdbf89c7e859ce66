"""One operator for a sum over ranks, its norm and the product behind it, in sequence-parallel pieces:

    linear_scatter (gemm_rs, residual)
    norm_gather_linear (norm, ag_gemm)   →   scatter_norm_gather

A call of an operator takes the host as long as a small kernel takes the GPU. A layer of a prompt of a
thousand tokens has little more work for the GPU than for the host.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from flux.integrations.vllm.graph import argument_of, call

_ours: Any = torch.ops.flux_vllm


def fuse_sum_norm_gemm(graph: fx.Graph, start: int) -> int:
    """Joins the pairs of a piece that are sequence parallel from `start` tokens on or before. Returns how
    many there were. Those with fp8 weights stay two operators.
    """
    count = 0
    for node in graph.find_nodes(op="call_function", target=_ours.linear_scatter.default):
        behind = _behind(node)
        if behind is None or argument_of(node, "from_tokens") > start:
            continue
        x, weight, bias, _, group_name = node.args[:5]
        _, norm_weight, eps, next_weight, next_bias = behind.args[:5]
        of_sum = (x, weight, bias, group_name, argument_of(node, "residual"), argument_of(node, "whole"))
        with graph.inserting_before(node):
            target = _ours.scatter_norm_gather.default
            pair = call(graph, target, *of_sum, norm_weight, eps, next_weight, next_bias)
            total, product = (call(graph, operator.getitem, pair, i) for i in (0, 1))
        for old, new in ((behind, product), (node, total)):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        count += 1
    return count


def _behind(node: fx.Node) -> fx.Node | None:
    """The norm_gather_linear of a linear_scatter, if both are of 16 bits, and what it needs besides is there
    before the sum: placeholders come before everything else.
    """
    target = _ours.norm_gather_linear.default
    found = [user for user in node.users if user.target is target and user.args[0] is node]
    if len(found) != 1 or argument_of(node, "scale_x") is not None:
        return None
    (behind,) = found
    others = [given for given in behind.args[1:5] if isinstance(given, fx.Node)]
    early = all(given.op == "placeholder" for given in others)
    return behind if early and argument_of(behind, "quant") is None else None
