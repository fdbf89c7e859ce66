"""Mixtures of experts on several nodes (docs/design/nodes.md): tokens cross along rails to a node with their
experts, which then is a group of its own; its sums cross back. Sizes do not depend on the routing.

Routing tensors have the shapes of the whole group: positions and weights of all ranks' tokens; in front of
counts and received those of the node's ranks; all others of the node, whose ranks have the tokens of their
rails: nodes * max_tokens, or a share of each node, then their own (max_node_tokens). Then `incoming` also has
the place of each own token in each node's share, and the whole group's number of each token of the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flux.comm import group as groups
from flux.comm.nodes.workspace import NodesWorkspace
from flux.moe import reference
from flux.moe.rows import weighted_sum
from flux.ops.ways import all_gather as gather
from flux.plan.moe import BLOCK_M, LayerProblem, MoePlan, plan_layer

Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodeTokens:
    """The tokens that each rank of a node has: of its rail, in a group of `nodes` with `ranks` each."""

    nodes: int
    ranks: int
    limit: int  # max_tokens of the whole group
    share: int | None  # the most tokens of another node's rank; None: all

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
        nodes, size = workspace.topology.nodes, incoming.shape[1]
        return cls(nodes, workspace.topology.ranks, limit, None if size == limit else (size - limit) // nodes)


def serves(workspace: NodesWorkspace, ep_size: int) -> bool:
    """Whether no slice of experts spans nodes. Other layers run unfused."""
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
    """The tensors of a routing, with the weights, from the message of this rank. sizes: num_experts and
    ep_size of the group, flat: its shapes. of_node: routes inside a node, as moe_route.
    """
    k, (num_experts, ep_size) = message.shape[1] // 2, sizes
    message = message.view(torch.int32)  # numbers' bits may be those of a NaN, which arithmetic need not keep
    experts = num_experts // on_node.nodes
    places = origin = None
    if on_node.share is None:
        crossed = message.new_empty(on_node.nodes, *message.shape)
        workspace.wait(workspace.rail.gather(message, crossed), "exchange 1 of 1, of routing")
        everybody = crossed.flatten(0, 1)
    else:
        places = _places(message[:, k:], experts, on_node, workspace.node)
        everybody = _cross_routing(workspace, message, places, on_node)
    ids = everybody[:, k : 2 * k]
    first = workspace.node * experts
    here = (ids >= first) & (ids < first + experts)
    workspace.inside("routing inside the node")
    chosen = torch.where(here, ids - first, -1), everybody[:, :k].contiguous().view(torch.float32)
    name = groups.name_of(workspace.node_group)
    tensors = of_node(*chosen, experts, ep_size // on_node.nodes, on_node.size, name)
    if on_node.share is not None:
        origin = _origins(workspace, everybody[:, 2 * k], on_node)
    return _to_group(tensors, on_node, origin, places, shapes(flat, on_node, k, num_experts // ep_size))


def _places(ids: Tensor, experts: int, on_node: NodeTokens, node: int) -> Tensor:
    """int32 [nodes, tokens]: each own token's place in the share of each node; -1: not sent, -2: no room."""
    nodes = torch.arange(on_node.nodes, device=ids.device)
    needs = ((ids[:, :, None] >= 0) & (ids[:, :, None] // experts == nodes)).any(1).t()
    needs = needs & (nodes != node)[:, None]
    place = needs.cumsum(1) - 1
    return torch.where(needs, torch.where(place < (on_node.share or 0), place, -2), -1).int()


def _tokens_of_places(places: Tensor, on_node: NodeTokens) -> Tensor:
    """int64 [nodes, share]: which own token has each place, -1: none."""
    share, limit = on_node.share or 0, places.shape[1]
    tokens = torch.arange(limit, device=places.device).expand(places.shape)
    # Those without a place are written to one that is dropped.
    found = torch.full((on_node.nodes, share + 1), -1, dtype=torch.int64, device=places.device)
    return found.scatter_(1, torch.where(places >= 0, places, share).long(), tokens)[:, :share]


def _cross_routing(workspace: NodesWorkspace, message: Tensor, places: Tensor, on_node: NodeTokens) -> Tensor:
    """int32 [on_node.size, 2 k + 1] of the node's tokens: bits of weights, experts, and numbers."""
    limit, columns = message.shape
    told = torch.cat([message, torch.arange(limit, device=message.device)[:, None].int()], 1)
    nothing = told.new_full((columns + 1,), -1)
    nothing[: columns // 2] = 0
    tokens = _tokens_of_places(places, on_node)
    sent = torch.where((tokens >= 0)[..., None], told[tokens.clamp(min=0)], nothing)
    everybody = told.new_empty(on_node.size, columns + 1)
    shares = everybody[: on_node.nodes * tokens.shape[1]].view(sent.shape)
    _swap_all(workspace, sent, shares, "routing")
    shares[workspace.node] = nothing
    everybody[on_node.nodes * tokens.shape[1] :] = told
    return everybody


def _swap_all(workspace: NodesWorkspace, send: Tensor, receive: Tensor, what: str) -> None:
    workspace.wait(workspace.rail.alltoall(send, receive), f"exchange 1 of 1, of {what}")


def _origins(workspace: NodesWorkspace, numbers: Tensor, on_node: NodeTokens) -> Tensor:
    """int32 [ranks, on_node.size]: of each token of the node, rank * max_tokens + its number there, or -1."""
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
        flip = [each.view(ranks, nodes, on_node.limit, k).transpose(0, 1) for each in (positions, weights)]
        positions, weights = (each.reshape(wanted[3]) for each in flip)
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
    return torch.nn.functional.pad(tensor.reshape(-1), (0, math.prod(shape) - tensor.numel())).view(shape)


class OfGroup:
    """A layer of the whole group, as its node runs it: none does so fused, unless all can (by_flux)."""

    def __init__(self, workspace: NodesWorkspace, plan: MoePlan, routing: Any) -> None:
        self.on_node = on_node = NodeTokens.of_incoming(workspace, routing.max_tokens, routing.incoming)
        self.places: Tensor | None = None  # of each own token in the share of each node
        nodes, ranks, size, k = on_node.nodes, on_node.ranks, on_node.size, routing.positions.shape[-1]
        positions, weights, incoming = routing.positions, routing.weights, routing.incoming
        if on_node.share is None:
            shape = nodes, ranks, on_node.limit, k
            flip = [each.view(shape).transpose(0, 1) for each in (positions, weights)]
            positions, weights = (each.reshape(ranks, size, k) for each in flip)
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


def tokens_of_rows(on_node: NodeTokens, rows: Tensor, incoming: Tensor) -> Tensor:
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
    _swap_all(workspace, sent, everybody[:count].view(sent.shape), "tokens")
    everybody[count:] = padded
    return everybody


def bring_sums(workspace: NodesWorkspace, of: OfGroup, made: Tensor, num_tokens: int) -> Tensor:
    """A node's sums [on_node.size, n] -> this rank's tokens' over nodes; NaN where a share had no room."""
    on_node, columns = of.on_node, made.shape[1]
    share = on_node.limit if on_node.share is None else on_node.share
    count, shape = on_node.nodes * share, (on_node.nodes, share, columns)
    back = torch.empty_like(made)
    _swap_all(workspace, made[:count].view(shape), back[:count].view(shape), "sums")
    nodes = torch.arange(on_node.nodes, device=made.device)[:, None]
    tokens = torch.arange(num_tokens, device=made.device)
    rows = nodes * share + tokens
    weights = torch.ones(rows.shape, device=made.device)
    if of.places is not None:
        back[count:] = made[count:]
        places = of.places[:, :num_tokens].long()
        lost = places == -2  # there was no room: the own row, times NaN
        rows = torch.where(places >= 0, nodes * share + places, -1)
        rows = torch.where((nodes == workspace.node) | lost, count + tokens, rows)
        weights = torch.where(lost, torch.nan, 1.0)
    sums = weighted_sum(back, rows.t().int().contiguous(), weights.t().float().contiguous())
    return sums.to(made.dtype)


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
