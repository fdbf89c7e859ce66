"""flux.moe between GPUs: exact results for every layout, skew and size."""

from __future__ import annotations

from typing import Any

import moe_workers
import pytest

from flux.testing import spawn

SIZES = [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))]


def run(name: str, world_size: int, *args: Any, **env: str) -> None:
    results = spawn(getattr(moe_workers, name), world_size, *args, env=env, timeout_s=300)
    assert results == [[]] * world_size


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("first", [0, 50, 100])
def test_random_cases(world_size: int, first: int) -> None:
    run("random_cases", world_size, first, 50)


@pytest.mark.parametrize("world_size", SIZES)
def test_skewed_experts(world_size: int) -> None:
    run("skews", world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_nothing_is_read_on_the_host(world_size: int) -> None:
    run("without_synchronisation", world_size)
