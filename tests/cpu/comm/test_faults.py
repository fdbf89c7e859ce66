"""What goes wrong between ranks ends in an error that says what, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_calls import is_exact
from refusals import said

import flux
from flux._native import core
from flux.comm import shm
from flux.comm.cpu import CpuWorkspace
from flux.testing import GemmRsCase, RankFailure, spawn
from flux.testing.moe_data import MoeCase

TIMEOUT_S = 1.0
ENV = {"FLUX_TIMEOUT_S": str(TIMEOUT_S)}
SHM = Path("/dev/shm")
MODES = {"one-shot": core.ExchangeMode.ONE_SHOT, "two-shot": core.ExchangeMode.TWO_SHOT}


@pytest.fixture
def own_shm() -> Iterator[Path]:
    """A folder for the segments of a test's ranks, which must be empty at its end."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        yield Path(folder)
        assert not os.listdir(folder), "shared memory was left behind"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def call_of(op: str, rank: int, p: int) -> Callable[[], bool]:
    """A call of an operator, which tells whether its result is right."""
    name, _, mode = op.partition(" ")
    if name.startswith("moe."):
        return expert_call(name.removeprefix("moe."), rank, p)
    if mode:
        core.all_reduce_mode = lambda m, n, p, *_: MODES[mode]
    sizes = (30, 72, 16) if mode else (400, 520, 16)
    return partial(is_exact, name, 0, *sizes, dtypes=(torch.bfloat16,))


def expert_call(op: str, rank: int, p: int) -> Callable[[], bool]:
    case = MoeCase((300,) * p, 600, 16, 6, 2, ep_size=1 if op == "route" else p)
    route = partial(flux.moe.route, *case.routing(rank), 6, ep_size=case.ep_size)
    routing, expected = route(), case.layer0(rank)
    hidden = case.hidden_rows(rank, routing.rows.shape[0])
    calls: dict[str, Callable[[], bool]] = {
        "route": lambda: torch.equal(route().rows, routing.rows),
        "ag_scatter_gemm": lambda: torch.equal(
            flux.moe.ag_scatter_gemm(case.x(rank), case.w1(rank), routing)[: len(expected)], expected
        ),
        "gemm_gather_rs": lambda: torch.equal(
            flux.moe.gemm_gather_rs(hidden, case.w2(rank), routing), case.layer1(rank)
        ),
    }
    return calls[op]


def victim(
    rank: int, world_size: int, folder: Path, op: str, dying: int, after_signals: int, exit_hard: bool
) -> dict[str, Any]:
    shm._DIRECTORY = folder
    call = call_of(op, rank, world_size)
    assert call()
    dist.barrier()
    if rank == dying:
        send, sent = CpuWorkspace.signal, [0]

        def last_signals(self: CpuWorkspace, *args: Any) -> None:
            if sent[0] == after_signals:
                os._exit(7) if exit_hard else die()
            sent[0] += 1
            send(self, *args)

        CpuWorkspace.signal = last_signals  # type: ignore[method-assign]
    start = time.monotonic()
    told: list[flux.CommTimeoutError] = []
    for attempt in (call, call, flux.check):
        try:
            attempt()
        except flux.CommTimeoutError as error:
            told.append(error)
            if len(told) == 1:
                first_s = time.monotonic() - start
    again_s = time.monotonic() - start - first_s
    return {"errors": told, "first_s": first_s, "again_s": again_s}


# An operator, the rank that dies in its second call, and after how many signals. Two-shot, a rank signals
# twice to each of two peers: it dies sending contributions, or results. If it dies between two contributions,
# a peer that has its own may wait for one that has not, which is named there.
DEATHS = [("gemm_rs", number % 3, number) for number in range(6)]
DEATHS += [("ag_gemm", 0, 0), ("ag_gemm", 1, 4), ("all_gather", 2, 5)]
DEATHS += [("gemm_ar one-shot", 0, 0), ("gemm_ar one-shot", 1, 0), ("gemm_ar two-shot", 2, 1)]
DEATHS += [("gemm_ar two-shot", 1, 2), ("all_reduce two-shot", 0, 2)]
DEATHS += [(f"moe.{op}", 1, 1) for op in ("route", "ag_scatter_gemm", "gemm_gather_rs")]


@pytest.mark.parametrize(("op", "dying", "after"), DEATHS)
def test_a_rank_that_dies_in_the_middle_is_named(own_shm: Path, op: str, dying: int, after: int) -> None:
    exit_hard, timeout_s = after % 2 == 0, 3.0 if op.startswith("moe") else TIMEOUT_S
    given = (own_shm, op, dying, after, exit_hard)
    env = {"FLUX_TIMEOUT_S": str(timeout_s)}
    results = spawn(victim, 3, *given, env=env, backend="gloo", may_die={dying})
    assert isinstance(results[dying], RankFailure)
    assert results[dying].exit_code == (7 if exit_hard else -signal.SIGKILL)
    name, alive = op.split()[0], {0, 1, 2} - {dying}
    named = set()
    for rank in alive:
        assert len(results[rank]["errors"]) == 3, "the first call, a second one and check() must raise"
        for error in results[rank]["errors"]:
            named.add((rank, error.peer))
            assert (error.op, error.rank) == (name, rank)
            words = [name, f"rank {rank} ", f"peer {error.peer}", f"epoch {error.epoch}", "FLUX_TIMEOUT_S"]
            assert all(word in str(error) for word in words)
            assert name.startswith("moe.") or error.epoch == 2
            assert " " in op or error.seen == error.epoch, "it has begun the call"
        assert results[rank]["first_s"] < timeout_s + 5
        assert results[rank]["again_s"] < 0.5, "later calls must not wait again"
    indirectly = {(0, 1), (1, 2)}
    assert named == (indirectly if (op, after) == ("gemm_ar two-shot", 1) else {(r, dying) for r in alive})


