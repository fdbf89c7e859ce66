"""Transformations of flux's operators (op.py) in a graph that vLLM compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from flux.integrations.vllm import op  # noqa: F401  (defines the operators)
from flux.plan.sums import VECTOR

_ours: Any = torch.ops.flux_vllm
_aten: Any = torch.ops.aten
# Operators that may have a product of vLLM, and the argument with the first batch that needs none.
_WITH_PRODUCT = {
    "linear_all_reduce": "min_tokens",
    "linear_scatter": "from_tokens",
    "norm_gather_linear": "from_tokens",
}


def unfuse(graph: fx.Graph, end: int = 0) -> int:
    """Replaces linear_all_reduce, where flux begins after `end` tokens, by matmul, vLLM's all-reduce and the
    bias, which is what vLLM's passes know how to fuse. Returns how many were replaced.
    """
    nodes = [node for node in _matrix_calls(graph) if _begins(node, 3) > end]
    for node in nodes:
        x, weight, bias, _, _, vllm_group = node.args[:6]
        product = argument_of(node, "product")
        with graph.inserting_before(node):
            if product is not None:
                bias = None  # is in it
            else:
                transposed = call(graph, _aten.permute.default, weight, [1, 0])
                product = call(graph, _aten.mm.default, x, transposed)
            total = call(graph, torch.ops.vllm.all_reduce.default, product, vllm_group)
            if bias is not None:
                total = call(graph, _aten.add.Tensor, total, bias)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return len(nodes)


def fuse_norm(graph: fx.Graph, start: int) -> int:
    """Makes linear_all_reduce, where flux begins at `start` tokens or before, and vLLM's fused_add_rms_norm
    behind it one linear_all_reduce_norm, which adds the residual and normalises. Returns how many there were.
    """
    targets = norm_operators()
    count = 0
    for node in _matrix_calls(graph):
        norm = norm_behind(node, targets)
        if norm is None or _begins(node, 3) > start:
            continue
        x, weight, bias, _, group_name, _, *scaling = node.args
        residual, norm_weight, eps = norm.args[1:4]
        arguments = (x, weight, bias, residual, norm_weight, eps, group_name, *scaling[:2])
        _fuse(graph, node, norm, _ours.linear_all_reduce_norm.default, arguments)
        count += 1
    return count


def drop_products(graph: fx.Graph, start: int) -> None:
    """Takes vLLM's products from the calls of fp8 layers that flux runs from `start` tokens on or before, and
    what nothing else needs then out of the graph.
    """
    dropped = False
    for name, begins in _WITH_PRODUCT.items():
        if not hasattr(_ours, name):
            continue
        for node in graph.find_nodes(op="call_function", target=getattr(_ours, name).default):
            if argument_of(node, "product") is None or argument_of(node, begins) > start:
                continue
            node.update_arg(_place(node, "product"), None)
            dropped = True
    if dropped:
        graph.eliminate_dead_code()


def argument_of(node: fx.Node, name: str) -> Any:
    """An argument of a call of one of flux's operators."""
    place = _place(node, name)
    if place < len(node.args):
        return node.args[place]
    target: Any = node.target
    return target._schema.arguments[place].default_value


def _place(node: fx.Node, name: str) -> int:
    target: Any = node.target
    return [argument.name for argument in target._schema.arguments].index(name)


def count_kept(graph: fx.Graph) -> int:
    """How many layers are still flux's."""
    ours = (_ours.linear_all_reduce.default, _ours.linear_all_reduce_norm.default)
    return sum(len(graph.find_nodes(op="call_function", target=target)) for target in ours)


def norm_operators() -> list[Any]:
    """vLLM's fused_add_rms_norm, and how it is called before graphs are functional; none if it has none with
    the arguments that flux knows.
    """
    packet: Any = getattr(torch.ops.vllm_ir, "fused_add_rms_norm", None)
    found = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    names = ["x", "x_residual", "weight", "epsilon", "variance_size"]
    known = [each for each in found if [argument.name for argument in each._schema.arguments] == names]
    return sorted(known, key=lambda each: each is not packet.default)


