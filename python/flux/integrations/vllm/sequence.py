"""Sequence parallelism in the graph of a whole model, before vLLM splits it at its attentions.

    linear_all_reduce                        linear_scatter (gemm_rs, residual)       own rows
    fused_add_rms_norm  ── residual   →      norm_gather_linear (norm, ag_gemm)       all rows
    linear

Experts that flux sums take own rows, and give them:

    fused_add_rms_norm  ── residual
    moe_forward                       →      norm_experts_scatter                     own rows
    all_reduce_below

Other sums over ranks become sum_scatter. All of a model is rewritten, or nothing: what is sharded is known
here, where every user of a residual is seen. Anything that needs all rows of one gets them by a gather. In
ranges of token counts in which the model is not to be sequence parallel, graph.unshard turns each piece back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flux.fp8.scales import Scaling
from flux.integrations.vllm.graph import (
    argument_of,
    calls_of,
    have_same_shape,
    norm_behind,
    norm_operators,
    replace,
    value,
)
from flux.integrations.vllm.op import scaling_of
from flux.integrations.vllm.report import NEVER
from flux.integrations.vllm.rows import MADE
from flux.plan.sums import VECTOR

_ours: Any = torch.ops.flux_vllm
# Sums that lose, because they need two gathers that no GEMM hides, for each that wins, because it needs none.
_WINS_PER_LOSS = 4
# The operators that give own rows, by what they are called in the log.
LINEAR = "linear layers"
SCATTERS = {LINEAR: "linear_scatter", "other sums": "sum_scatter", "MoE layers": "norm_experts_scatter"}
# With these, those that take a sharded residual.
_GATHERS = ("norm_gather_linear", "norm_gather", "gather")


@dataclass
class _Experts:
    """Experts that flux computes of own rows.

    Attributes:
        call: of vLLM's moe_forward.
        rest: what it gets but hidden states and router logits.
        gate: weight and bias of the linear layer that chooses them, or nothing if vLLM's runner has it.
        between: the gate, and views between the call and the normalised rows.
        rows: the normalised rows.
        norm: their norm's weight and eps.
    """

    call: fx.Node
    rest: tuple[Any, ...]
    gate: tuple[Any, Any]
    between: list[fx.Node]
    rows: fx.Node
    norm: tuple[Any, ...] = ()

    def sizes(self) -> dict[fx.Node, fx.Node]:
        """Nodes that only ask for the shape of the rows, each with the node that it asks."""
        asked = (self.rows, *(node for node in self.between if node.op == "call_method"))
        return {user: node for node in asked for user in node.users if user.target == "size"}


@dataclass
class _Sum:
    """A sum over ranks and the norm behind it.

    Attributes:
        node: linear_all_reduce, all_reduce_below or vLLM's all_reduce.
        views: of it in the same shape, or of its first columns, of which the norm takes the last.
        experts: what is summed, if flux can do that with own rows.
        feeds: the sum of the experts that are the only users of the norm.
    """

    node: fx.Node
    views: list[fx.Node]
    norm: fx.Node
    experts: _Experts | None = None
    feeds: _Sum | None = None

    @property
    def residual(self) -> fx.Node:
        node = self.norm.args[1]
        assert isinstance(node, fx.Node)
        return node

    @property
    def is_linear(self) -> bool:
        return self.node.target is _ours.linear_all_reduce.default

    @property
    def is_below(self) -> bool:
        return self.node.target is _ours.all_reduce_below.default

    @property
    def vllm_group(self) -> str:
        """vLLM's name of the group, in all but linear layers the last argument."""
        if self.is_linear:
            return str(argument_of(self.node, "vllm_group"))
        return str([*self.node.args, *self.node.kwargs.values()][-1])

    def parts(self, output: int) -> list[fx.Node]:
        """Nodes of an output of the norm."""
        return [part for part in self.norm.users if part.args[1] == output]

    def users(self, output: int) -> dict[fx.Node, fx.Node]:
        """Users of an output, each with the node through which it has it."""
        return {user: part for part in self.parts(output) for user in part.users}


