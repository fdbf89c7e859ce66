"""Transformations of flux's operators (op.py, rows.py) in a graph that vLLM compiles."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from flux.integrations.vllm.rows import OURS_BEFORE, OURS_BEHIND  # defines the operators
from flux.plan.sums import VECTOR

_ours: Any = torch.ops.flux_vllm
_aten: Any = torch.ops.aten
_NORMS = (_ours.norm_gather_linear.default, _ours.norm_gather.default)
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
    nodes = [node for node in _matrix_calls(graph) if argument_of(node, "min_tokens") > end]
    for node in nodes:
        x, weight, bias, _, _, vllm_group = node.args[:6]
        product = argument_of(node, "product")
        if product is not None:
            bias = None  # is in it
        else:
            product = multiply(node, x, weight)
        total = call(node, torch.ops.vllm.all_reduce.default, product, vllm_group)
        replace(node, total if bias is None else call(node, _aten.add.Tensor, total, bias))
    return len(nodes)


def fuse_norm(graph: fx.Graph, start: int) -> int:
    """Makes linear_all_reduce, where flux begins at `start` tokens or before, and vLLM's fused_add_rms_norm
    behind it one linear_all_reduce_norm, which adds the residual and normalises. Returns how many there were.
    """
    targets = norm_operators()
    count = 0
    for node in _matrix_calls(graph):
        norm = norm_behind(node, targets)
        if norm is None or argument_of(node, "min_tokens") > start:
            continue
        x, weight, bias, _, group_name, _, *scaling = node.args
        arguments = (x, weight, bias, *norm.args[1:4], group_name, *scaling[:2])
        _fuse(node, norm, _ours.linear_all_reduce_norm.default, arguments)
        count += 1
    return count


def drop_products(graph: fx.Graph, start: int) -> None:
    """Takes vLLM's products from calls of fp8 layers that are flux's from `start` tokens on or before."""
    dropped = False
    for name, begins in _WITH_PRODUCT.items():
        for node in calls_of(graph, name):
            if argument_of(node, "product") is not None and argument_of(node, begins) <= start:
                node.update_arg(_place(node, "product"), None)
                dropped = True
    if dropped:
        graph.eliminate_dead_code()


def count_kept(graph: fx.Graph) -> int:
    """How many layers are still flux's."""
    return len(calls_of(graph, "linear_all_reduce", "linear_all_reduce_norm"))


def norm_operators() -> list[Any]:
    """vLLM's fused_add_rms_norm, functional first, if it has one with the arguments that flux knows."""
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
    count = 0
    for node in calls_of(graph, torch.ops.vllm.all_reduce.default) if targets else []:
        x, vllm_group = node.args
        norm, rule, shape = norm_behind(node, targets), rules.get(str(vllm_group)), value(x).shape
        if rule is None or norm is None or len(shape) != 2 or shape[1] % VECTOR:
            continue
        if start >= rule.from_tokens and end * int(shape[1]) * value(x).dtype.itemsize <= rule.up_to_bytes:
            arguments = (x, *norm.args[1:4], rule.group_name)
            _fuse(node, norm, torch.ops.flux.all_reduce_norm.default, arguments)
            count += 1
    return count


def settle_sums(graph: fx.Graph, start: int, end: int) -> int:
    """Replaces all_reduce_below where all of `start` to `end` tokens are summed by one; how many."""
    found = calls_of(graph, "all_reduce_below")
    nodes = [node for node in found if not start < argument_of(node, "min_tokens") <= end]
    for node in nodes:
        x, _, vllm_group = node.args
        if argument_of(node, "min_tokens") > end:
            x = call(node, torch.ops.vllm.all_reduce.default, x, vllm_group)
        replace(node, x)
    return len(nodes)


def unshard(graph: fx.Graph, end: int | None = None) -> None:
    """Turns a piece back into linear_all_reduce, vLLM's fused_add_rms_norm and matrix products, in a range
    that ends at `end` tokens if sequence parallelism begins later; None: in any range. Takes the marks of fp8
    layers out in any range.
    """
    for node in calls_of(graph, "scaled_linear"):
        replace(node, argument_of(node, "product"))

    def found(*names: str) -> list[fx.Node]:
        nodes = calls_of(graph, *names)
        return [node for node in nodes if end is None or end < argument_of(node, "from_tokens")]

    for node in found("norm_experts_scatter"):
        _take_experts_apart(node)
    for node in found("norm_gather_linear"):
        product = argument_of(node, "product")
        if product is not None:
            replace(node, product)
    for node in found("linear_scatter"):
        scales = [argument_of(node, name) for name in ("scale_x", "scale_w")]
        of_fp8 = (*scales, value(node).dtype, argument_of(node, "product")) if scales[0] is not None else ()
        _unshard_total(node, call(node, _ours.linear_all_reduce.default, *node.args[:6], *of_fp8))
    for node in found("sum_scatter"):
        x, min_tokens, _, vllm_group = node.args[:4]
        total = call(node, _ours.all_reduce_below.default, x, min_tokens, vllm_group)
        columns = value(node).shape[1]
        if value(total).shape[1] > columns:
            total = call(node, _aten.slice.Tensor, total, 1, 0, columns)
        _unshard_total(node, total)
    for node in found("norm_gather_linear", "norm_gather"):
        normed = call(node, torch.ops.vllm_ir.rms_norm.default, *node.args[:3])
        replace(node, _rows_or_product(node, normed))
    for node in found("gather"):
        replace(node, node.args[0])