def absent(rank: int, world_size: int) -> list[Any]:
    x, weight = torch.ones(world_size, 4), torch.ones(3, 4)
    if rank == 1:
        time.sleep(2.5)
        return []
    start = time.monotonic()
    try:
        flux.gemm_rs(x, weight)
    except flux.CommTimeoutError as error:
        return [error.op, error.peer, time.monotonic() - start]
    return []


def test_a_rank_that_never_comes_to_the_first_call_is_named() -> None:
    op, peer, seconds = spawn(absent, 2, env=ENV, backend="gloo")[0]
    assert (op, peer) == ("gemm_rs", 1)
    assert seconds < TIMEOUT_S + 1


def recovering(rank: int, world_size: int) -> list[str]:
    case = GemmRsCase(world_size * 10, 8, 16, world_size)
    x, weight, _ = case.inputs(rank)
    flux.gemm_rs(x, weight)
    told = []
    if rank == 1:
        time.sleep(2.0)  # misses the call: the others' tiles have arrived, but only this rank believes in it
    try:
        flux.gemm_rs(x, weight)
    except flux.CommTimeoutError as error:
        told.append(str(error))
    try:
        flux.release()
    except flux.CommTimeoutError:
        told.append("release")
    assert torch.equal(flux.gemm_rs(x, weight), case.expected(rank))
    return told


def test_release_makes_a_group_usable_again() -> None:
    env = {"FLUX_TIMEOUT_S": "1.5"}
    results = spawn(recovering, 3, env=env, backend="gloo")
    assert all("peer 1, epoch 2 (last seen from it: epoch 1)" in results[rank][0] for rank in (0, 2))


def reserving(rank: int, world_size: int) -> list[str]:
    bad = ({"max_m": 64 + rank}, {"slots": 2}, {"max_n": 0}, {"dtype": torch.int8}, {"device": "cuda:99"})
    return [said(flux.reserve, **{"max_m": 64, "max_n": 64, "max_k": 64, **each}) for each in bad]


def test_reserve_refuses() -> None:
    for told in spawn(reserving, 2, backend="gloo"):
        assert told[0].startswith("reserve: expected the same call") and "max_m=65" in told[0]
        assert told[1].startswith("reserve: slots: expected 1") and told[1].endswith("got 2")
        assert told[2] == "reserve: max_n: expected a positive size, got 0"
        assert told[3].startswith("reserve: dtype: expected") and told[3].endswith("got torch.int8")
        seen = torch.cuda.device_count()
        assert told[4] == f"reserve: device: expected a CUDA device (torch sees {seen} here), got cuda:99"


def interrupted(rank: int, world_size: int) -> list[str]:
    case = GemmRsCase(world_size * 10, 8, 16, world_size)
    x, weight, _ = case.inputs(rank)
    flux.gemm_rs(x, weight)
    if rank == 1:
        time.sleep(1.0)
        return []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    told = []
    start = time.monotonic()
    try:
        flux.gemm_rs(x, weight)
    except KeyboardInterrupt:
        told.append(f"{time.monotonic() - start:.1f}")
    try:
        flux.gemm_rs(x, weight)
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_a_wait_can_be_interrupted_from_the_keyboard() -> None:
    seconds, message = spawn(interrupted, 2, backend="gloo")[0]
    assert float(seconds) < 0.9
    assert "broken off by KeyboardInterrupt" in message and "flux.release" in message


def test_the_error_travels_between_processes() -> None:
    error = flux.CommTimeoutError("gemm_rs", 1, 2, 7, seen=5, tile=9, timeout_s=30.0, detail="Because.")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def dying_at_setup(rank: int, world_size: int, folder: Path) -> str:
    shm._DIRECTORY = folder
    if rank == 1:
        shm._open = lambda path, nbytes: die()  # type: ignore[assignment,return-value]
    try:
        flux.gemm_rs(torch.ones(world_size, 4), torch.ones(3, 4))
    except flux.CommTimeoutError as error:
        return f"{error.op} {error.peer}"
    return "no error"


def test_a_rank_that_dies_while_memory_is_set_up_leaves_none_behind(own_shm: Path) -> None:
    results = spawn(dying_at_setup, 3, own_shm, env=ENV, backend="gloo", may_die={1})
    assert results[0] == results[2] == "gemm_rs 1"
