"""The benchmark of mixtures of experts: its rows, its data, and that every candidate runs on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flux.bench.cases import moe
from flux.bench.cases.common import Context
from flux.testing import spawn


def test_rows_are_those_of_the_models() -> None:
    mixtral = moe.problem("moe_layer0", "mixtral-8x7b", 8192)
    assert (mixtral.n, mixtral.k) == (28672, 4096)
    assert mixtral.local(4) == (16384, 7168, 4096)
    assert moe.problem("moe_layer1", "qwen3-235b", 2048).local(4) == (16384, 4096, 384)
    assert moe.problem("moe_layer1", "qwen3-235b", 2048, ep_size=4).local(4) == (4096, 4096, 1536)
    with pytest.raises(ValueError, match="mixtral-8x7b, .* got 'gpt'"):
        moe.problem("moe_layer0", "gpt", 1)


@pytest.mark.parametrize("load_std", [0.0, 0.032, 0.05])
def test_loads_are_spread_as_asked(load_std: float) -> None:
    problem = moe.MoeProblem("moe_layer0", "", "moe_layer0", 1, 1, 1, 8, 1, 1, load_std)
    ids = moe.choose_experts(problem, 20000, torch.Generator().manual_seed(0))
    share = torch.bincount(ids.flatten(), minlength=8) / len(ids)
    assert abs(float(share.std(correction=0)) - load_std) < 0.006
    hot = moe.MoeProblem("moe_layer0", "", "moe_layer0", 1, 1, 1, 8, 2, hot=True)
    assert (moe.choose_experts(hot, 100, torch.Generator()) == 0).any(1).all()


def run(rank: int, world_size: int) -> dict[str, list[str]]:
    context = Context(rank, world_size, world_size, torch.device("cpu"), torch.float32, dist.group.WORLD)
    names = {}
    for op in ("moe_layer0", "moe_layer1"):
        for ep_size in (1, world_size):
            problem = moe.problem(op, "tiny", 64, ep_size, load_std=0.05)
            assert moe.check(problem, context) == "exact"
            prepared = moe.prepare(problem, context)
            for candidate in prepared.candidates:
                candidate.call()
            names[op] = [candidate.role for candidate in prepared.candidates]
    return names


def test_every_candidate_runs() -> None:
    roles = ["flux", "gemm", "comm", "serial", "comm"]
    expected = {"moe_layer0": roles, "moe_layer1": roles}
    assert spawn(run, 2, backend="gloo") == [expected] * 2