def shard(
    graph: fx.Graph, begins: Callable[[int, int, torch.dtype, str, Scaling | None], int | None]
) -> int | str:
    """Makes the graph of a model, as dynamo has traced it, sequence parallel. Returns from how many tokens on
    it is, or why it is as it was.

    Args:
        begins: from how many tokens on a layer with a weight [n, k] of a dtype, whose results are summed over
            a group, and which may have scales, is faster so, or None if it never is.
    """
    done = calls_of(graph, *SCATTERS.values())
    if done:  # a graph from vLLM's cache
        return int(argument_of(done[0], "from_tokens"))
    if not _has_values(graph):
        return "its graph holds no example values"
    sums = _sums(graph)
    linears = [each for each in sums if each.is_linear]
    if not linears:
        return "no row-parallel layer of flux is followed by a plain fused_add_rms_norm"
    if len({each.vllm_group for each in sums}) > 1:
        return "its layers sum over different groups"
    starts = [begins(*_problem(each.node)) for each in linears]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return "for some of its layers it is not faster, or would run unfused"
    _find_experts(sums)
    gathers = [_count_gathers(each, sums) for each in sums]
    wins, losses = gathers.count(0), gathers.count(2)
    if losses * _WINS_PER_LOSS > wins or not wins:
        return f"its {len(sums)} sums would need {sum(gathers)} gathers"
    rewriting = _Rewriting(graph, max(known), str(linears[0].node.args[4]), sums[0].vllm_group)
    for each in sums:
        rewriting.rewrite(each)
    rewriting.gather_for_others()
    return max(known)


def count_sharded(graph: fx.Graph) -> dict[str, int]:
    """How many sums over ranks of a graph give own rows, by kinds."""
    return {kind: len(calls_of(graph, name)) for kind, name in SCATTERS.items()}


def _has_values(graph: fx.Graph) -> bool:
    """Whether shapes of sums, linear layers and what is around them are known, as in graphs of dynamo."""
    layers = calls_of(graph, *_sum_targets(), torch.nn.functional.linear)
    nodes = {*layers, *(near for node in layers for near in (*node.all_input_nodes, *node.users))}
    return all({"val", "example_value"} & node.meta.keys() for node in nodes if node.op != "output")


def _sum_targets() -> tuple[Any, ...]:
    """The operators that sum over ranks, flux's first."""
    vllms = torch.ops.vllm.all_reduce
    return (_ours.linear_all_reduce.default, _ours.all_reduce_below.default, vllms, vllms.default)


def _problem(node: fx.Node) -> tuple[int, int, torch.dtype, str, Scaling | None]:
    weight, scale_x = value(node.args[1]), argument_of(node, "scale_x")
    n, k = map(int, weight.shape)
    scaling = None if scale_x is None else scaling_of(value(scale_x), k, value(node).dtype)
    return n, k, weight.dtype, str(node.args[4]), scaling


def _sums(graph: fx.Graph) -> list[_Sum]:
    """Sums over ranks with a plain norm behind them, in the graph's order."""
    targets, kinds = norm_operators(), _sum_targets()
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in kinds or value(node).dim() != 2:
            continue
        views: list[fx.Node] = []
        while len(users := (views or [node])[-1].users) == 1:
            (user,) = users
            if not _is_same(user) and (node.target is kinds[0] or not _is_cut(user)):
                break
            views.append(user)
        norm = norm_behind((views or [node])[-1], targets)
        if norm is None or not all(part.target is operator.getitem for part in norm.users):
            continue
        if node.target is not kinds[0] or value(node.args[0]).dim() == 2:
            found.append(_Sum(node, views, norm))
    return found


def _is_same(node: fx.Node) -> bool:
    """Whether a node is its argument in the same shape, as models write it that allow for other shapes."""
    is_view = node.op == "call_method" and node.target in ("view", "reshape", "squeeze")
    return is_view and have_same_shape(value(node), value(node.args[0]))


def _is_cut(node: fx.Node) -> bool:
    """Whether a node is the first columns of its argument."""
    at: Any = node.args[1] if node.target is operator.getitem else None
    if not isinstance(at, tuple) or len(at) != 2 or at[0] not in (..., slice(None)):
        return False
    return isinstance(at[1], slice) and not at[1].start and at[1].step in (None, 1)


def _seen_through(node: Any, passed: list[fx.Node]) -> Any:
    """What a node is another view of; adds the views to `passed`."""
    while isinstance(node, fx.Node) and _is_same(node):
        passed.append(node)
        node = node.args[0]
    return node