@dataclass(frozen=True)
class SumRule:
    """Which sums over a group flux.all_reduce serves.

    Attributes:
        group_name: of torch's process group.
        from_tokens: the smallest batch.
        up_to_bytes: the largest sum.
    """

    group_name: str
    from_tokens: int
    up_to_bytes: int


def fuse_sum_and_norm(graph: fx.Graph, start: int, end: int, rules: Mapping[str, SumRule]) -> int:
    """Makes vLLM's all-reduce and the fused_add_rms_norm behind it one flux.all_reduce, where a rule serves
    all of `start` to `end` tokens. Returns how many there were.

    Args:
        rules: by vLLM's name of the group.
    """
    targets = norm_operators()
    if not targets:
        return 0
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.vllm.all_reduce.default):
        x, vllm_group = node.args
        norm, rule, value = norm_behind(node, targets), rules.get(vllm_group), x.meta["val"]
        if rule is None or norm is None:
            continue
        n = int(value.shape[-1])
        largest = end * n * value.dtype.itemsize
        if value.dim() != 2 or n % VECTOR or start < rule.from_tokens or largest > rule.up_to_bytes:
            continue
        residual, norm_weight, eps = norm.args[1:4]
        arguments = (x, residual, norm_weight, eps, rule.group_name)
        _fuse(graph, node, norm, torch.ops.flux.all_reduce_norm.default, arguments)
        count += 1
    return count


def settle_sums(graph: fx.Graph, start: int, end: int) -> int:
    """Replaces all_reduce_below by its argument, if flux sums for all of `start` to `end` tokens, or by
    vLLM's all-reduce, if it does for none. Returns how many were replaced.
    """
    found = graph.find_nodes(op="call_function", target=_ours.all_reduce_below.default)
    nodes = [node for node in found if not start < _begins(node, 1) <= end]
    for node in nodes:
        x, _, vllm_group = node.args
        if _begins(node, 1) > end:
            with graph.inserting_before(node):
                x = call(graph, torch.ops.vllm.all_reduce.default, x, vllm_group)
        node.replace_all_uses_with(x)
        graph.erase_node(node)
    return len(nodes)


def norm_behind(node: fx.Node, targets: Collection[Any]) -> fx.Node | None:
    """The plain norm, by one of the operators `targets`, that is the only user of a sum, or None."""
    (norm,) = node.users if len(node.users) == 1 else (None,)
    return norm if norm is not None and norm.target in targets and _is_plain_norm(norm, node) else None


def _fuse(graph: fx.Graph, node: fx.Node, norm: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Replaces a sum and the norm behind it by one call that returns what the norm does."""
    with graph.inserting_before(norm):
        fused = graph.call_function(target, arguments)
        fused.meta["val"] = norm.meta["val"]
    norm.replace_all_uses_with(fused)
    graph.erase_node(norm)
    graph.erase_node(node)


def _is_plain_norm(norm: fx.Node, x: fx.Node) -> bool:
    """Whether a norm has x first, a weight of x's type, and the variance of whole rows."""
    if norm.kwargs or len(norm.args) < 4 or norm.args[0] is not x or norm.args[1] is x:
        return False
    residual, weight = norm.args[1:3]
    if not isinstance(residual, fx.Node) or not isinstance(weight, fx.Node):
        return False
    if not value(x).dtype == value(residual).dtype == value(weight).dtype:
        return False
    return len(norm.args) == 4 or norm.args[4] is None


def _begins(node: fx.Node, argument: int) -> int:
    """From how many tokens on flux runs a call, which is one of its arguments."""
    tokens: Any = node.args[argument]
    return int(tokens)


def _matrix_calls(graph: fx.Graph) -> list[fx.Node]:
    """Calls of linear_all_reduce with a 2-D x, the only case in vLLM's patterns."""
    nodes = graph.find_nodes(op="call_function", target=_ours.linear_all_reduce.default)
    return [node for node in nodes if node.args[0].meta["val"].dim() == 2]


def value(node: Any) -> Any:
    """The fake result of a node, in graphs of dynamo and of later passes."""
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Inserts a call into the graph, with the fake result that later passes need."""
    node = graph.call_function(target, args)
    values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    mode = detect_fake_mode(values)
    with mode or contextlib.nullcontext():
        node.meta["val"] = target(*values)
    return node
