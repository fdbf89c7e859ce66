"""flux.gemm_ar and flux.all_reduce between GPUs."""

from __future__ import annotations

import signal
from typing import Any

import ar_workers
import pytest

from flux.testing import RankFailure, spawn

SIZES = [pytest.param(2, marks=pytest.mark.gpus(2)), pytest.param(4, marks=pytest.mark.gpus(4))]
BACKENDS = ["cuda", "nvshmem"]
TIMEOUT_S = 2.0


def run(name: str, world_size: int, *args: Any, **env: str) -> None:
    results = spawn(getattr(ar_workers, name), world_size, *args, env=env, timeout_s=300)
    assert results == [[]] * world_size


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_sums(world_size: int, backend: str) -> None:
    run("exact_sums", world_size, FLUX_SYMM_BACKEND=backend)


@pytest.mark.parametrize("world_size", SIZES)
def test_with_one_hardware_queue(world_size: int) -> None:
    run("exact_sums", world_size, CUDA_DEVICE_MAX_CONNECTIONS="1")


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
    run(name, world_size, *args)


@pytest.mark.gpus(4)
def test_two_groups_of_two_at_the_same_time() -> None:
    run("two_groups", 4)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(("name", "args"), [("graphs", (30,)), ("many_shapes", (100, 0.005))])
def test_nvshmem_backend(world_size: int, name: str, args: tuple[Any, ...]) -> None:
    run(name, world_size, *args, FLUX_SYMM_BACKEND="nvshmem")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("round_", range(10))
def test_a_killed_rank_is_named(round_: int) -> None:
    world_size, dying = 2, round_ % 2
    m = 16 if round_ % 4 < 2 else 512
    delay_s = 0.0 if round_ % 3 == 0 else 0.01 * round_
    results = spawn(
        ar_workers.victim,
        world_size,
        dying,
        delay_s,
        m,
        backend="gloo",
        env={"FLUX_TIMEOUT_S": str(TIMEOUT_S)},
        timeout_s=120,
        may_die={dying},
    )
    assert isinstance(results[dying], RankFailure)
    assert results[dying].exit_code == -signal.SIGKILL
    told = results[1 - dying]
    assert len(told["errors"]) == 3, "the calls, a later call and check() must raise"
    for error in told["errors"]:
        assert (error.op, error.rank, error.peer) == ("gemm_ar", 1 - dying, dying)
    assert told["seconds"] < TIMEOUT_S + 5
    assert told["again"] < 0.5, "later calls must not wait again"
