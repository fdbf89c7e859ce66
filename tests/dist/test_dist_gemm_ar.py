"""flux.gemm_ar and flux.all_reduce between GPUs."""

from __future__ import annotations

from typing import Any

import ar_workers
import pytest
from ranks import BACKENDS, SIZES, check_a_killed_rank_is_named, run


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_sums(world_size: int, backend: str) -> None:
    run(ar_workers.exact_sums, world_size, FLUX_SYMM_BACKEND=backend)


@pytest.mark.parametrize("world_size", SIZES)
def test_with_one_hardware_queue(world_size: int) -> None:
    run(ar_workers.exact_sums, world_size, CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rounded_sums", ()),
        ("unfused_and_composed", ()),
        ("many_shapes", (500, 0.005)),
        ("seconds_late", ()),
        ("graphs", (1000,)),
        ("streams", ()),
    ],
)
def test_scenario(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(ar_workers, name), world_size, *args)


@pytest.mark.parametrize("world_size", SIZES[1:])
def test_two_groups_at_the_same_time(world_size: int) -> None:
    run(ar_workers.two_groups, world_size)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("name", "args"), [("graphs", (30,)), ("many_shapes", (100, 0.005))])
def test_nvshmem_backend(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(ar_workers, name), world_size, *args, FLUX_SYMM_BACKEND="nvshmem")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("round_", range(10))
def test_a_killed_rank_is_named(round_: int) -> None:
    m = (16, 140, 1024)[round_ % 3]  # swap-AB tiles; ordinary ones, of which a CTA has one; several
    check_a_killed_rank_is_named("gemm_ar", ar_workers.victim, round_, m)
