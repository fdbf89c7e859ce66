"""flux.moe between CPU processes: exact results of both layers for tensor, expert and mixed parallelism, any
skew and uneven tokens. One set of processes per world size runs all cases; each test looks at one answer.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Calls, compare

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


def run(case: MoeCase, rank: int, group: Any = None) -> str:
    ids, weights = case.routing(rank)
    routing = flux.moe.route(
        ids, weights, case.num_experts, group=group, ep_size=case.ep_size, max_tokens=case.max_tokens
    )
    x, w1, w2 = case.x(rank), case.w1(rank), case.w2(rank)
    expected0, expected1 = case.layer0(rank), case.layer1(rank)
    hidden = case.hidden_rows(rank, routing.rows.shape[0])
    results = [
        ("ag_scatter_gemm", flux.moe.ag_scatter_gemm(x, w1, routing)[: len(expected0)], expected0),
        ("gemm_gather_rs", flux.moe.gemm_gather_rs(hidden, w2, routing), expected1),
    ]
    return next((f"{what}: {compare(a, b)}" for what, a, b in results if compare(a, b)), "")


def everything(rank: int, world_size: int) -> dict[str, str]:
    answers = {f"case {i}": run(case, rank) for i, case in enumerate(CASES[world_size])}
    if world_size > 1:
        workspace = flux.explain("gemm_rs", world_size, 8, 8)
        answers["protocol"] = "" if workspace.by_flux else workspace.reason
    return answers


_answers: dict[int, list[dict[str, str]]] = {}
NAMES = [
    (p, name) for p in CASES for name in [f"case {i}" for i in range(len(CASES[p]))] + ["protocol"] * (p > 1)
]


@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_moe_is_exact(world_size: int, name: str) -> None:
    if world_size not in _answers:
        _answers[world_size] = spawn(everything, world_size, backend="gloo", timeout_s=240)
    assert [answers[name] for answers in _answers[world_size]] == [""] * world_size


def sub_meshes(rank: int, world_size: int) -> str:
    """Two groups of two side by side, at different speeds, one with experts, one with columns distributed."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, place = rank % 2, rank // 2
    for seed in range(4):
        if rank == 1:
            time.sleep(0.02)
        case = MoeCase((90, 30 + seed), 24, 40, 6, 2, ep_size=1 + mine, seed=seed)
        wrong = run(case, place, groups[mine])
        if wrong:
            return wrong
    return ""


def test_groups_side_by_side() -> None:
    assert spawn(sub_meshes, 4, backend="gloo") == [""] * 4


def unfused(rank: int, world_size: int) -> str:
    answers = [run(case, rank) for case in CASES[world_size]]
    return next((a for a in answers if a), "")


@pytest.mark.parametrize("world_size", [2, 4])
def test_unfused_gives_the_same(world_size: int) -> None:
    told = spawn(unfused, world_size, backend="gloo", env={"FLUX_FUSED": "off"})
    assert told == [""] * world_size


OPERATORS = ["moe_route", "moe_ag_scatter_gemm", "moe_gemm_gather_rs"]


def without_dispatcher(rank: int, world_size: int) -> str:
    """Every case through the dispatcher, then past it, as calls on GPUs without gradients go."""

    def go_straight(straight: bool) -> None:
        for module in ("routing", "layer"):
            sys.modules[f"flux.moe.{module}"].may_skip_dispatch = lambda *_: straight  # type: ignore[attr-defined]

    def layer(case: MoeCase, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        sizes = {"ep_size": case.ep_size, "max_tokens": case.max_tokens}
        routing = flux.moe.route(ids, weights, case.num_experts, **sizes)
        hidden = case.hidden_rows(rank, routing.rows.shape[0])
        layer0 = flux.moe.ag_scatter_gemm(case.x(rank), case.w1(rank), routing)
        layer1 = flux.moe.gemm_gather_rs(hidden, case.w2(rank), routing)
        return [*routing[:11], layer0[: int(routing.offsets[-1])], layer1]

    for number, case in enumerate(CASES[world_size]):
        ids, weights = case.routing(rank)
        for given in ((ids, weights), (ids.int(), weights.bfloat16()), (ids.t().contiguous().t(), weights)):
            go_straight(False)
            with Calls() as calls:
                dispatched = layer(case, *given)
            go_straight(True)
            with Calls() as later:
                direct = layer(case, *given)
            if calls.names != OPERATORS or later.names:
                return f"case {number}: the dispatcher saw {calls.names}, then {later.names}"
            wrong = "; ".join(filter(None, map(compare, direct, dispatched)))
            if wrong:
                return f"case {number}: {wrong}"
            places = [t.untyped_storage().data_ptr() for t in (*given, *direct) if t.numel()]
            if len(set(places)) < len(places) or any(t._is_view() for t in direct[:11]):
                return f"case {number}: a result shares its memory"
    # What needs a gradient goes through the dispatcher, unless nobody asks for it.
    ids, weights = case.routing(rank)
    weights.requires_grad_()
    with torch.no_grad(), Calls() as calls:
        direct = layer(case, ids, weights)
    if calls.names or any(t.requires_grad for t in direct):
        return f"without gradients the dispatcher saw {calls.names}"
    with Calls() as calls:
        direct = layer(case, ids, weights)
    if len(calls.names) != 3 or not (direct[10].requires_grad and direct[-1].requires_grad):
        return f"with gradients the dispatcher saw {calls.names}"
    return ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_past_the_dispatcher_give_the_same(world_size: int) -> None:
    assert spawn(without_dispatcher, world_size, backend="gloo") == [""] * world_size


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


def few_tokens_travel(rank: int, world_size: int) -> list[int]:
    """Rows of x that this rank has been sent under expert parallelism."""
    case = MoeCase((64, 64), 8, 8, 8, 1, ep_size=2)
    routing = flux.moe.route(*case.routing(rank), 8, ep_size=2)
    tp = replace(case, ep_size=1)
    everything = flux.moe.route(*tp.routing(rank), 8)
    return [int(routing.received[1 - rank]), int(everything.received[1 - rank])]


def test_under_expert_parallelism_only_needed_tokens_travel() -> None:
    for needed, all_of_them in spawn(few_tokens_travel, 2, backend="gloo"):
        assert 0 < needed < 64
        assert all_of_them == 64