def _find_experts(sums: list[_Sum]) -> None:
    """Finds experts that flux sums, with nothing but a norm, views and a gate between them and a sum."""
    by_rows = {part: each for each in sums for part in each.parts(0)}
    for each in sums:
        experts = _experts_of(each) if each.is_below else None
        producer = None if experts is None else by_rows.get(experts.rows)
        if experts is None or producer is None or len(producer.parts(0)) != 1:
            continue
        known = {*experts.between, experts.call, *experts.sizes()}
        alone = all(user in known for node in (experts.rows, *experts.between) for user in node.users)
        if alone and each.residual in producer.parts(1) and all(_is_same(view) for view in each.views):
            experts.norm = producer.norm.args[2:4]
            each.experts, producer.feeds = experts, each


def _experts_of(each: _Sum) -> _Experts | None:
    """The experts whose results are summed, if flux can call them with own rows."""
    found, vllms = each.node.args[0], torch.ops.vllm.moe_forward
    if not isinstance(found, fx.Node) or found.target not in (vllms, vllms.default) or len(found.users) > 1:
        return None
    (hidden, logits), rest = found.args[:MADE], found.args[MADE:]
    # Other inputs have all rows. What is not None is a name, or 0: nothing is cut off.
    others = [argument for argument in rest if argument is not None and argument != 0]
    if found.kwargs or len(others) != 1 or not hasattr(_ours, "norm_experts_scatter"):
        return None
    between: list[fx.Node] = []
    gate: tuple[Any, Any] = (None, None)
    x, chosen_by = (_seen_through(node, between) for node in (hidden, logits))
    if chosen_by is not x and _is_linear(chosen_by):
        between.append(chosen_by)
        gate = (*chosen_by.args[1:], None)[:2]
        chosen_by = _seen_through(chosen_by.args[0], between)
    return _Experts(found, rest, gate, between, x) if chosen_by is x and isinstance(x, fx.Node) else None


def _is_linear(node: Any) -> bool:
    """A linear layer with a weight that another node gives, and perhaps a bias."""
    if not isinstance(node, fx.Node) or node.target is not torch.nn.functional.linear or node.kwargs:
        return False
    return len(node.args) >= 2 and isinstance(node.args[1], fx.Node) and value(node.args[1]).dim() == 2


def _column_linear(each: _Sum) -> fx.Node | None:
    """The only user of the normalised rows, if that is a linear layer that flux.ag_gemm can run: torch's, or
    the mark of one with fp8 weights, behind what vLLM makes of the rows.
    """
    users = list(each.users(0))
    marks = [user for user in users if user.target is _ours.scaled_linear.default]
    if marks:
        return marks[0] if len(marks) == 1 and _is_all_for(users, marks[0]) else None
    if len(users) != 1 or not _is_linear(users[0]):
        return None
    x, weight = users[0].args[:2]
    fits = weight is not x and value(weight).dtype == value(each.node).dtype
    return users[0] if fits and x in each.norm.users and value(weight).shape[0] % VECTOR == 0 else None


def _is_all_for(nodes: list[fx.Node], mark: fx.Node) -> bool:
    """Whether nothing but a mark needs what is computed of some nodes; sizes may be asked by others."""
    open_nodes, seen = list(nodes), {mark}
    while open_nodes:
        node = open_nodes.pop()
        if node in seen or node.target == "size":
            continue
        seen.add(node)
        of_written = (user for given in _written(node) for user in given.users if user is not node)
        readers = [*node.users, *of_written]
        if node.op == "output" or not readers or node.target in _sum_targets():
            return False
        open_nodes += readers
    return True


