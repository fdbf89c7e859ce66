"""Dense collectives between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dist_workers
import pytest
from ranks import BACKENDS, SIZES, check_a_killed_rank_is_named, run

OPS = ("gemm_rs", "ag_gemm", "gemm_ar")
# Captured calls: those of ag_gemm are among calls of gemm_rs.
GRAPHS: dict[str, Callable[..., list[str]]] = {
    "ag_gemm": dist_workers.graphs_of_ag_gemm,
    "gemm_ar": dist_workers.graphs_of_gemm_ar,
}
ONLY: dict[str, list[Callable[..., list[str]]]] = {
    "gemm_rs": [partial(dist_workers.unfused_kinds, op="gemm_rs")],
    "ag_gemm": [partial(dist_workers.unfused_kinds, op="ag_gemm")],
    "gemm_ar": [dist_workers.rounded_sums, dist_workers.unfused_and_composed],
}
# m, n, k of calls in the middle of which a rank is killed, by round. ag_gemm: shards of 2 MiB, which the
# kernel pushes, and of 16 MiB, which copy engines carry. gemm_ar: swap-AB tiles; ordinary ones, one or more
# of a CTA.
KILLED = {
    "gemm_rs": [(4096, 4096, 512)],
    "ag_gemm": [(4096, 1024, 512)] * 2 + [(4096, 1024, 4096)] * 2,
    "gemm_ar": [(m, 4096, 2048) for m in (16, 140, 1024)],
}
each_op = pytest.mark.parametrize("op", OPS)
each_size = pytest.mark.parametrize("world_size", SIZES)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_op
@each_size
@each_backend
def test_exact(op: str, world_size: int, backend: str) -> None:
    run(dist_workers.exact, world_size, op, FLUX_SYMM_BACKEND=backend)


@each_op
@each_size
def test_with_one_hardware_queue(op: str, world_size: int) -> None:
    """Copies and the kernel that waits for them then stand in one line."""
    run(dist_workers.exact, world_size, op, CUDA_DEVICE_MAX_CONNECTIONS="1")
    run(dist_workers.many_shapes, world_size, op, 100, 0.005, CUDA_DEVICE_MAX_CONNECTIONS="1")


@each_op
@each_size
@pytest.mark.parametrize(
    ("name", "args"), [("many_shapes", (500, 0.005)), ("seconds_late", ()), ("streams", ())]
)
def test_scenario(op: str, world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(getattr(dist_workers, name), world_size, op, *args)


@each_op
@each_size
def test_what_only_this_operator_has(op: str, world_size: int) -> None:
    for worker in ONLY[op]:
        run(worker, world_size)


@pytest.mark.parametrize("op", GRAPHS)
@each_size
@each_backend
def test_graphs(op: str, world_size: int, backend: str) -> None:
    run(GRAPHS[op], world_size, 1000 if backend == "cuda" else 30, FLUX_SYMM_BACKEND=backend)


@each_op
@each_size
def test_nvshmem_backend(op: str, world_size: int) -> None:
    run(dist_workers.many_shapes, world_size, op, 100, 0.005, FLUX_SYMM_BACKEND="nvshmem")


@each_op
@each_size
def test_two_groups_at_the_same_time(op: str, world_size: int) -> None:
    if world_size > 2:
        run(dist_workers.two_groups, world_size, op)


@each_op
@pytest.mark.gpus(2)
@pytest.mark.parametrize("round_", range(10))
def test_a_killed_rank_is_named(op: str, round_: int) -> None:
    sizes = KILLED[op][round_ % len(KILLED[op])]
    check_a_killed_rank_is_named(op, dist_workers.victim, round_, op, *sizes)
