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

import flux
from flux._native import core
from flux.comm import registry
from flux.testing import AgGemmCase, GemmRsCase, spawn

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
    if seed % 3 == 0:
        scatter = GemmRsCase(p * m, 24, 16, p, seed=seed)
        x, weight, _ = scatter.inputs(rank)
        return torch.equal(flux.gemm_rs(x, weight, group=group), scatter.expected(rank))
    if seed % 3 == 1:
        gather = AgGemmCase(p * m, 24, 16, p, seed=seed)
        x, weight, _ = gather.inputs(rank)
        return torch.equal(flux.ag_gemm(x, weight, group=group), gather.expected(rank))
    # So large that it is made of two calls, between which no other thread's may come.
    summed = GemmRsCase(512 * p, 6144, 4, p, torch.float32, seed=seed)
    x, weight, _ = summed.inputs(rank)
    total = flux.gemm_ar(x, weight, group=group)
    return torch.equal(total[:: 64 * p], summed.expected_sum()[:: 64 * p])


def one_group(rank: int, p: int) -> list[bool]:
    # The order of calls must be the same on all ranks: here any order is, as all threads make the same one.
    results = []
    for seed in range(6):
        results += in_threads(lambda number, seed=seed: exact(rank, p, seed))
    return results


def test_eight_threads_on_one_group() -> None:
    for results in spawn(one_group, 2, backend="gloo"):
        assert results == [True] * 6 * THREADS


def by_arrival(rank: int, p: int) -> list[bool]:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        return [exact(rank, p, 3 * seed, m=40 + seed) for seed in order]

    def arrive(number: int) -> bool:
        time.sleep(0.1 * order.index(number))
        return exact(rank, p, 3 * number, m=40 + number)

    return in_threads(arrive)


def test_calls_are_made_in_the_order_in_which_threads_arrive() -> None:
    # Rank 0's first call waits for rank 1, and the other seven threads for that one.
    for results in spawn(by_arrival, 2, backend="gloo", env={"FLUX_TIMEOUT_S": "30"}):
        assert results == [True] * THREADS


def many_groups(rank: int, p: int) -> tuple[list[bool], list[float]]:
    groups = [dist.new_group(list(range(p))) for _ in range(THREADS)]
    start = time.monotonic()

    def work(number: int) -> tuple[bool, float]:
        if number == 0 and rank == 1:
            time.sleep(3.0)
        right = all(exact(rank, p, 3 * seed + number % 2, groups[number]) for seed in range(5))
        return right, time.monotonic() - start

    results = in_threads(work)
    return [right for right, _ in results], [seconds for _, seconds in results]


def test_threads_on_different_groups_do_not_wait_for_each_other() -> None:
    for rights, seconds in spawn(many_groups, 2, backend="gloo"):
        assert rights == [True] * THREADS
        assert seconds[0] > 3.0, "this group's peer came late"
        assert min(seconds[1:]) < 3.0, "the others did not wait for it"


def bad_thread(rank: int, p: int) -> list[bool]:
    def work(number: int) -> bool:
        if number == 3:
            for _ in range(20):
                with pytest.raises(ValueError, match="weight"):
                    flux.gemm_rs(torch.ones(2 * p, 4), torch.ones(3, 5))
            return True
        return all(exact(rank, p, 0) for _ in range(3))

    return in_threads(work)


def test_bad_calls_of_one_thread_do_not_disturb_the_others() -> None:
    for results in spawn(bad_thread, 2, backend="gloo"):
        assert results == [True] * THREADS


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


def test_only_an_interrupt_breaks_a_call_off_that_is_made() -> None:
    turn = core.CallTurn((Refusal,))

    def call_and_raise(error: BaseException) -> None:
        turn.call(turn.open)
        raise error

    with pytest.raises(KeyError):
        turn.hold(call_and_raise, KeyError("of a hook"))
    assert turn.broken_by is None
    with pytest.raises(KeyboardInterrupt):  # its caller may make the call again, which peers do not
        turn.hold(call_and_raise, KeyboardInterrupt())
    assert turn.broken_by == "KeyboardInterrupt"
    turn.forget()
    # An exception of the call itself; and one of a call of others, between two of them.
    for inner, outer in ((turn.call, turn.hold), (turn.hold, turn.call)):
        with pytest.raises(ValueError, match="own"):
            outer(lambda make=inner: make(lambda: turn.open() or call_and_raise(ValueError("own"))))
        assert turn.broken_by == "ValueError"
        turn.forget()


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


def test_destroyed_groups_take_their_turns_along() -> None:
    assert spawn(turns_of_groups, 2, backend="gloo") == [[1, 2, 2]] * 2


def turns_of_groups(rank: int, p: int) -> list[int]:
    counts = []
    assert exact(rank, p, 0)
    counts.append(len(registry._turns))
    for _ in range(2):
        group = dist.new_group(list(range(p)))
        assert exact(rank, p, 0, group)
        counts.append(len(registry._turns))
        dist.destroy_process_group(group)
    return counts
