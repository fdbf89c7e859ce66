"""Ranks that die, come late or leave, on several nodes. nodes_faults.py has more cases."""

from __future__ import annotations

import os
import time
from typing import Any

import nodes_faults
import pytest
import torch
import torch.distributed as dist

import flux
from flux.comm import registry
from flux.comm.nodes.workspace import NodesWorkspace, Place, _Board
from flux.ops.ways import two_level
from flux.testing import RankFailure, spawn

ENV = {"FLUX_TIMEOUT_S": "2"}


@pytest.mark.parametrize(
    ("kind", "layout", "seed"),
    [
        ("killed rank", (2, 2), 1),
        ("killed rank", (3, 1), 2),
        ("killed node", (2, 2), 3),
        ("killed node", (3, 2), 4),
        ("late node", (2, 2), 5),
        ("late node", (2, 1), 6),
        ("terminated rank", (1, 3), 7),
        ("interrupted rank", (1, 2), 8),
        ("paused rank", (2, 1), 9),
    ],
)
def test_every_rank_raises_names_who_is_behind_and_goes_on(
    kind: str, layout: tuple[int, int], seed: int
) -> None:
    assert nodes_faults.wrong_with(kind, *layout, seed) == ""


class Store(dict[str, str]):
    """A key-value store."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_who_is_behind_is_at_the_end_of_the_chain() -> None:
    board = _Board(Store(), "here")
    board.write(0, Place(4, "exchange 1 of 1"))
    board.write(4, Place(5, "the launch for own rows"))
    assert board.first() == 4
    # Rank 0 waits for 4, which waits for 5, of which nobody has heard.
    assert board.follow(0, 4, "exchange 1 of 1", 0.0) == (5, "the launch for own rows")
    # Rank 5 comes late, and finds that rank 4 has given up waiting for it.
    board.write(5, Place(4, "the beginning of the call"))
    behind, where = board.follow(5, 4, "the beginning of the call", 0.0)
    assert behind == 4 and where == "the beginning of the call, which it has given up"
    # Two that wait for each other end too.
    assert board.follow(0, 4, "exchange 1 of 1", 0.0)[0] == 4


def test_a_lost_store_is_no_second_failure() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    board = _Board(Gone(), "here")
    board.write(0, Place(1, "exchange 1 of 1"))
    assert board.first() is None
    assert board.follow(0, 1, "exchange 1 of 1", 0.0) == (1, "exchange 1 of 1")


def timed_out(world_size: int) -> tuple[int, str]:
    """The peer that a call has waited for in vain, and the error."""
    with pytest.raises(flux.CommTimeoutError) as caught:
        flux.gemm_rs(torch.ones(world_size, 8), torch.ones(8, 8))
    return caught.value.peer, str(caught.value)


def never_comes(rank: int, world_size: int) -> tuple[int, str]:
    if rank == 3:
        time.sleep(4.0)
        os._exit(0)
    return timed_out(world_size)


def test_a_rank_that_never_comes_to_the_first_call() -> None:
    told = spawn(never_comes, 4, ranks_per_node=2, env=ENV, may_die=[3])
    assert isinstance(told[3], RankFailure)
    for peer, message in told[:3]:
        assert peer == 3 and "to meet on the host" in message


def dies_between_the_meetings(rank: int, world_size: int) -> tuple[int, str]:
    """After the ranks have met, before the groups of nodes and rails are made."""
    if rank == 2:
        NodesWorkspace.join = lambda *_: os._exit(0)  # type: ignore[method-assign, assignment]
    return timed_out(world_size)


def test_a_rank_that_dies_while_groups_are_made() -> None:
    for told in spawn(dies_between_the_meetings, 4, ranks_per_node=2, env=ENV, may_die=[2]):
        assert isinstance(told, RankFailure) or told[0] in (2, 3), told


def checks(rank: int, world_size: int) -> str:
    """Ranks 0 and 2 give up; rank 1, which has nothing to wait for, learns it from flux.check."""
    group = dist.group.WORLD
    assert group is not None
    flux.all_reduce(torch.ones(4))
    flux.check()
    dist.barrier()
    workspace: Any = registry.get(group, torch.device("cpu"), "test")
    if rank == 0:
        workspace._failed("gemm_rs", 3, "exchange 1 of 1", "")
    dist.barrier()
    try:
        flux.check()
    except flux.CommTimeoutError as error:
        return error.detail
    return "no error"


def test_check_tells_that_another_rank_has_given_up() -> None:
    *others, behind = spawn(checks, 4, ranks_per_node=2, env=ENV)
    assert others == ["Behind is node 1, rank 3, in exchange 1 of 1."] * 3
    assert behind == "Behind is node 0, rank 0, in a call, which it has given up."


def leaves_a_call(rank: int, world_size: int) -> str:
    """An exception in the middle of a call, which peers have seen half of."""
    flux.all_reduce(torch.ones(4))
    if rank == 1:

        def fails(self: Any) -> None:
            raise MemoryError

        two_level.Sums.write = fails  # type: ignore[method-assign]
    try:
        flux.gemm_rs(torch.ones(64 * world_size, 8), torch.ones(8, 8))
        told = "exact"
    except MemoryError:
        told = "MemoryError"
    try:
        flux.gemm_rs(torch.ones(64 * world_size, 8), torch.ones(8, 8))
        return told
    except RuntimeError as error:
        return f"{told}, then {type(error).__name__}: {str(error)[:90]}"


def test_a_call_that_was_broken_off() -> None:
    told = spawn(leaves_a_call, 4, ranks_per_node=2, env=ENV)
    assert told[1].startswith("MemoryError, then RuntimeError: flux: an earlier call on group")
    assert "was broken off by MemoryError" in told[1]
    for rank in (0, 2, 3):
        assert told[rank].startswith("exact, then CommTimeoutError"), told[rank]
