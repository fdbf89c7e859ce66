"""flux.ag_gemm and flux.all_gather between GPUs."""

from __future__ import annotations

from typing import Any

import ag_workers
import pytest
from ranks import BACKENDS, SIZES, check_a_killed_rank_is_named, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_results(world_size: int, backend: str) -> None:
    run(ag_workers.exact_results, world_size, FLUX_SYMM_BACKEND=backend)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("name", "args"), [("exact_results", ()), ("many_shapes", (100, 0.005))])
def test_with_one_hardware_queue(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    """Copies and the kernel that waits for them then stand in one line."""
    run(getattr(ag_workers, name), world_size, *args, CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("several_weights", ()),
        ("unfused_kinds", ()),
        ("many_shapes", (500, 0.005)),
        ("seconds_late", ()),
        ("graphs", ()),
        ("streams", ()),
    ],
)
def test_scenario(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(ag_workers, name), world_size, *args)


@pytest.mark.parametrize("world_size", SIZES[1:])
def test_two_groups_at_the_same_time(world_size: int) -> None:
    run(ag_workers.two_groups, world_size)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("name", "args"), [("graphs", ()), ("many_shapes", (100, 0.005))])
def test_nvshmem_backend(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(ag_workers, name), world_size, *args, FLUX_SYMM_BACKEND="nvshmem")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("round_", range(10))
def test_a_killed_rank_is_named(round_: int) -> None:
    # Shards of 2 MiB, which the kernel pushes, and of 16 MiB, which copy engines carry.
    k = 512 if round_ % 4 < 2 else 4096
    check_a_killed_rank_is_named("ag_gemm", ag_workers.victim, round_, k)