def _written(node: fx.Node) -> list[fx.Node]:
    """Arguments to which an operator writes its results, as kernels of vLLM do."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads: Any = target.overloads
        target = getattr(target, overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        return []
    named = zip(target._schema.arguments, node.args, strict=False)
    given = [*((each.name, value) for each, value in named), *node.kwargs.items()]
    writes = {each.name for each in target._schema.arguments if each.is_write}
    return [value for name, value in given if name in writes and isinstance(value, fx.Node)]


def _count_gathers(each: _Sum, sums: list[_Sum]) -> int:
    """How many gathers a sum would need that no GEMM hides: of normalised rows, and of the residual."""
    norms = {other.norm for other in sums}
    of_norm = bool(each.users(0)) and each.feeds is None and _column_linear(each) is None
    others = each.users(1).items()
    of_residual = any(user not in norms or user.args[1] is not via for user, via in others)
    return of_norm + of_residual


@dataclass
class _Rewriting:
    """What all sums of a graph have in common."""

    graph: fx.Graph
    from_tokens: int
    group_name: str
    vllm_group: str

    def rewrite(self, each: _Sum) -> None:
        """Replaces a sum and its norm, and the linear layer behind it if there is one."""
        norm, where = each.norm.args[2:4], (self.from_tokens, self.group_name)
        column = None if each.feeds else _column_linear(each)
        like = value(each.residual)
        total = self._insert(each.norm, *self._total(each), like)
        if each.feeds:
            self._cut_off(each.feeds, total)
        elif column is not None:
            weight, bias = (*column.args[1:], None)[:2]
            of_fp8: tuple[Any, ...] = ()
            if column.target is _ours.scaled_linear.default:
                product, _, weight, bias, *scaling = column.args
                of_fp8 = (*scaling, product)
                # vLLM's product needs all rows, in batches that are not sequence parallel.
                for user, part in each.users(0).items():
                    if user.target == "size":
                        user.replace_input_with(part, total)
                self._gather(each, (total, *norm, *where))
            arguments = (total, *norm, weight, bias, *where, *of_fp8)
            target = _ours.norm_gather_linear.default
            replace(column, self._insert(column, target, arguments, value(column)))
        elif each.users(0):
            self._gather(each, (total, *norm, *where))
        for part in each.parts(1):
            part.replace_all_uses_with(total)
        self._erase({*each.norm.users, each.norm, *each.views, each.node})

    def _total(self, each: _Sum) -> tuple[Any, tuple[Any, ...]]:
        """The operator that gives the sum with the residual as own rows, and its arguments."""
        where = (self.group_name, self.vllm_group)
        if each.experts is not None:
            experts, begins = each.experts, (each.node.args[1], self.from_tokens)
            arguments = (each.residual, *experts.norm, *experts.gate, *experts.rest, *begins, *where)
            return _ours.norm_experts_scatter.default, arguments
        is_whole = each.residual not in calls_of(self.graph, *SCATTERS.values())
        residual = (each.residual, is_whole, self.from_tokens)
        if each.is_linear:
            of_fp8 = (argument_of(each.node, name) for name in ("scale_x", "scale_w", "product"))
            return _ours.linear_scatter.default, (*each.node.args[:6], *residual, *of_fp8)
        min_tokens = each.node.args[1] if each.is_below else NEVER
        return _ours.sum_scatter.default, (each.node.args[0], min_tokens, *where, *residual)

    def _gather(self, each: _Sum, arguments: tuple[Any, ...]) -> None:
        """Gives all rows, normalised, to the users of a norm."""
        rows_of_all = self._insert(each.norm, _ours.norm_gather.default, arguments, value(each.residual))
        for part in each.parts(0):
            part.replace_all_uses_with(rows_of_all)

    def _cut_off(self, each: _Sum, residual: fx.Node) -> None:
        """Erases experts and what is before them, which one operator takes the place of."""
        assert each.experts is not None
        for size, asked in each.experts.sizes().items():
            size.replace_input_with(asked, residual)
        each.node.update_arg(0, None)
        self._erase({each.experts.call, *each.experts.between})

    def _insert(self, before: fx.Node, target: Any, arguments: tuple[Any, ...], like: Any) -> fx.Node:
        # A piece of the split graph calls its inputs by these names, and its own operators by theirs, with a
        # number if an input has that name. By it pieces of equal layers would differ, and each be compiled.
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, arguments, name="own_rows")
        node.meta["example_value"] = like
        return node

    def _erase(self, nodes: set[fx.Node]) -> None:
        for node in [node for node in reversed(self.graph.nodes) if node in nodes]:
            self.graph.erase_node(node)

    def gather_for_others(self) -> None:
        """Gives all rows of a residual to users that do not know of shards."""
        know = {*calls_of(self.graph, *SCATTERS.values(), *_GATHERS)}
        for total in calls_of(self.graph, *SCATTERS.values()):
            once = {user for user in know if user.all_input_nodes.count(total) == 1}
            knows = {user for user in once if argument_of(user, "residual") is total}
            others = [user for user in total.users if user not in knows and user.target != "size"]
            if others:
                with self.graph.inserting_after(total):
                    given = (total, self.from_tokens, self.group_name)
                    rows_of_all = self.graph.call_function(_ours.gather.default, given)
                rows_of_all.meta["example_value"] = value(total)
                for user in others:
                    user.replace_input_with(total, rows_of_all)
