"""flux.moe between CPU processes: exact results of both layers for tensor, expert and mixed parallelism, any
skew and uneven tokens. One set of processes per world size runs all cases; each test looks at one answer.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from cases import scenario_test
from dense_calls import wrong_layers

import flux
from flux.testing import spawn
from flux.testing.moe_data import MoeCase

CASES = {
    1: [MoeCase((150,), 24, 40, 4, 2), MoeCase((1,), 2, 2, 1, 1, dtype=torch.float32)],
    2: [
        MoeCase((150, 150), 24, 300, 4, 2),
        MoeCase((150, 150), 24, 40, 4, 2, ep_size=2),
        MoeCase((0, 130), 280, 16, 6, 3, ep_size=2, dtype=torch.float32),
        MoeCase((7, 3), 8, 8, 2, 16, dropped=0.5, dtype=torch.float64),
        MoeCase((200, 200), 16, 8, 8, 2, ep_size=2, skew="one slice"),
    ],
    4: [
        MoeCase((140, 140, 140, 140), 24, 40, 4, 2),
        MoeCase((140, 140, 140, 140), 1100, 16, 8, 2, ep_size=4),
        MoeCase((140, 20, 0, 135), 24, 40, 8, 3, ep_size=2, dropped=0.2),
        MoeCase((64, 64, 64, 64), 24, 40, 8, 2, ep_size=4, skew="one expert", dtype=torch.float16),
        MoeCase((300, 1, 1, 1), 24, 40, 16, 4, ep_size=2, skew="half empty"),
        MoeCase((0, 0, 0, 5), 24, 8, 4, 1, ep_size=4, dropped=1.0),
    ],
}


def exact(rank: int, world_size: int) -> str:
    return "; ".join(each for case in CASES[world_size] for each in wrong_layers(case, rank))


def protocol(rank: int, world_size: int) -> str:
    plan = flux.explain("gemm_rs", world_size, 8, 8)
    return "" if plan.by_flux or world_size == 1 else plan.reason


test_moe_is_exact = scenario_test(list(CASES), exact, protocol, timeout_s=240)


def sub_meshes(rank: int, world_size: int) -> str:
    """Two groups of two side by side, at different speeds, one with experts, one with columns distributed."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, place = rank % 2, rank // 2
    for seed in range(4):
        if rank == 1:
            time.sleep(0.02)
        case = MoeCase((90, 30 + seed), 24, 40, 6, 2, ep_size=1 + mine, seed=seed)
        if wrong := wrong_layers(case, place, groups[mine]):
            return "; ".join(wrong)
    return ""


def test_groups_side_by_side() -> None:
    assert spawn(sub_meshes, 4, backend="gloo") == [""] * 4


def nothing_to_receive(rank: int, world_size: int) -> list[float]:
    """Seconds that each layer takes on a rank whose peer, from whom it needs nothing, comes late."""
    ids, weights, x, w = torch.full((4, 1), rank), torch.ones(4, 1), torch.ones(4, 8), torch.ones(1, 8, 8)
    routing = flux.moe.route(ids, weights, 2, ep_size=2)
    hidden = torch.ones(routing.rows.shape[0], 8)
    calls = [
        lambda: flux.moe.ag_scatter_gemm(x, w, routing),
        lambda: flux.moe.gemm_gather_rs(hidden, w, routing),
    ]
    seconds = []
    for call in calls:
        call()
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        start = time.monotonic()
        call()
        seconds.append(time.monotonic() - start)
    return seconds


def test_a_call_ends_only_after_every_peer_has_begun_it() -> None:
    """Two buffers are enough only because of this, and under expert parallelism it is not for free."""
    assert min(spawn(nothing_to_receive, 2, backend="gloo")[0]) > 0.3
