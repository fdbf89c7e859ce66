"""What the tests between GPUs have in common: how ranks start, and what must follow when one is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from flux.testing import RankFailure, spawn

SIZES = [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4, 8)]
BACKENDS = ["cuda", "nvshmem"]
TIMEOUT_S = 2.0


def run(worker: Callable[..., list[str]], world_size: int, *args: Any, **env: str) -> None:
    """Every rank runs `worker`, which returns what went wrong; `env` is added to its environment."""
    results = spawn(worker, world_size, *args, env=env, timeout_s=300)
    assert results == [[]] * world_size


def check_a_killed_rank_is_named(op: str, victim: Callable[..., Any], round_: int, *args: Any) -> None:
    """One of two ranks kills itself in a call of `op`, after another delay in each round."""
    world_size, dying = 2, round_ % 2
    delay_s = 0.0 if round_ % 3 == 0 else 0.01 * round_
    results = spawn(
        victim,
        world_size,
        dying,
        delay_s,
        *args,
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
        # gemm_ar may run in parts.
        assert error.op == op or (op, error.op) == ("gemm_ar", "all_reduce")
        assert (error.rank, error.peer) == (1 - dying, dying)
    assert told["seconds"] < TIMEOUT_S + 5
    assert told["again"] < 0.5, "later calls must not wait again"
