"""What is tested of each dense collective between GPUs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import dist_workers
import pytest
from ranks import BACKENDS, SIZES, check_a_killed_rank_is_named, run


@pytest.mark.parametrize("world_size", SIZES)
class DenseTests:
    """Tests of an operator. Its own workers have `exact`, `graphs` and `ONLY`, what no other operator has."""

    op: str
    workers: ModuleType

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_exact(self, world_size: int, backend: str) -> None:
        run(self.workers.exact, world_size, FLUX_SYMM_BACKEND=backend)

    def test_with_one_hardware_queue(self, world_size: int) -> None:
        """Copies and the kernel that waits for them then stand in one line."""
        run(self.workers.exact, world_size, CUDA_DEVICE_MAX_CONNECTIONS="1")
        run(dist_workers.many_shapes, world_size, self.op, 100, 0.005, CUDA_DEVICE_MAX_CONNECTIONS="1")

    @pytest.mark.parametrize(
        ("name", "args"), [("many_shapes", (500, 0.005)), ("seconds_late", ()), ("streams", ())]
    )
    def test_scenario(self, world_size: int, name: str, args: tuple[Any, ...]) -> None:
        run(getattr(dist_workers, name), world_size, self.op, *args)

    def test_what_only_this_operator_has(self, world_size: int) -> None:
        for worker in self.workers.ONLY:
            run(worker, world_size)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_graphs(self, world_size: int, backend: str) -> None:
        run(self.workers.graphs, world_size, 1000 if backend == "cuda" else 30, FLUX_SYMM_BACKEND=backend)

    def test_nvshmem_backend(self, world_size: int) -> None:
        run(dist_workers.many_shapes, world_size, self.op, 100, 0.005, FLUX_SYMM_BACKEND="nvshmem")

    def test_two_groups_at_the_same_time(self, world_size: int) -> None:
        if world_size > 2:
            run(dist_workers.two_groups, world_size, self.op)


class Killed:
    """A rank is killed in the middle of calls.

    sizes: m, n, k of the calls, by round.
    """

    op: str
    sizes: list[tuple[int, int, int]]

    @pytest.mark.gpus(2)
    @pytest.mark.parametrize("round_", range(10))
    def test_a_killed_rank_is_named(self, round_: int) -> None:
        sizes = self.sizes[round_ % len(self.sizes)]
        check_a_killed_rank_is_named(self.op, dist_workers.victim, round_, self.op, *sizes)
