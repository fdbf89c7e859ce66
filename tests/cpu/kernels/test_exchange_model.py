"""Exchanges without signals, and transport by copy engines: no order of events that the protocols permit
deadlocks, overwrites what has not been read, or reads anything twice. And the proof finds planted faults.
"""

from __future__ import annotations

import random

import pytest
from exchange_model import FAULTS, Call, Deadlock, Protocol, Unordered, Wrong, WrongData, prove

ONE_SHOT, TWO_SHOT, SCATTER = 0, 1, 2


def exchanges(world_size: int, rng: random.Random, number: int) -> list[Call]:
    """Sums of any shape and mode, among them two-shot ones in which some ranks own no columns."""
    calls = []
    for _ in range(number):
        mode = rng.choice((ONE_SHOT, TWO_SHOT, SCATTER))
        m = rng.randint(1, 2) * (world_size if mode == SCATTER else 1)
        calls.append(Call("exchange", m=m, n=8 * rng.randint(1, 3), mode=mode))
    return calls


def any_calls(world_size: int, rng: random.Random, number: int) -> list[Call]:
    calls = []
    for _ in range(number):
        op = rng.choice(("exchange", "stored", "staged", "gathered"))
        pieces = rng.randint(1, 4)
        other = Call(op, pieces=pieces, chunks=rng.randint(1, pieces), ctas=rng.randint(1, 3))
        calls.append(exchanges(world_size, rng, 1)[0] if op == "exchange" else other)
    return calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", [ONE_SHOT, TWO_SHOT, SCATTER])
def test_sums_of_one_mode_back_to_back(world_size: int, mode: int) -> None:
    for columns in (8, 16, 40):  # 8: two-shot, all but one rank own nothing
        m = world_size if mode == SCATTER else 1
        prove(Protocol(world_size, [Call("exchange", m=m, n=columns, mode=mode)] * 4).events)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_of_all_shapes_and_modes(world_size: int) -> None:
    for seed in range(20):
        prove(Protocol(world_size, exchanges(world_size, random.Random(seed), 4)).events)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", ["staged", "gathered"])
def test_copy_engines(world_size: int, op: str) -> None:
    for pieces, chunks, ctas in [(1, 1, 1), (3, 2, 1), (3, 2, 2), (4, 4, 3)]:
        prove(Protocol(world_size, [Call(op, pieces=pieces, chunks=chunks, ctas=ctas)] * 4).events)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_kinds_of_calls_between_each_other(world_size: int) -> None:
    for seed in range(25):
        prove(Protocol(world_size, any_calls(world_size, random.Random(seed), 5)).events)


ONE_VECTOR, ONE_TILE, ONE_BLOCK = Call("exchange"), Call("staged", pieces=1), Call("gathered", pieces=1)
PLANTED = [
    ("no put-back", ONE_VECTOR, WrongData),
    *(("one buffer", call, Unordered) for call in (ONE_VECTOR, ONE_TILE, ONE_BLOCK)),
    ("no reset", ONE_TILE, WrongData),
    ("reset before wait", ONE_TILE, Unordered),
    *(
        (fault, call, Unordered)
        for fault in ("signal before copy", "no join")
        for call in (ONE_TILE, ONE_BLOCK)
    ),
    ("own tiles first", ONE_TILE, Deadlock),
]


@pytest.mark.parametrize(("fault", "call", "refuted"), PLANTED)
def test_planted_faults_are_found(fault: str, call: Call, refuted: type[Wrong]) -> None:
    for world_size in (2, 3):
        with pytest.raises(refuted):
            prove(Protocol(world_size, [call] * 3, fault).events)


def test_words_that_change_their_source_are_found() -> None:
    """From three ranks on, a source that is one call ahead passes for another one."""
    calls = [Call("stored", pieces=1), Call("stored", pieces=2)] * 2
    prove(Protocol(3, calls).events)
    with pytest.raises(Unordered):
        prove(Protocol(3, calls, "words by call").events)


def test_every_fault_is_planted() -> None:
    assert {fault for fault, *_ in PLANTED} == set(FAULTS) - {"words by call"}
