"""flux.moe between GPUs: exact results for every layout, skew and size."""

from __future__ import annotations

import moe_workers
import pytest
from ranks import SIZES, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("first", [0, 50, 100])
def test_random_cases(world_size: int, first: int) -> None:
    run(moe_workers.random_cases, world_size, first, 50)


@pytest.mark.parametrize("world_size", SIZES)
def test_skewed_experts(world_size: int) -> None:
    run(moe_workers.skews, world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_graph_replay(world_size: int) -> None:
    run(moe_workers.graphs, world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_nothing_is_read_on_the_host(world_size: int) -> None:
    run(moe_workers.without_synchronisation, world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_experts_of_vllm(world_size: int) -> None:
    run(moe_workers.vllms_experts, world_size)
