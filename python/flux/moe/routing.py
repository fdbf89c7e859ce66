"""Routing: which rank computes which tokens, in which order. Both layers take it as an argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux.calls import argument_types, checks, front
from flux.calls.front import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import implement
from flux.comm import cuda, registry, repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import GroupLike, group_name, process_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import MAX_WORLD_SIZE, NOTHING, Same, round_up
from flux.moe import reference, two_level
from flux.ops.ways import all_gather as gather
from flux.plan.choose import Plan
from flux.plan.moe import BLOCK_M
from flux.plan.network_model import TwoLevel

MAX_TOP_K: int = _native.core.MOE_MAX_TOP_K
_OP = "moe.route"
_KNOWN = repeat.operator()
Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], ...]


class Routing(NamedTuple):
    """What a rank knows of the tokens of all p ranks of its group. E experts are there on this rank, each
    token chooses k, and k' is the smaller of the two. All tensors are int32, but for `weights`.

    Attributes:
        offsets: [E + 1], first row of each expert, then the number of rows. Rows are (token, expert) pairs of
            experts on this rank, sorted by expert, then source rank (own, rank-1, rank-2, ...), then token.
        counts: [E, p], rows of each expert from each source, in that order.
        rows: [p * max_tokens * k'], source * max_tokens + slot row of each row; -1 after the last.
        positions: [p, max_tokens, k], the row of each choice of each token, -1 if its expert is elsewhere.
        incoming: [p, max_tokens], the token in each slot row that a source sends.
        received: [p], slot rows that each source sends.
        sent: [ep_size, max_tokens], the slot row of each own token at a slice, -1 where it is not sent.
        firsts: [ep_size, max_tokens], the first expert of a slice that each own token has chosen, counted
            within the slice, or -1.
        tiles: [tile rows, 4], the schedule of tiles (csrc/moe/plan.h: TileEntry).
        num_tiles: [1], entries of it.
        weights: float32 [p, max_tokens, k], the routing weights of all ranks.
        num_experts: of all ranks.
        ep_size: slices of experts.
        max_tokens: of one rank.
        num_tokens: that this rank has.
        group_name: of the group whose tokens these are.

    Example::

        from flux.moe import route

        topk_ids = torch.tensor([[0, 3], [1, 2], [2, 0]])  # 3 tokens choose 2 of 4 experts
        topk_weights = torch.full((3, 2), 0.5)
        routing = route(topk_ids, topk_weights, num_experts=4)
        assert routing.num_tokens == 3 and routing.counts.shape == (4, p)
    """

    offsets: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    incoming: torch.Tensor
    received: torch.Tensor
    sent: torch.Tensor
    firsts: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    ep_size: int
    max_tokens: int
    num_tokens: int
    group_name: str


_POSITIONS = Routing._fields.index("positions")
TENSORS = Routing._fields.index("num_experts")  # number of a routing's tensors; the last is weights
ARRAYS = Routing._fields[: TENSORS - 1]


def route(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    group: GroupLike = None,
    ep_size: int = 1,
    max_tokens: int | None = None,
    max_node_tokens: int | None = None,
) -> Routing:
    """Tells all ranks which experts this rank's tokens have chosen, and sorts all tokens. A collective.

    Ranks exchange experts and weights, some bytes a token; the tokens themselves travel in ag_scatter_gemm.
    The order is deterministic.

    Args:
        topk_ids: int32 or int64 [tokens, k], k <= 16, the experts of each token. An entry outside
            [0, num_experts), such as -1, is not routed; an expert named twice gets the sum of its weights.
        topk_weights: floating [tokens, k], what each expert's result is multiplied by.
        num_experts: of the layer, whatever the ranks hold of them.
        group: all ranks over which tokens are distributed: ProcessGroup, one-dimensional DeviceMesh, group
            name, or None for the default group.
        ep_size: into how many slices experts are cut. Slice e is held by the p / ep_size ranks from
            e * p / ep_size on, each with a part of the columns. 1: tensor parallelism; p: expert parallelism.
        max_tokens: what no rank exceeds; the same on all ranks. None: all ranks have as many as this one.
        max_node_tokens: how many tokens of a rank any other node needs at most, in a group with several
            nodes; the same on all ranks. If that is few enough, one copy of each token crosses to each node
            that needs it, instead of all tokens to all nodes. Where there are more, CPUs raise ValueError,
            and on GPUs the results of those tokens are NaN. None: any number.

    Returns:
        The Routing that flux.moe.ag_scatter_gemm and flux.moe.gemm_gather_rs take.

    Raises:
        ValueError: an argument does not fit; or, where the ranks notice, they made different calls.
        CommTimeoutError, RuntimeError: as flux.ag_gemm.

    Example::

        from flux.moe import route

        topk_ids = torch.tensor([[0, 3], [1, 2], [2, 0]])  # 3 tokens choose 2 of 4 experts
        topk_weights = torch.full((3, 2), 0.5)
        routing = route(topk_ids, topk_weights, num_experts=4)
        assert routing.offsets.tolist() == [0, 2 * p, 3 * p, 5 * p, 6 * p]  # rows of each expert
    """
    calls = None if torch.compiler.is_compiling() or max_node_tokens is not None else repeat.of(group)
    if calls is not None:
        rows = topk_ids.shape[0] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() == 2 else 0
        most = rows if max_tokens is None else max_tokens
        done = calls.call(_KNOWN, topk_ids, topk_weights, num_experts, ep_size, most)
        if done is not None:
            # Without the function of the class in Python.
            return tuple.__new__(Routing, (*done, num_experts, ep_size, most, rows, calls.group_name))
    sizes = {"ep_size": ep_size, "max_tokens": max_tokens, "max_node_tokens": max_node_tokens}
    argument_types.check(_OP, topk_ids=topk_ids, topk_weights=topk_weights, num_experts=num_experts, **sizes)
    name = group_name(group, _OP)
    if topk_ids.dim() != 2:
        checks.fail(_OP, "topk_ids", "2 dimensions [tokens, k]", f"{topk_ids.dim()}")
    tokens = topk_ids.shape[0]
    limit = tokens if max_tokens is None else max_tokens
    arguments = (topk_ids, topk_weights, num_experts, ep_size, limit, name, max_node_tokens)
    if may_skip_dispatch(topk_ids, topk_weights) and not needs_grad(topk_weights):
        made = _eager(*arguments)
    else:
        made = dispatch(name, topk_ids.device, _op, *arguments)
    return Routing._make([*made, num_experts, ep_size, limit, tokens, name])


# The native layout (flux._core.MoeLayout) of tokens and experts, with checked sizes. Cached, because every
# call needs it and it does not change.
_layout: Any = functools.lru_cache(maxsize=1024)(_native.core.MoeLayout)


def layout_of(routing: Routing) -> Any:
    group, top_k = process_group(routing.group_name), routing.positions.shape[2]
    sizes = (routing.ep_size, routing.num_experts, top_k, routing.max_tokens)
    return _layout(group.size(), group.rank(), *sizes)


def same_routing(routing: Routing) -> Same:
    """The facts of a routing that must be equal on all ranks, besides the plan of a layer."""
    facts: dict[str, Any] = {"experts": routing.num_experts, "top_k": routing.positions.shape[2]}
    if routing.incoming.shape[1] != routing.max_tokens:  # each node has the weights of its own tokens
        return {**facts, "shares": float(routing.incoming.shape[1])}
    return {**facts, "routing weights": routing.weights}


def check_routing(op: str, routing: Routing, device: torch.device) -> None:
    """Checks that a routing is one that flux.moe.route made for tensors on this device."""
    if not isinstance(routing, Routing):
        checks.fail(op, "routing", "the result of flux.moe.route", type(routing).__name__)
    if torch.compiler.is_compiling():
        return
    sizes = routing.num_experts, routing.ep_size, routing.max_tokens
    for name, tensor in zip(Routing._fields, routing[:11], strict=False):
        argument_types.tensor(op, "routing", tensor)
        if tensor.device != device:
            checks.fail(op, "routing", f"{name} on {device}, the device of x", tensor.device)
    for size in (*sizes, routing.num_tokens):
        argument_types.integer(op, "routing", size)
    argument_types.string(op, "routing", routing.group_name)
    try:
        k, p = routing.positions.shape[-1], process_group(routing.group_name).size()
        shapes = checked_shapes(p, *sizes, routing.num_tokens, k)
    except (IndexError, RuntimeError, ValueError) as error:
        checks.fail(op, "routing", "one of flux.moe.route, of a group that is there", error)
    name, incoming = routing.group_name, routing.incoming
    if (on_node := _on_node(name, routing.ep_size, routing.max_tokens, incoming)) is not None:
        shapes = two_level.shapes(shapes, on_node, k, routing.num_experts // routing.ep_size)
    shapes = (*shapes, shapes[_POSITIONS])
    for name, tensor, shape in zip(Routing._fields, routing[:11], shapes, strict=False):
        if tensor.shape != shape:
            checks.fail(op, "routing", f"{name} of shape {list(shape)}", f"shape {list(tensor.shape)}")
        if tensor.dtype != (torch.float32 if name == "weights" else torch.int32):
            checks.fail(op, "routing", f"{name} as flux.moe.route makes it", f"dtype {tensor.dtype}")


def tokens_of_rows(routing: Routing) -> Tensor:
    """rank * max_tokens + token of each row, int32; for rows after the last one: any valid token."""
    return _tokens_op(routing.rows, routing.incoming, routing.ep_size, routing.max_tokens, routing.group_name)


def _tokens(rows: Tensor, incoming: Tensor, ep_size: int, max_tokens: int, name: str) -> Tensor:
    # One operator: while torch traces, nobody knows whether the group has several nodes.
    if (on_node := _on_node(name, ep_size, max_tokens, incoming)) is not None:
        return two_level.tokens_of_rows(on_node, rows, incoming)
    return reference.tokens_of_rows(rows, incoming)


def _on_node(name: str, ep_size: int, max_tokens: int, incoming: Tensor) -> two_level.NodeTokens | None:
    """The tokens of a node's ranks, where a routing is one of each node."""
    workspace = registry.find(process_group(name), incoming.device)
    if not isinstance(workspace, NodesWorkspace) or not two_level.serves(workspace, ep_size):
        return None
    return two_level.NodeTokens.of_incoming(workspace, max_tokens, incoming)


def checked_shapes(p: int, num_experts: int, ep_size: int, max_tokens: int, tokens: int, k: int) -> Shapes:
    """Shapes of the arrays of a routing. tokens: number of tokens of this rank."""
    if ep_size < 1 or p % ep_size:
        checks.fail(_OP, "ep_size", f"a divisor of the {p} ranks of the group", ep_size)
    if num_experts < 1 or num_experts % ep_size or num_experts >= 2**30:
        checks.fail(_OP, "num_experts", f"a positive multiple of ep_size = {ep_size}", num_experts)
    if max_tokens < tokens:
        checks.fail(_OP, "max_tokens", f"at least the {tokens} tokens of this rank", max_tokens)
    if p * max_tokens * k >= 2**30:
        checks.fail(_OP, "max_tokens", f"less than 2**30 choices of {p} ranks, {k} a token", max_tokens)
    experts = num_experts // ep_size
    max_rows = p * max_tokens * min(k, experts)
    slices, tiles = (ep_size, max_tokens), (max_rows // BLOCK_M + experts, 4)
    tokens_of = (p, max_tokens, k), (p, max_tokens)
    return (experts + 1,), (experts, p), (max_rows,), *tokens_of, (p,), slices, slices, tiles, (1,)


# Only for eager calls: under tracing, sizes may be symbolic, which cannot be keys of the cache.
_kept_shapes = functools.lru_cache(maxsize=1024)(checked_shapes)


class _Call(NamedTuple):
    ids: Tensor
    weights: Tensor
    num_experts: int
    ep_size: int
    max_tokens: int
    name: str
    max_node_tokens: int | None = None

    def shapes(self, checked: Callable[..., Shapes]) -> Shapes:
        """Checks the call; returns the shapes of the arrays, without shares of nodes."""
        ids, weights = self.ids, self.weights
        if ids.dtype not in (torch.int32, torch.int64):
            checks.fail(_OP, "topk_ids", "dtype int32 or int64", ids.dtype)
        shape = list(ids.shape)
        if not 1 <= shape[1] <= MAX_TOP_K:
            checks.fail(_OP, "topk_ids", f"1 to {MAX_TOP_K} experts for each token", f"shape {shape}")
        if weights.shape != ids.shape:
            checks.fail(_OP, "topk_weights", f"shape {shape}", f"shape {list(weights.shape)}")
        if weights.dtype not in checks.FLOATING:
            checks.fail(_OP, "topk_weights", "a floating dtype", weights.dtype)
        if weights.device != ids.device:
            checks.fail(_OP, "topk_weights", f"device {ids.device}, that of topk_ids", weights.device)
        sizes = (self.num_experts, self.ep_size, self.max_tokens, *self.ids.shape)
        shapes = checked(process_group(self.name).size(), *sizes)
        if self.max_node_tokens is not None and not 0 <= self.max_node_tokens <= self.max_tokens:
            expected = f"0 to max_tokens = {self.max_tokens}"
            checks.fail(_OP, "max_node_tokens", expected, self.max_node_tokens)
        return shapes


def _fake(*arguments: Any) -> list[Tensor]:
    call = _Call(*arguments)
    shapes, group, limit = call.shapes(checked_shapes), process_group(call.name), call.max_node_tokens
    if limit is not None:  # shapes depend on the nodes, so the group must have met before
        workspace = next(iter(registry.existing(group)), None)
        if workspace is None and group.size() > 1:
            before = "None before the group's first call, which finds out its nodes (call flux.reserve first)"
            checks.fail(_OP, "max_node_tokens", before, limit)
        if isinstance(workspace, NodesWorkspace) and two_level.serves(workspace, call.ep_size):
            on_node = two_level.NodeTokens.of(workspace, call.max_tokens, limit)
            shapes = two_level.shapes(shapes, on_node, call.ids.shape[1], call.num_experts // call.ep_size)
    arrays = [call.ids.new_empty(shape, dtype=torch.int32) for shape in shapes]
    return [*arrays, call.ids.new_empty(shapes[_POSITIONS], dtype=torch.float32)]


def _eager(*arguments: Any) -> list[Tensor]:
    call = _Call(*arguments)
    shapes = call.shapes(_kept_shapes)
    group = process_group(call.name)
    calls = repeat.of_groups.get(group) if call.max_node_tokens is None else None
    if calls is not None and (done := calls.call_below(_KNOWN, *call[:5])) is not None:
        return list(done)
    return registry.in_turn(group, call.ids.device, _among_ranks, call, group, shapes)


def _among_ranks(call: _Call, group: ProcessGroup, shapes: Shapes) -> list[Tensor]:
    p, k, on_gpu = group.size(), call.ids.shape[1], call.ids.is_cuda
    workspace = None
    if p > 1 and (call.max_tokens > 0 or not on_gpu):  # else there are no peers, or no tokens
        workspace = registry.get(group, call.ids.device, _OP)
    if isinstance(workspace, NodesWorkspace) and two_level.serves(workspace, call.ep_size):
        return _on_nodes(call, workspace, shapes)
    if p > MAX_WORLD_SIZE:
        expected = f"at most {MAX_WORLD_SIZE} ranks, or ep_size a multiple of its nodes"
        checks.fail(_OP, "group", expected, f"{p} ranks and ep_size {call.ep_size}")
    layout = _layout(p, group.rank(), call.ep_size, call.num_experts, k, call.max_tokens)
    if on_gpu and not isinstance(workspace, NodesWorkspace):
        of_group = cast("CudaWorkspace | None", workspace)
        if of_group is None:
            plan = _make_plan(layout, cuda.why_not(call.ids.device), cuda.num_sms(call.ids.device), "")
        else:
            plan = _make_plan(layout, of_group.why_not, of_group.num_sms, of_group.transport)
        if plan.by_flux:
            return by_kernel(of_group, plan, layout, call, shapes)
    everybody = _message(call)
    if p > 1:
        also = {"num_experts": call.num_experts, "ep_size": call.ep_size}
        everybody = front.below(_GATHER, gather.Call(everybody), group, also)
    # One copy makes both contiguous.
    parts = everybody.view(p, call.max_tokens, 2, k).permute(2, 0, 1, 3).contiguous()
    ids = parts[1].view(torch.int32)
    arrays = reference.routing_tensors(layout, BLOCK_M, ids) if on_gpu else route_on_host(layout, ids, shapes)
    # .data, so that autograd sees no view, and users may modify it in place like any other tensor.
    return [*arrays, parts[0].data]


@functools.lru_cache(maxsize=1024)
def _make_plan(layout: Any, why_not: str | None, num_sms: int, transport: str) -> Plan:
    """Whether the kernel routes. Must be equal on all ranks, as the kernel also exchanges the choices."""
    if why_not is None and layout.local_experts > layout.max_route_experts:
        why_not = f"{layout.local_experts} experts on a rank, more than the kernel can count"
    if why_not is None and not layout.route_fits(num_sms):
        why_not = f"{layout.max_tokens} tokens on each rank, more than the GPU can count beside other kernels"
    m, fits = layout.world_size * layout.max_tokens, why_not is None
    common = (_OP, m, layout.num_experts, layout.top_k, torch.float32, layout.world_size, False, fits)
    how = transport if fits else "torch", why_not or "supported by the kernel"
    return Plan(*common, *how, config=layout.ep_size, exchange_bytes=round_up(layout.route_exchange_bytes))


def by_kernel(
    workspace: CudaWorkspace | None, plan: Plan, layout: Any, call: _Call, shapes: Shapes
) -> list[Tensor]:
    """Ranks exchange their choices and sort all tokens in one launch."""
    ids, weights = call.ids.contiguous(), call.weights.float().contiguous()
    sizes = {"num_experts": call.num_experts, "ep_size": call.ep_size, "max_tokens": call.max_tokens}
    recipe = repeat.Recipe(_KNOWN, {"topk_ids": call.ids, "topk_weights": call.weights, **sizes})
    # Separate sizes are faster to parse than a list.
    arrays = [ids.new_empty(*shape, dtype=torch.int32) for shape in shapes]
    all_weights = weights.new_empty(*shapes[_POSITIONS])
    scratch = ids.new_empty(layout.route_scratch_words, dtype=torch.int32)
    how = (layout.rank, layout.ep_size, layout.num_experts, BLOCK_M)
    given = (ids, weights, arrays, all_weights, scratch)
    if workspace is None:
        enqueue = functools.partial(_kernel, *given, 0, *how)
        enqueue()
    else:
        with workspace.calling(plan, NOTHING), workspace.enter(plan) as (symm_buffer, _):
            enqueue = functools.partial(_kernel, *given, symm_buffer, *how)
            enqueue()
    if recipe.in_place(topk_ids=ids, topk_weights=weights):
        *used, of_scratch = recipe.allocates_together([*arrays, scratch])
        recipe.results += used
        used.append(recipe.returns(all_weights))
        operands = [[*recipe.numbers("topk_ids", "topk_weights"), *used, of_scratch]]
        if workspace is not None:
            workspace.remember(recipe, enqueue, operands)
        elif layout.world_size == 1:
            repeat.remember(registry.known_of_one_rank(process_group(call.name)), recipe, enqueue, operands)
    return [*arrays, all_weights]


def _on_nodes(call: _Call, workspace: NodesWorkspace, shapes: Shapes) -> list[Tensor]:
    """Routing on several nodes: choices cross first, then each node routes the tokens of all."""
    max_tokens, max_node_tokens, num_experts = call.max_tokens, call.max_node_tokens, call.num_experts
    on_node = two_level.NodeTokens.of(workspace, max_tokens, max_node_tokens)
    message = _message(call)
    same: dict[str, float | str] = {"max_tokens": max_tokens, "max_node_tokens": str(max_node_tokens)}
    most = 0 if message.is_cuda else two_level.overflow(message, on_node, num_experts, workspace.node)
    p = workspace.world_size
    if most:
        same["tokens for another node"] = most
    levels = TwoLevel(workspace.topology, workspace.engine, "rails", 1, 0, 0, 0.0, 0.0, workspace.links)
    common = (_OP, p * max_tokens, num_experts, 0, torch.float32, p, False, True, workspace.transport)
    plan = Plan(*common, levels.reason, config=call.ep_size, way="two-level", levels=levels)
    with workspace.calling(plan, same):
        if most:
            checks.fail(_OP, "max_node_tokens", f"at least {most}, the tokens for one node", max_node_tokens)
        return two_level.route(workspace, message, (num_experts, call.ep_size), on_node, shapes, _eager)


def route_on_host(layout: Any, ids: Tensor, shapes: Shapes) -> list[Tensor]:
    """The arrays of a routing from the experts of all ranks' tokens, int32 [p, max_tokens, k] on the CPU."""
    arrays = [ids.new_empty(shape) for shape in shapes]
    _native.core.moe_route(layout, BLOCK_M, ids.data_ptr(), [array.data_ptr() for array in arrays])
    return arrays


def _message(call: _Call) -> Tensor:
    """What a rank sends to all others, float32 [max_tokens, 2 * k]: weights, then the bits of the experts."""
    tokens, k = call.ids.shape
    # Check ids before they are narrowed to 32 bits, which could turn an invalid id into a valid one.
    valid = (call.ids >= 0) & (call.ids < call.num_experts)
    ids = torch.where(valid, call.ids, -1).int()
    parts = (call.weights.float(), ids.view(torch.float32))
    if tokens == call.max_tokens:
        return torch.cat(parts, 1)
    told = parts[0].new_zeros(call.max_tokens, 2 * k)
    torch.cat(parts, 1, out=told[:tokens])
    told.view(torch.int32)[tokens:, k:] = -1
    return told


# all_gather, by the name of this operator in messages.
_GATHER = replace(
    gather.ALL_GATHER,
    name=_OP,
    number=repeat.operator(),
    plan=lambda workspace, call, sizes: replace(gather.gather_plan(workspace, call.x), op=_OP),
)


_op = implement("moe_route", _eager, _fake)
_tokens_op = implement("moe_tokens_of_rows", _tokens, lambda rows, *_: rows.new_empty(rows.shape))
_kernel: Any = torch.ops.flux._moe_route.default
