"""Mixtures of experts on several nodes: bounds, bytes. test_nodes.py has exact layers and gradients."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusals import said

import flux
from flux.comm import registry
from flux.comm.nodes.workspace import NodesWorkspace
from flux.moe import routing, two_level
from flux.testing import spawn

CPU = torch.device("cpu")


def compiled(rank: int, world_size: int) -> list[bool]:
    return [_compiled(rank, world_size, share) for share in (None, 4)]


def _compiled(rank: int, world_size: int, share: int | None) -> bool:
    torch.manual_seed(1)
    experts = flux.moe.MoEMLP(
        16, 8 * world_size, 2 * world_size, ep_size=world_size, max_node_tokens=share, dtype=torch.float32
    )
    x, scores = torch.randn(12, 16), torch.rand(12, 2)
    # Two of three tokens stay on this rank's node.
    node = rank // 2 * world_size
    ids = torch.where(torch.arange(12)[:, None] % 3 > 0, node, world_size - node) + torch.tensor([0, 1])
    eager = experts(x, ids, scores)  # the group's first call, by which its nodes are known
    again = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, scores)
    again.sum().backward()
    return torch.equal(eager, again) and experts.w1.grad is not None


def test_layers_compile() -> None:
    assert spawn(compiled, 4, ranks_per_node=2) == [[True, True]] * 4


def overflows(rank: int, world_size: int) -> list[str]:
    told = []
    for bound in (2, 4):
        # Rank 1 alone has three tokens for the other node; 10 tokens, so a share of up to 4 pays.
        ids = torch.full((10, 1), rank // 2 * 2)
        if rank == 1:
            ids[:3] = 2
        told.append(said(flux.moe.route, ids, torch.ones(10, 1), 4, ep_size=2, max_node_tokens=bound))
    return told


def test_too_small_a_bound_is_an_error_on_all_ranks() -> None:
    for first, second in spawn(overflows, 4, ranks_per_node=2):
        assert "expected the same call on all ranks" in first
        assert "tokens for another node=3" in first and "max_node_tokens=2" in first
        assert second == "no error"


def test_tokens_without_room_become_nan() -> None:
    """What happens on GPUs, where the host does not look at the routing."""
    on_node = two_level.NodeTokens(nodes=3, ranks=1, limit=5, share=1)
    ids = torch.tensor([[2], [0], [3], [5], [4]], dtype=torch.int32)  # experts 2 and 3 are node 1's
    places = two_level._places(ids, 2, on_node, node=0)
    assert places.tolist() == [[-1] * 5, [0, -1, -2, -1, -1], [-1, -1, -1, 0, -2]]
    assert two_level._tokens_of_places(places, on_node).tolist() == [[-1], [0], [3]]

    class Rail:
        def alltoall(self, send: torch.Tensor, receive: torch.Tensor) -> Any:
            receive.copy_(torch.tensor([[[torch.nan]], [[10.0]], [[20.0]]]))

    workspace: Any = SimpleNamespace(rail=Rail(), node=0, wait=lambda transfer, where: None)
    of: Any = SimpleNamespace(on_node=on_node, places=places)
    made = torch.cat([torch.zeros(3, 1), torch.arange(5.0)[:, None] + 1])
    out = two_level.bring_sums(workspace, of, made, 5).flatten()
    assert out[[0, 1, 3]].tolist() == [1 + 10.0, 2.0, 4 + 20.0]
    assert out[[2, 4]].isnan().all()
    lost = two_level.mark_lost(of, torch.ones(5, 2)).isnan().any(1)
    assert lost.nonzero().flatten().tolist() == [2, 4]


def count_bytes(rank: int, world_size: int, share: int | None) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    workspace = registry.get(group, CPU, "moe.route")
    assert isinstance(workspace, NodesWorkspace)
    hidden, experts, tokens, k = 24, 2 * world_size, 40, 3
    node = rank // 2
    ids = node * (experts // 2) + torch.arange(tokens * k).view(tokens, k) % 4
    ids[:5] = (1 - node) * (experts // 2)
    told = []
    for call in ("route", "layer0", "layer1"):
        before = workspace.rail.bytes_sent
        if call == "route":
            weights = torch.ones(tokens, k)
            routing = flux.moe.route(ids, weights, experts, ep_size=world_size, max_node_tokens=share)
        elif call == "layer0":
            w1 = torch.ones(2, 16, hidden, dtype=torch.bfloat16)
            rows = flux.moe.ag_scatter_gemm(torch.ones(tokens, hidden, dtype=torch.bfloat16), w1, routing)
        else:
            flux.moe.gemm_gather_rs(rows, torch.ones(2, hidden, 16, dtype=torch.bfloat16), routing)
        told.append(workspace.rail.bytes_sent - before)
    return told


@pytest.mark.parametrize("share", [None, 8])
def test_bytes_that_cross_are_those_of_the_model(share: int | None) -> None:
    tokens = 40 if share is None else share  # cross, with 3 experts and weights, in a share with its number
    for told in spawn(count_bytes, 4, share, ranks_per_node=2):
        assert told == [tokens * 4 * (6 + (share is not None)), tokens * 48, tokens * 48]


def refuses(rank: int, world_size: int) -> list[str]:
    """Bounds of any ranks, the last of which is too small on all of them if they are nodes; and slices that
    span more nodes than there may be.
    """
    ids, scores = torch.full((10, 1), 2 - rank * 2), torch.ones(10, 1)
    route = partial(said, flux.moe.route)
    told = [route(ids, scores, 4, ep_size=2, max_node_tokens=bound) for bound in (11, -1, 2.5, 3)]
    workspace: Any = registry.get(dist.group.WORLD, CPU, "moe.route")  # type: ignore[arg-type]
    workspace.topology = SimpleNamespace(nodes=5, ranks=2)  # of ten ranks, which ep_size = 2 does not suit
    routing.MAX_WORLD_SIZE = 1
    return [*told, route(ids[:2] * 0, scores[:2], 4, ep_size=2)]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_bounds_are_checked(ranks_per_node: int) -> None:
    for high, negative, kind, small, spanning in spawn(refuses, 2, ranks_per_node=ranks_per_node):
        assert high == "moe.route: max_node_tokens: expected 0 to max_tokens = 10, got 11"
        assert negative.endswith("got -1") and "max_node_tokens: expected an int" in kind
        told = "moe.route: max_node_tokens: expected at least 10, the tokens for one node, got 3"
        assert small == (told if ranks_per_node == 1 else "no error")
        told = "expected at most 1 ranks, or ep_size a multiple of its nodes, got 2 ranks and ep_size 2"
        assert told in spanning
