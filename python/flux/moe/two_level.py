"""Mixtures of experts on several nodes: experts are cut over nodes, tokens cross to them along rails.

Every rank brings the tokens of its rail into its node, where routing and both layers are those of a group of
one node. Sums over a node's experts cross back. Sizes do not depend on the routing, and the host waits for
nothing.

All tokens cross to all nodes (a rail all-gather), or, where the caller knows how many a node needs at most
(max_node_tokens), one copy of each token to each node that needs it.

Routing tensors describe the node's ranks, in the shapes of the whole group; what is over is not used:

    positions, weights    of all ranks' tokens, in rank order, as on one node
    counts, received      of the ranks of the node, in front
    all others            of the node; its ranks have nodes * max_tokens tokens each, those of node 0 first

With max_node_tokens, a rank of a node has `NodeTokens.size` tokens: a share of each node, then its own.
`incoming` has further rows: for each node the place of each own token in its share, and the whole group's
number of each of the node's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flux.calls import checks
from flux.comm import group as groups
from flux.comm.nodes.workspace import NodesWorkspace
from flux.moe import reference
from flux.moe.rows import weighted_sum
from flux.ops.ways import all_gather as gather
from flux.ops.ways import two_level
from flux.plan.choose import Plan
from flux.plan.moe import BLOCK_M, LayerProblem, MoePlan, plan_layer
from flux.plan.network_model import TwoLevel

Tensor = torch.Tensor
_ROUTE = "moe.route"
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodeTokens:
    """The tokens that each rank of a node has: of its rail.

    Attributes:
        nodes, ranks: of the group.
        limit: max_tokens of the whole group.
        share: the most tokens of another node's rank, or None: all.
    """

    nodes: int
    ranks: int
    limit: int
    share: int | None

    @property
    def size(self) -> int:
        """Tokens of a rank of the node, with those that are missing."""
        if self.share is None:
            return self.nodes * self.limit
        return self.nodes * self.share + self.limit  # the share of the own node is empty

    @classmethod
    def of(cls, workspace: NodesWorkspace, limit: int, max_node_tokens: int | None) -> NodeTokens:
        """Shares only where they make fewer tokens than all of them."""
        nodes, share = workspace.topology.nodes, None if max_node_tokens is None else max(max_node_tokens, 1)
        if share is not None and nodes * share + limit >= nodes * limit:
            share = None
        return cls(nodes, workspace.topology.ranks, limit, share)

    @classmethod
    def of_incoming(cls, workspace: NodesWorkspace, limit: int, incoming: Tensor) -> NodeTokens:
        """That of a routing."""
        nodes, size = workspace.topology.nodes, incoming.shape[1]
        return cls(nodes, workspace.topology.ranks, limit, None if size == limit else (size - limit) // nodes)


def serves(workspace: NodesWorkspace, ep_size: int) -> bool:
    """Whether experts are cut so that no slice of them spans nodes. Other layers run unfused."""
    return workspace.rail is not None and ep_size % workspace.topology.nodes == 0


def shapes(flat: Shapes, on_node: NodeTokens, k: int, experts: int) -> Shapes:
    """Shapes of a routing's tensors, from those of the whole group: without shares they are the same."""
    if on_node.share is None:
        return flat
    rows = on_node.ranks * on_node.size * min(k, experts)
    offsets, counts, _, positions, _, received, sent, _, _, count = flat
    slices = (sent[0] // on_node.nodes, on_node.size)
    incoming = (2 * on_node.ranks + on_node.nodes, on_node.size)
    tiles = (rows // BLOCK_M + experts, 4)
    return offsets, counts, (rows,), positions, incoming, received, slices, slices, tiles, count


def route(
    workspace: NodesWorkspace,
    message: Tensor,
    sizes: tuple[int, int],
    on_node: NodeTokens,
    flat: Shapes,
    of_node: Callable[..., list[Tensor]],
) -> list[Tensor]:
    """The tensors of a routing, with the weights.

    Args:
        message: float32 [max_tokens, 2 k], of this rank: weights, then the bits of the experts.
        sizes: num_experts, ep_size of the whole group.
        flat: shapes of the whole group.
        of_node: (ids, weights, num_experts, ep_size, max_tokens, group name) -> tensors, inside a node.
    """
    k, (num_experts, ep_size) = message.shape[1] // 2, sizes
    experts = num_experts // on_node.nodes
    places = origin = None
    if on_node.share is None:
        crossed = message.new_empty(on_node.nodes, *message.shape)
        workspace.wait(workspace.rail.gather(message, crossed), "exchange 1 of 1, of routing")
        everybody = crossed.flatten(0, 1)
    else:
        places = _places(message[:, k:].view(torch.int32), experts, on_node, workspace.node)
        everybody = _cross_routing(workspace, message, places, on_node)
    ids = everybody[:, k : 2 * k].contiguous().view(torch.int32)
    first = workspace.node * experts
    here = (ids >= first) & (ids < first + experts)
    workspace.inside("routing inside the node")
    chosen = torch.where(here, ids - first, -1), everybody[:, :k].contiguous()
    name = groups.name_of(workspace.node_group)
    tensors = of_node(*chosen, experts, ep_size // on_node.nodes, on_node.size, name)
    if on_node.share is not None:
        origin = _origins(workspace, everybody[:, 2 * k].contiguous().view(torch.int32), on_node)
    return _to_group(tensors, on_node, origin, places, shapes(flat, on_node, k, num_experts // ep_size))


def _places(ids: Tensor, experts: int, on_node: NodeTokens, node: int) -> Tensor:
    """int32 [nodes, tokens]: the place of each own token in the share of each node; -1 where it does not go,
    -2 where its share has no room for it.
    """
    nodes = torch.arange(on_node.nodes, device=ids.device)
    needs = ((ids[:, :, None] >= 0) & (ids[:, :, None] // experts == nodes)).any(1).t()
    needs = needs & (nodes != node)[:, None]
    place = needs.cumsum(1) - 1
    place = torch.where(place < (on_node.share or 0), place, -2)
    return torch.where(needs, place, -1).int()


def _tokens_of_places(places: Tensor, on_node: NodeTokens) -> Tensor:
    """int64 [nodes, share]: which own token has each place, -1: none."""
    share, limit = on_node.share or 0, places.shape[1]
    tokens = torch.arange(limit, device=places.device).expand(places.shape)
    # Those without a place are written to one that is dropped.
    found = torch.full((on_node.nodes, share + 1), -1, dtype=torch.int64, device=places.device)
    return found.scatter_(1, torch.where(places >= 0, places, share).long(), tokens)[:, :share]


def _cross_routing(workspace: NodesWorkspace, message: Tensor, places: Tensor, on_node: NodeTokens) -> Tensor:
    """float32 [on_node.size, 2 k + 1] of the node's tokens: weights, experts' bits, and the bits of the
    token's number on its rank.
    """
    limit, columns = message.shape
    numbers = torch.arange(limit, dtype=torch.int32, device=message.device).view(torch.float32)
    told = torch.cat([message, numbers[:, None]], 1)
    nothing = told.new_zeros(columns + 1)
    nothing.view(torch.int32)[columns // 2 :] = -1
    tokens = _tokens_of_places(places, on_node)
    # By their bits: a number's bits may be those of a NaN, which arithmetic need not keep.
    chosen = told.view(torch.int32)[tokens.clamp(min=0)]
    sent = torch.where((tokens >= 0)[..., None], chosen, nothing.view(torch.int32)).view(torch.float32)
    everybody = told.new_empty(on_node.size, columns + 1)
    shares = everybody[: on_node.nodes * tokens.shape[1]].view(sent.shape)
    _swap_all(workspace, sent, shares, "exchange 1 of 1, of routing")
    shares[workspace.node] = nothing
    everybody[on_node.nodes * tokens.shape[1] :] = told
    return everybody


def _swap_all(workspace: NodesWorkspace, send: Tensor, receive: Tensor, where: str) -> None:
    workspace.wait(workspace.rail.alltoall(send, receive), where)


def _origins(workspace: NodesWorkspace, numbers: Tensor, on_node: NodeTokens) -> Tensor:
    """int32 [ranks, on_node.size]: for each of the node's tokens, rank * max_tokens + its number there, -1:
    there is none. Of the other ranks of the node too.
    """
    share = on_node.share or 0
    nodes = torch.full((on_node.size,), workspace.node, device=numbers.device)
    nodes[: on_node.nodes * share] = torch.arange(on_node.nodes, device=nodes.device).repeat_interleave(share)
    ranks = nodes * on_node.ranks + workspace.local
    mine = torch.where(numbers >= 0, ranks * on_node.limit + numbers, -1).int()
    if on_node.ranks == 1:
        return mine[None]
    # Of whole vectors, which a gather inside the node needs; as floats, which it takes.
    padded = torch.nn.functional.pad(mine, (0, -on_node.size % 4), value=-1).view(torch.float32)
    workspace.inside("the gather of tokens' numbers inside the node")
    everybody = gather.call(padded[None], workspace.node_group)
    return everybody.view(torch.int32)[:, : on_node.size].contiguous()


def _to_group(
    tensors: list[Tensor], on_node: NodeTokens, origin: Tensor | None, places: Tensor | None, wanted: Shapes
) -> list[Tensor]:
    """A node's routing tensors in the shapes of the whole group."""
    offsets, counts, rows, positions, incoming, received, sent, firsts, tiles, count, weights = tensors
    nodes, ranks, k = on_node.nodes, on_node.ranks, positions.shape[-1]
    if origin is None or places is None:
        by_rank = (ranks, nodes, on_node.limit, k)
        positions, weights = (
            each.view(by_rank).transpose(0, 1).reshape(wanted[3]) for each in (positions, weights)
        )
        incoming = incoming.view(wanted[4])
    else:
        total = nodes * ranks * on_node.limit
        target = torch.where(origin >= 0, origin, total).long().view(-1)
        positions, weights = (
            each.new_full((total + 1, k), none).index_copy(0, target, each.view(-1, k))[:-1].view(wanted[3])
            for each, none in ((positions, -1), (weights, 0))
        )
        room = on_node.size - places.shape[1]
        incoming = torch.cat([incoming, torch.nn.functional.pad(places, (0, room), value=-1), origin])
    found = [offsets, _in_front(counts, wanted[1]), rows, positions, incoming, _in_front(received, wanted[5])]
    return [*found, sent.view(wanted[6]), firsts.view(wanted[7]), tiles, count, weights]


def _in_front(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape, which begins with the elements of another one."""
    whole = tensor.new_zeros(shape)
    whole.view(-1)[: tensor.numel()] = tensor.reshape(-1)
    return whole


class OfGroup:
    """A layer of the whole group, as its node runs it.

    Attributes:
        on_node: the tokens of a rank of the node.
        places: of each own token in the share of each node; None without shares.
        routing: the node's flux.moe.Routing.
        by_flux: whether the node's ranks run the layer fused; if not, nobody does.
    """

    def __init__(self, workspace: NodesWorkspace, plan: MoePlan, routing: Any) -> None:
        """plan: of the whole group."""
        self.on_node = on_node = NodeTokens.of_incoming(workspace, routing.max_tokens, routing.incoming)
        self.places: Tensor | None = None
        nodes, ranks, size, k = on_node.nodes, on_node.ranks, on_node.size, routing.positions.shape[-1]
        positions, weights, incoming = routing.positions, routing.weights, routing.incoming
        if on_node.share is None:
            positions, weights = (
                each.view(nodes, ranks, on_node.limit, k).transpose(0, 1).reshape(ranks, size, k)
                for each in (positions, weights)
            )
            incoming = incoming.view(ranks, size)
        else:
            self.places = incoming[ranks : ranks + nodes, : on_node.limit]
            origin = incoming[ranks + nodes :].long()
            positions, weights = (
                torch.where((origin >= 0)[..., None], each.view(-1, k)[origin.clamp(min=0)], none)
                for each, none in ((positions, -1), (weights, 0))
            )
            incoming = incoming[:ranks].contiguous()
        experts, slices = routing.offsets.shape[0] - 1, routing.sent.numel() // max(size, 1)
        sent, firsts = (each.reshape(slices, size) for each in (routing.sent, routing.firsts))
        self.routing = routing._replace(
            counts=routing.counts.reshape(-1)[: experts * ranks].view(experts, ranks),
            positions=positions,
            incoming=incoming,
            received=routing.received[:ranks],
            sent=sent,
            firsts=firsts,
            weights=weights,
            num_experts=routing.num_experts // nodes,
            ep_size=routing.ep_size // nodes,
            max_tokens=size,
            num_tokens=size,
            group_name=groups.name_of(workspace.node_group),
        )
        sizes = (plan.n, plan.k, plan.dtype, k, self.routing.ep_size, experts, plan.scaling)
        inner = workspace.inner
        self.by_flux = inner is None or plan_layer(inner, LayerProblem(plan.op, size, *sizes)).by_flux


def of_group(workspace: NodesWorkspace, plan: MoePlan, routing: Any) -> OfGroup | None:
    """How a node runs its part of a layer, or None if slices of experts span nodes."""
    return OfGroup(workspace, plan, routing) if serves(workspace, routing.ep_size) else None


def tokens_of_rows(on_node: NodeTokens, rows: Tensor, incoming: Tensor) -> Tensor:
    """rank * max_tokens + token of each row; for rows after the last one: any valid token."""
    if on_node.share is not None:
        origin = incoming[on_node.ranks + on_node.nodes :]
        inside = reference.tokens_of_rows(rows, incoming[: on_node.ranks])
        return origin.reshape(-1).index_select(0, inside).clamp(min=0)
    inside = reference.tokens_of_rows(rows, incoming.view(on_node.ranks, on_node.size))
    local, token = inside // on_node.size, inside % on_node.size
    return (token // on_node.limit * on_node.ranks + local) * on_node.limit + token % on_node.limit


def bring_tokens(workspace: NodesWorkspace, of: OfGroup, x: Tensor) -> Tensor:
    """x [tokens, H] of this rank -> the tokens of its rail that its node needs [on_node.size, H]."""
    on_node = of.on_node
    padded = torch.nn.functional.pad(x, (0, 0, 0, on_node.limit - x.shape[0]))
    everybody = x.new_empty(on_node.size, x.shape[1])
    if of.places is None:
        crossing = workspace.rail.gather(padded.contiguous(), everybody.view(on_node.nodes, *padded.shape))
        workspace.wait(crossing, "exchange 1 of 1, of tokens")
        return everybody
    tokens = _tokens_of_places(of.places, on_node)
    count = tokens.numel()
    sent = padded[tokens.clamp(min=0)]
    _swap_all(workspace, sent, everybody[:count].view(sent.shape), "exchange 1 of 1, of tokens")
    everybody[count:] = padded
    return everybody


def bring_sums(workspace: NodesWorkspace, of: OfGroup, made: Tensor, num_tokens: int) -> Tensor:
    """made [on_node.size, n], the node's sums of its tokens -> the sums over nodes of this rank's tokens
    [tokens, n]. A token for which a share had no room becomes NaN.
    """
    on_node, columns = of.on_node, made.shape[1]
    out = made.new_empty(num_tokens, columns)
    if of.places is None:
        whole = out if num_tokens == on_node.limit else made.new_empty(on_node.limit, columns)
        sums = two_level.Sums(on_node.nodes, whole, ())
        blocks = made.view(on_node.nodes, on_node.limit, columns)
        _swap_all(workspace, blocks, sums.parts, "exchange 1 of 1, of sums")
        sums.write()
        return out if whole is out else out.copy_(whole[:num_tokens])
    share = on_node.share or 0
    count = on_node.nodes * share
    back = torch.empty_like(made)
    shape = (on_node.nodes, share, columns)
    _swap_all(workspace, made[:count].view(shape), back[:count].view(shape), "exchange 1 of 1, of sums")
    back[count:] = made[count:]
    places = of.places[:, :num_tokens].long()
    nodes = torch.arange(on_node.nodes, device=made.device)[:, None]
    own = count + torch.arange(num_tokens, device=made.device)
    rows = torch.where(places >= 0, nodes * share + places, -1)
    rows = torch.where(nodes == workspace.node, own, rows)
    # Where there was no room: the own row, times NaN.
    lost = places == -2
    rows = torch.where(lost, own, rows)
    weights = torch.where(lost, torch.nan, 1.0)
    return out.copy_(weighted_sum(back, rows.t().int().contiguous(), weights.t().float().contiguous()))


def mark_lost(of: OfGroup, out: Tensor) -> Tensor:
    """out [tokens, n] of this rank, with NaN for tokens for which a share had no room."""
    if of.places is None:
        return out
    lost = (of.places[:, : out.shape[0]] == -2).any(0)
    return torch.where(lost[:, None], torch.nan, out)


def overflow(message: Tensor, on_node: NodeTokens, num_experts: int, node: int) -> int:
    """On CPUs: the most tokens that this rank has for another node, where a share has no room; or 0."""
    if on_node.share is None:
        return 0
    ids = message[:, message.shape[1] // 2 :].view(torch.int32)
    places = _places(ids, num_experts // on_node.nodes, on_node, node)
    most = int((places != -1).sum(1).max()) if places.numel() else 0
    return most if most > on_node.share else 0


def check_max_node_tokens(value: int | None, limit: int) -> int | None:
    """Checks the argument of flux.moe.route."""
    if value is not None and not 0 <= value <= limit:
        checks.fail(_ROUTE, "max_node_tokens", f"0 to max_tokens = {limit}", value)
    return value


def plan_route(workspace: NodesWorkspace, tokens: int, num_experts: int, ep_size: int) -> Plan:
    """The facts of a routing on which ranks must agree."""
    levels = TwoLevel(workspace.topology, workspace.engine, "rails", 1, 0, 0, 0.0, 0.0, workspace.links)
    common = (_ROUTE, tokens, num_experts, 0, torch.float32, workspace.world_size, False, True)
    return Plan(*common, workspace.transport, levels.reason, config=ep_size, way="two-level", levels=levels)
