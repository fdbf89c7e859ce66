"""Where vectors and chunks go, enumerated: the same functions that the kernels run."""

from __future__ import annotations

import itertools

import pytest

from flux._native import core
from flux.comm.workspace import round_up

MODES = [core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT, core.ExchangeMode.SCATTER]


def owner(exchange: core.Exchange, row: int, column: int, receiver: int) -> int:
    """Who sums an element; in a one-shot exchange everybody does, also the receiver."""
    if exchange.mode == core.ExchangeMode.ONE_SHOT:
        return receiver
    by_row = exchange.mode == core.ExchangeMode.SCATTER
    return row // exchange.shard if by_row else column // exchange.shard


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_vector_has_one_place_at_its_owner(mode: core.ExchangeMode, world_size: int) -> None:
    for rows, n in itertools.product((1, 2, 5), (8, 24, 136)):
        m = rows * world_size if mode == core.ExchangeMode.SCATTER else rows
        exchange = core.exchange(m, n, world_size, mode)
        for receiver in range(world_size):
            places = set()
            owned = 0
            for row, column in itertools.product(range(m), range(0, n, 8)):
                if owner(exchange, row, column, receiver) != receiver:
                    continue
                owned += 1
                for source in range(world_size):
                    places.add(exchange.contribution(source, receiver, row, column))
            assert len(places) == owned * world_size, "two vectors share a place"
            assert all(place % 16 == 0 and 0 <= place < exchange.contribution_bytes for place in places)
            if mode == core.ExchangeMode.TWO_SHOT:
                assert owned == m * exchange.columns_of(receiver) // 8
        if mode == core.ExchangeMode.TWO_SHOT:
            results = {exchange.result(row, column) for row in range(m) for column in range(0, n, 8)}
            assert len(results) == m * n // 8
            assert min(results) >= exchange.contribution_bytes and max(results) + 16 <= exchange.bytes


@pytest.mark.parametrize("mode", [core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT])
def test_whole_rows_are_dealt_to_ranks(mode: core.ExchangeMode) -> None:
    for m, n, world_size in itertools.product((1, 5, 8), (8, 136), (1, 2, 3, 8)):
        dealt = core.row_exchange(m, n, world_size, mode)
        sizes = [dealt.columns_of(rank) for rank in range(world_size)]
        if mode == core.ExchangeMode.TWO_SHOT:
            assert all(size % n == 0 for size in sizes) and sum(sizes) == m * n
            assert max(sizes) == -(-m // world_size) * n
        room = core.exchange(round_up(m, world_size), n, world_size, mode)
        assert dealt.bytes <= room.bytes, "what plans reserve"


def test_small_sums_take_one_shot_and_large_ones_two() -> None:
    modes = [core.all_reduce_mode(m, 8192, 4) for m in (1, 8, 64, 1024)]
    assert modes[0] == core.ExchangeMode.ONE_SHOT and modes[-1] == core.ExchangeMode.TWO_SHOT
    assert modes == sorted(modes, key=int), "it never goes back"
    assert core.all_reduce_mode(1024, 8192, 2) == core.ExchangeMode.ONE_SHOT, (
        "two ranks send as much either way"
    )
    alone = [core.all_reduce_mode(1, elements, 2) for elements in (8, 1 << 20, 1 << 21, 1 << 24)]
    assert alone == [core.ExchangeMode.ONE_SHOT] * 2 + [core.ExchangeMode.TWO_SHOT] * 2


@pytest.mark.parametrize(("m", "n", "world_size"), [(0, 8, 2), (1, 12, 2), (3, 8, 2), (1, 8, 9)])
def test_bad_exchanges_are_refused(m: int, n: int, world_size: int) -> None:
    with pytest.raises(ValueError):
        core.exchange(m, n, world_size, core.ExchangeMode.SCATTER)


def test_chunks_cover_a_slot() -> None:
    for count, tiles in [(1, 1), (1, 7), (3, 7), (4, 64), (7, 7)]:
        chunks, found = core.gemm_rs_chunks(count, tiles)
        assert found == sorted(found) and len(chunks) == count and len(found) == tiles
        assert chunks == [(found.index(chunk), found.count(chunk)) for chunk in range(count)]


@pytest.mark.parametrize("cluster", [1, 2, 3])
def test_carried_tiles_come_shard_by_shard_and_their_owner_last(cluster: int) -> None:
    for m, n, world_size, rank in [(4 * 1024, 8192, 4, 1), (3 * 300, 520, 3, 2), (2 * 128, 64, 2, 0)]:
        config = 1
        tiles = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, 4, copied=True)
        turns = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, 4)
        assert len(set(tiles)) == len(tiles) and set(tiles) == set(turns)
        remote = [(owner - rank) % world_size for owner, _, _ in tiles if owner != rank]
        if m // world_size >= 1024:
            assert remote == sorted(remote)
        assert [owner for owner, _, _ in tiles][len(remote) :] == [rank] * (len(tiles) - len(remote))


def test_copy_engines_carry_what_the_link_would_hold_up() -> None:
    attention, mlp = (8192, 8192, 2048), (8192, 8192, 7168)
    assert core.gemm_rs_copy_chunks(*attention, 4) == 4
    assert core.gemm_rs_copy_chunks(*mlp, 4) == 0, "there is time enough"
    assert core.gemm_rs_copy_chunks(4096, 8192, 2048, 4) == 0, "too small for a copy engine"