def _take_experts_apart(node: fx.Node) -> None:
    """Makes of it a norm_gather, vLLM's experts and a sum_scatter."""
    residual, norm_weight, eps, gate, gate_bias = node.args[:OURS_BEFORE]
    min_tokens, from_tokens, *groups = node.args[-OURS_BEHIND:]
    vllms = torch.ops.vllm.moe_forward.default
    names = [argument.name for argument in vllms._schema.arguments]
    rows = (residual, norm_weight, eps, from_tokens, groups[0])
    normed = call(node, _ours.norm_gather.default, *rows)
    logits = normed if gate is None else multiply(node, normed, gate, gate_bias)
    given = (normed, logits, *node.args[OURS_BEFORE:-OURS_BEHIND])
    # As in graphs that have been made functional: vLLM's operator may overwrite its first argument.
    with node.graph.inserting_before(node):
        pair = node.graph.call_function(auto_functionalized, (vllms,), dict(zip(names, given, strict=True)))
    pair.meta["val"] = (value(node), value(node))
    partial = call(node, operator.getitem, pair, 0)
    scattered = (partial, min_tokens, *groups, residual, False, from_tokens)
    replace(node, call(node, _ours.sum_scatter.default, *scattered))


def _unshard_total(node: fx.Node, total: fx.Node) -> None:
    """A sum over ranks and the residual, with the norm of the two if that is in the same piece."""
    residual, fused = argument_of(node, "residual"), norm_operators()
    norms = [user for user in node.users if user.target in _NORMS]
    # Placeholders come before everything else.
    if not fused or len(norms) != 1 or getattr(norms[0].args[1], "op", "") != "placeholder":
        replace(node, call(node, _aten.add.Tensor, total, residual))
        return
    (norm,) = norms
    pair = call(node, fused[0], total, residual, *norm.args[1:3])
    normed, next_residual = (call(node, operator.getitem, pair, i) for i in (0, 1))
    replace(norm, _rows_or_product(norm, normed))
    replace(node, next_residual)


def _rows_or_product(node: fx.Node, normed: fx.Node) -> fx.Node:
    """What a norm_gather_linear, or norm_gather, is of normalised rows."""
    return normed if node.target is _ours.norm_gather.default else multiply(node, normed, *node.args[3:5])


def norm_behind(node: fx.Node, targets: Collection[Any]) -> fx.Node | None:
    """The plain norm, by one of the operators `targets`, that is the only user of a sum, or None."""
    (norm,) = node.users if len(node.users) == 1 else (None,)
    return norm if norm is not None and norm.target in targets and _is_plain_norm(norm, node) else None


def _fuse(node: fx.Node, norm: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Replaces a sum and the norm behind it by one call that returns what the norm does."""
    with node.graph.inserting_before(norm):
        fused = node.graph.call_function(target, arguments)
    fused.meta["val"] = norm.meta["val"]
    replace(norm, fused)
    node.graph.erase_node(node)


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


def _matrix_calls(graph: fx.Graph) -> list[fx.Node]:
    """Calls of linear_all_reduce with a 2-D x, the only case in vLLM's patterns."""
    return [node for node in calls_of(graph, "linear_all_reduce") if value(node.args[0]).dim() == 2]


def calls_of(graph: fx.Graph, *operators: Any) -> list[fx.Node]:
    """Calls of some operators. Those of flux go by name; where one is not defined, nothing calls it."""
    known = [each for each in operators if not isinstance(each, str) or hasattr(_ours, each)]
    targets = [getattr(_ours, each).default if isinstance(each, str) else each for each in known]
    return [node for each in targets for node in graph.find_nodes(op="call_function", target=each)]


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


def value(node: Any) -> Any:
    """The fake result of a node, in graphs of dynamo and of later passes."""
    return node.meta["val"] if "val" in node.meta else node.meta["example_value"]


def have_same_shape(one: Any, other: Any) -> bool:
    """Of results. Symbols are compared by name: a comparison of their values would add guards."""
    return [str(size) for size in one.shape] == [str(size) for size in other.shape]


def call(before: fx.Node, target: Any, *args: Any, **options: Any) -> fx.Node:
    """Inserts a call into the graph, with the fake result that later passes need."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, options)
    values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    with detect_fake_mode(values) or contextlib.nullcontext():
        node.meta["val"] = target(*values, **options)
    return node


def multiply(before: fx.Node, x: Any, weight: Any, bias: Any = None) -> fx.Node:
    """Inserts x · weightᵀ + bias, as vLLM's passes know it."""
    transposed = call(before, _aten.permute.default, weight, [1, 0])
    if bias is None:
        return call(before, _aten.mm.default, x, transposed)
    return call(before, _aten.addmm.default, bias, x, transposed)


def replace(node: fx.Node, by: Any) -> None:
    """Gives the users of a node another one, and erases it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
