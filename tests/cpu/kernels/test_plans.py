"""Plans as the kernels and the CPU path walk them, and where vectors and chunks of exchanges go, enumerated:
nothing missing, nothing twice, no order that can deadlock.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from flux._native import core
from flux.comm.workspace import round_up

MODES = [core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT, core.ExchangeMode.SCATTER]
TUNING = Path(__file__).parents[3] / "benchmarks/results/tuning"
CONFIGS = [c.id for c in core.tile_configs()]
WIDEST = min(CONFIGS, key=lambda c: -core.tile_configs()[c].block_n)
NO_CLUSTER, CLUSTERS = 1, (1, 2, 3)  # csrc/gemm/plan.h: kNone, kPairM, kPairN
Order = list[list[Any]]
FIRST_SPLIT = 4  # of clusters: their CTAs share the K of a tile


def problems() -> list[tuple[int, int, int, int, int, int]]:
    """(world_size, m, n, config, cluster, group_m): edges and a random sample."""
    rng = random.Random(7)
    listed = []
    for world_size, cluster in itertools.product((1, 2, 3, 4, 8), CLUSTERS):
        listed.append((world_size, world_size, 1, CONFIGS[0], cluster, 1))
        for _ in range(25):
            m, n = rng.randint(1, 900) * world_size, rng.randint(1, 1500)
            config, group_m = rng.choice(CONFIGS), rng.choice((1, 2, 3, 8, 16))
            listed.append((world_size, m, n, config, cluster, group_m))
    return listed


def test_every_tile_is_computed_once_and_the_own_shard_last() -> None:
    for world_size, m, n, config, cluster, group_m in problems():
        layout = core.gemm_rs_layout(m, n, world_size, config)
        everything = set(itertools.product(*map(range, (world_size, layout.m_tiles, layout.n_tiles))))
        for rank in range(world_size):
            tiles = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, group_m)
            assert len(tiles) == len(everything)
            assert set(tiles) == everything
            owners = [owner for owner, _, _ in tiles]
            first_own = owners.index(rank)
            assert set(owners[first_own:]) == {rank}
            assert first_own == (world_size - 1) * layout.m_tiles * layout.n_tiles
            if world_size > 1:
                assert owners[0] == (rank + 1) % world_size


def test_both_ctas_of_a_cluster_send_or_own() -> None:
    """Half of a pair that waits for peers while the other still has to send would be a deadlock."""
    for world_size, m, n, config, cluster, group_m in problems():
        rank, size = world_size // 2, 1 if cluster == NO_CLUSTER else 2
        wanted = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, group_m)
        tiles = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, group_m, idle=True)
        assert [tile for tile in tiles if tile is not None] == wanted and len(tiles) % size == 0
        owners = [{tile[0] for tile in tiles[i:][:size] if tile} for i in range(0, len(tiles), size)]
        own = [rank in each for each in owners]
        assert own == sorted(own), "a remote tile behind an own one"
        assert all(each == {rank} or rank not in each and each for each in owners)
        assert size > 1 or None not in tiles


def test_slots_and_signals_do_not_overlap() -> None:
    for world_size, m, n, config, _, _ in problems():
        layout = core.gemm_rs_layout(m, n, world_size, config)
        block_n = core.tile_configs()[config].block_n
        assert layout.tile_bytes == 128 * block_n * 2
        tiles = list(itertools.product(range(layout.m_tiles), range(layout.n_tiles)))
        offsets = {layout.tile_offset(slot, *tile) for slot in range(world_size - 1) for tile in tiles}
        assert all(offset % layout.tile_bytes == 0 for offset in offsets)
        assert all(offset + layout.tile_bytes <= layout.slot_bytes for offset in offsets)
        assert len(offsets) == (world_size - 1) * len(tiles)
        assert layout.num_signals == (world_size - 1) * 2 * len(tiles)
        signals = {layout.signal_index(*tile, half) for tile in tiles for half in (0, 1)}
        assert signals == set(range(2 * len(tiles))), "the words of one slot are dense"
        for owner in range(world_size):
            sources = [layout.slot_index(source, owner) for source in range(world_size) if source != owner]
            assert sources == list(range(world_size - 1))


def test_every_tile_of_the_gathered_rows_is_computed_once_and_own_rows_first() -> None:
    for world_size, m, n, config, cluster, group_m in problems():
        layout = core.ag_gemm_layout(m, 8, world_size)
        n_tiles = -(-n // core.tile_configs()[config].block_n)
        everything = set(itertools.product(*map(range, (world_size, layout.row_blocks, n_tiles))))
        for rank in range(world_size):
            tiles = core.ag_gemm_tiles(m, n, world_size, rank, config, cluster, group_m)
            assert len(tiles) == len(everything)
            assert set(tiles) == everything
            own = layout.row_blocks * n_tiles
            assert {source for source, _, _ in tiles[:own]} == {rank}


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_rows_of_one_peer_after_the_other_where_the_weight_is_narrow(world_size: int, cluster: int) -> None:
    """In the order in which they arrive, so that no tile waits for a later peer than the one before it."""
    for blocks, group_m in ((4, 1), (4, 8), (12, 8), (16, 8), (24, 16)):
        m = 128 * blocks * world_size
        for rank in range(world_size):
            tiles = core.ag_gemm_tiles(m, 2560, world_size, rank, WIDEST, cluster, group_m)
            arrivals = [(rank - source) % world_size for source, _, _ in tiles]
            assert arrivals == sorted(arrivals)
    # Few rows of each, or a wide weight: groups of tiles with rows of several peers.
    for blocks, n in ((1, 2560), (2, 2560), (4, 3000 * world_size)):
        tiles = core.ag_gemm_tiles(128 * blocks * world_size, n, world_size, 0, WIDEST, 1, 16)
        assert len({source for source, _, _ in tiles[-2 * blocks :]}) > 1


def test_gathered_rows_and_their_signals_do_not_overlap() -> None:
    for world_size, m, k in ((2, 2, 8), (2, 600, 24), (3, 3 * 129, 1), (4, 4 * 128, 7), (8, 8 * 1000, 16)):
        layout = core.ag_gemm_layout(m, k, world_size)
        rows = m // world_size
        assert (layout.rows, layout.row_bytes, layout.row_blocks) == (rows, 2 * k, -(-rows // 128))
        starts = [layout.offset(slot, row) for slot in range(world_size - 1) for row in range(rows)]
        assert starts == [2 * k * i for i in range(len(starts))]
        assert layout.slot_bytes == 2 * k * len(starts)
        assert layout.num_signals == (world_size - 1) * layout.row_blocks
        for owner in range(world_size):
            sources = [layout.slot_index(source, owner) for source in range(world_size) if source != owner]
            assert sources == list(range(world_size - 1))


def test_a_tile_that_is_given_gets_a_cluster_that_has_a_kernel() -> None:
    """Where a caller names the tile shape alone, as emulated ranks do: K is split in plain GEMMs only, and of
    tiles that are compiled for it.
    """
    split = 0
    for m, n, k in ((512, 2560, 8192), (2, 8, 8192), (64, 136, 1024), (4096, 4096, 4096)):
        for tile in core.tile_configs():
            if tile.supports_keeping:
                plain = core.select_gemm(m, n, k, False, 132, tile.id)
                assert plain.cluster < FIRST_SPLIT or tile.supports_split
                split += plain.cluster >= FIRST_SPLIT
            for world_size in (2, 4):
                shape = (m * world_size, n, k, False, world_size, 132, tile.id)
                if tile.supports_sending:
                    assert core.select_gemm_rs(*shape).cluster < FIRST_SPLIT
                if tile.supports_gathering:
                    assert core.select_ag_gemm(*shape).cluster < FIRST_SPLIT
    assert split > 0, "no case of this test would split K"


FP8_TILES = {tile.id: tile for tile in core.tile_configs(1)}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("block_scales", [False, True])
def test_fp8_problems_get_fp8_tiles_that_promote_unless_they_may_be_fast(
    block_scales: bool, fast: bool
) -> None:
    operands = {"operand_bytes": 1, "block_scales": block_scales, "fast": fast}
    wide = []
    for m in (1, 16, 17, 100, 256, 300, 2048, 8192):
        for n, k in ((8, 16), (4096, 7168), (7168, 2048), (576, 7168)):
            choice = core.select_gemm(m, n, k, False, 132, **operands)
            assert choice.split > 0 or choice.config in FP8_TILES
            for world_size in (2, 8):
                for select in (core.select_gemm_rs, core.select_ag_gemm):
                    choice = select(m * world_size, n, k, False, world_size, 132, **operands)
                    tile = FP8_TILES[choice.config]
                    wide.append(tile.block_n)
                    assert tile.promotes or (fast and not block_scales)
    assert 256 in wide


def test_192_columns_are_chosen_where_they_were_measured_to_win_and_by_the_plain_gemm_only() -> None:
    wide, sent = sorted(
        (tile for tile in FP8_TILES.values() if tile.block_n == 192), key=lambda tile: -tile.stages
    )
    measured = {(256, 12288, 24576): True, (512, 4096, 7168): False}
    measured |= {(m, 8192, 14336): False for m in (256, 512, 2048)}
    for (m, n, k), wins in measured.items():
        choice = core.select_gemm(m, n, k, False, 132, operand_bytes=1)
        assert (choice.config == wide.id) == wins, choice.name
        assert choice.candidates[0][0].startswith(choice.name)
        assert any(name.startswith(wide.name) for name, _ in choice.candidates)
        gathers = core.select_ag_gemm(m, n, k, False, 2, 132, operand_bytes=1)
        assert not any(name.startswith(wide.name) for name, _ in gathers.candidates)
        with pytest.raises(ValueError, match="config"):
            core.select_ag_gemm(m, n, k, False, 2, 132, wide.id, operand_bytes=1)
        of_rows = core.select_gemm_rs(m, n, k, False, 2, 132, sent.id, operand_bytes=1)
        assert of_rows.config == sent.id and of_rows.candidates[0][0].startswith(sent.name)
        with pytest.raises(ValueError, match="config"):
            core.select_gemm(m, n, k, False, 132, sent.id, operand_bytes=1)
        with pytest.raises(ValueError, match="config"):
            core.select_gemm_rs(m, n, k, False, 2, 132, wide.id, operand_bytes=1)


def test_sums_in_the_launch_of_a_product_are_of_few_rows() -> None:
    for m in range(1, 300):
        if m > 256:
            with pytest.raises(ValueError, match="config"):
                core.select_gemm_ar(m, 4096, 2048, False, 132)
            continue
        choice = core.select_gemm_ar(m, 4096, 2048, False, 132)
        lowest = core.FIRST_SWAP_AB + 2  # those before it have 16 rows
        assert lowest <= choice.config < core.FIRST_SWAP_AB + core.NUM_SWAP_AB
        assert all(name.startswith("swap-ab 64x") for name, _ in choice.candidates)
        assert not any(name.startswith("swap-ab 64x16x") for name, _ in choice.candidates)
    for tile in core.tile_configs():
        with pytest.raises(ValueError, match="config"):
            core.select_gemm_ar(64, 4096, 2048, False, 132, tile.id)


def test_gemm_rs_takes_the_tile_that_promotes_pairs_where_it_was_measured_to_win() -> None:
    """Block scales are promoted one k-block at a time in every tile."""
    measured = {(2048, 8192, 14336): (256, 3), (8192, 8192, 14336): (192, 4)}
    measured |= {(m, 12288, 24576): (192, 4) for m in (2048, 8192)}
    for shape, best in measured.items():
        for block_scales in (False, True):
            how = {"operand_bytes": 1, "block_scales": block_scales}
            tile = FP8_TILES[core.select_gemm_rs(*shape, False, 2, 132, **how).config]
            assert (tile.block_n, tile.stages) == ((256, 3) if block_scales else best), (shape, block_scales)


def test_tiles_serve_only_their_operands() -> None:
    for tile in core.tile_configs(1):
        with pytest.raises(ValueError, match="config"):
            core.select_gemm(512, 512, 512, False, 132, tile.id)
        fits = tile.promotes
        for block_scales in (False, True) if fits else ():
            core.select_gemm(512, 512, 512, False, 132, 11, operand_bytes=1, block_scales=block_scales)
        if not fits:
            with pytest.raises(ValueError, match="config"):
                core.select_gemm(512, 512, 512, False, 132, tile.id, operand_bytes=1)
    with pytest.raises(ValueError, match="config"):
        core.select_gemm(512, 512, 512, False, 132, 0, operand_bytes=1)
    with pytest.raises(ValueError, match="transpose_weight"):
        core.select_gemm(512, 512, 512, True, 132, operand_bytes=1)
    with pytest.raises(ValueError, match="operand_bytes"):
        core.select_gemm(512, 512, 512, False, 132, operand_bytes=4)


@pytest.mark.parametrize("rows", [1, 7, 128, 300])
@pytest.mark.parametrize("columns", [1, 5])
def test_scales_travel_behind_their_rows(rows: int, columns: int) -> None:
    """Scales lie behind all slots, padded as TMA wants them; a block has one piece more."""
    k, world_size = 640, 4
    layout = core.ag_gemm_layout(rows * world_size, k, world_size, scale_columns=columns)
    assert layout.row_bytes == k and layout.scale_columns == columns
    padded = -(-rows // 4) * 4 * 4 * columns
    offsets = [layout.scale_offset(slot) for slot in range(world_size - 1)]
    assert offsets == [(world_size - 1) * rows * k + slot * padded for slot in range(world_size - 1)]
    assert layout.slot_bytes == (world_size - 1) * (rows * k + padded)
    assert all(offset % 16 == 0 for offset in offsets)
    plain = core.ag_gemm_layout(rows * world_size, k // 2, world_size)
    assert plain.slot_bytes == (world_size - 1) * rows * k and plain.scale_columns == 0


def test_tiles_for_few_rows_are_those_that_were_measured_to_be_the_best() -> None:
    measured = json.loads((TUNING / "2026-11-23-few-rows-1xH200.json").read_text())["rows"]
    losses, long_k, against_cublas = [], {}, []
    for shape in measured:
        choice = core.select_gemm(shape["m"], shape["n"], shape["k"], False, 132)
        chosen, best = shape["flux"][choice.candidates[0][0]], min(shape["flux"].values())
        losses.append(chosen / best)
        against_cublas.append(shape["cublas"] / chosen)
        if shape["k"] == 24576:
            long_k[shape["m"]] = losses[-1]
    assert len(losses) == 90
    assert max(losses) < 1.04
    # 256 rows are for ordinary tiles, single or in pairs: which is sooner differs from run to run.
    assert len(long_k) == 6 and long_k.pop(256) < 1.02
    assert max(long_k.values()) < 1.01, "the last round of a long K has the memory for itself"
    assert math.prod(losses) ** (1 / len(losses)) < 1.005
    assert math.prod(against_cublas) ** (1 / len(losses)) > 1.02


def test_the_time_of_the_tile_of_192_rows_is_that_which_was_measured() -> None:
    rows = json.loads((TUNING / "2026-11-23-ragged-rows-1xH200.json").read_text())["rows"]
    rows = [row for row in rows if row["part"] == "tile of 192 rows"]
    off: dict[int, list[float]] = {}
    for row in rows:
        times = dict(core.select_gemm(row["m"], row["n"], row["k"], False, 132).candidates)
        for split, name in ((1, "64x192"), (2, "64x192 split 2")):
            if name in row:
                over = math.log(row[name] / times[f"swap-ab 64x192x5 split {split}"])
                off.setdefault(row["m"], []).append(over)
    assert sorted(off) == [130, 144, 160, 176, 192] and {len(each) for each in off.values()} == {10}
    assert math.sqrt(sum(over**2 for each in off.values() for over in each) / 50) < 0.045
    assert all(abs(sum(each)) / 10 < 0.025 for each in off.values()), "for few and for many of its rows"


def test_selection_prefers_a_model_and_names_its_candidates() -> None:
    for world_size in (1, 2, 4):
        for transpose_weight in (False, True):
            for num_sms in (1, 2, 8, 78, 132):
                m, n, k = 512 * world_size, 1000, 512
                choice = (
                    core.select_gemm_rs(m, n, k, transpose_weight, world_size, num_sms)
                    if world_size > 1
                    else core.select_gemm(m, n, k, transpose_weight, num_sms)
                )
                assert choice.config in CONFIGS
                times = [time_us for _, time_us in choice.candidates]
                assert times == sorted(times)
                assert choice.time_us == pytest.approx(times[0])
                tile = core.tile_config(choice.config)
                assert tile.supports_transposed_weight or not transpose_weight
                assert tile.smem_bytes <= 232448


@pytest.mark.parametrize(
    ("rows", "k", "world_size", "size"),
    [
        (1, 4096, 2, 32 << 10),
        (1, 2**24, 2, 256 << 10),  # 128 such rows have 2**32 bytes, the gather of one of them was empty
        (130, 2**23 + 8, 2, 256 << 10),
        (127, 4104, 3, 65536),
        (129, 4096, 4, 65536),
        (300, 8, 8, 32 << 10),
    ],
)
def test_pieces_of_rows_cover_each_block_once(rows: int, k: int, world_size: int, size: int) -> None:
    layout = core.ag_gemm_layout(rows * world_size, k, world_size)
    peers = world_size - 1
    ends = dict.fromkeys(itertools.product(range(peers), range(layout.row_blocks)), 0)
    for index in itertools.count():
        piece = layout.piece(size, peers, index)
        if piece is None:
            break
        peer, block, offset, nbytes = piece
        if nbytes:
            assert offset == ends[peer, block] and 0 < nbytes <= size, piece
            ends[peer, block] += nbytes
        else:
            assert offset >= ends[peer, block], "only the last block of a shard is shorter"
            assert block == layout.row_blocks - 1
    assert ends == {(peer, block): min(128, rows - 128 * block) * layout.row_bytes for peer, block in ends}


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
