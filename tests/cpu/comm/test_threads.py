"""Threads of one process make calls on one group in order of arrival; on different groups they run free."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import scenario_test
from dense_calls import is_exact

import flux
from flux._native import core
from flux.comm import workspace as workspaces
from flux.testing import GemmRsCase

THREADS = 8


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """work(0) to work(7) at the same time; raises what one of them raises."""
    results: list[Any] = [None] * THREADS
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def exact(rank: int, p: int, seed: int, group: Any = None, m: int = 40) -> bool:
    """One call, which of the operators and of what size depending on the seed."""
    if seed % 3 < 2:
        return is_exact(("gemm_rs", "ag_gemm")[seed % 3], seed, m, group=group)
    # So large that it is made of two calls, between which no other thread's may come.
    summed = GemmRsCase(512 * p, 6144, 4, p, torch.float32, seed=seed)
    x, weight, _ = summed.inputs(rank)
    total = flux.gemm_ar(x, weight, group=group)
    return torch.equal(total[:: 64 * p], summed.expected_sum()[:: 64 * p])


def one_group(rank: int, p: int) -> None:
    # The order of calls must be the same on all ranks: here any order is, as all threads make the same one.
    for seed in range(6):
        assert all(in_threads(lambda number, seed=seed: exact(rank, p, seed)))


def by_arrival(rank: int, p: int) -> None:
    """Calls are made in the order in which threads arrive. Rank 0's first one waits for rank 1, and the other
    seven threads for that one.
    """
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        assert all([exact(rank, p, 3 * seed, m=40 + seed) for seed in order])
        return

    def arrive(number: int) -> bool:
        time.sleep(0.1 * order.index(number))
        return exact(rank, p, 3 * number, m=40 + number)

    assert all(in_threads(arrive))


def many_groups(rank: int, p: int) -> None:
    """Threads on different groups do not wait for each other."""
    groups = [dist.new_group(list(range(p))) for _ in range(THREADS)]
    start = time.monotonic()

    def work(number: int) -> tuple[bool, float]:
        if number == 0 and rank == 1:
            time.sleep(3.0)
        right = all(exact(rank, p, 3 * seed + number % 2, groups[number]) for seed in range(5))
        return right, time.monotonic() - start

    rights, seconds = zip(*in_threads(work), strict=True)
    assert all(rights)
    assert seconds[0] > 3.0, "this group's peer came late"
    assert min(seconds[1:]) < 3.0, "the others did not wait for it"


def bad_thread(rank: int, p: int) -> None:
    """Bad calls of one thread do not disturb the others."""

    def work(number: int) -> bool:
        if number == 3:
            for _ in range(20):
                with pytest.raises(ValueError, match="weight"):
                    flux.gemm_rs(torch.ones(2 * p, 4), torch.ones(3, 5))
            return True
        return all(exact(rank, p, 0) for _ in range(3))

    assert all(in_threads(work))


def turns_of_groups(rank: int, p: int) -> None:
    """Destroyed groups take their turns along."""
    assert exact(rank, p, 0)
    before = len(workspaces.turns)
    for _ in range(2):
        group = dist.new_group(list(range(p)))
        assert exact(rank, p, 0, group)
        assert len(workspaces.turns) == before + 1
        dist.destroy_process_group(group)


test_threads = scenario_test([2], turns_of_groups, one_group, by_arrival, many_groups, bad_thread)


class Refusal(ValueError):
    """What all ranks raise together."""


def test_a_call_that_is_broken_off_is_remembered() -> None:
    turn = core.CallTurn((Refusal,))

    def fail(error: BaseException, opened: bool) -> None:
        if opened:
            turn.open()
        raise error

    assert turn.call(lambda a, b: a + b, 2, 3) == 5 and turn.broken_by is None
    with pytest.raises(KeyError):
        turn.call(fail, KeyError("x"), False)
    assert turn.broken_by is None, "peers have not heard of it"
    with pytest.raises(Refusal):
        turn.call(fail, Refusal("x"), True)
    assert turn.broken_by is None, "all ranks raise it"
    # A call may be made of others, and is broken off as one.
    with pytest.raises(KeyboardInterrupt):
        turn.call(lambda: turn.call(turn.open) or fail(KeyboardInterrupt(), False))
    assert turn.broken_by == "KeyboardInterrupt"
    turn.call(lambda: None)
    assert turn.broken_by == "KeyboardInterrupt", "until it is released"
    turn.forget()
    assert turn.broken_by is None
    # What peers have seen is complete.
    with pytest.raises(KeyError):
        turn.call(lambda: turn.open() or turn.close() or fail(KeyError("x"), False))
    assert turn.broken_by is None


def test_a_thread_that_waits_for_its_turn_can_be_interrupted() -> None:
    turn = core.CallTurn(())
    entered, leave = threading.Event(), threading.Event()
    holder = threading.Thread(target=turn.call, args=(lambda: entered.set() or leave.wait(),))
    holder.start()
    entered.wait()
    # What the keyboard does, in the middle of the wait.
    old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            turn.call(lambda: None)
    finally:
        signal.signal(signal.SIGALRM, old)
        leave.set()
        holder.join()
    assert turn.call(lambda: 7) == 7, "its place in the queue is free again"
