"""Not all CTAs of a launch need to be resident: another kernel may hold SMs, for as long as it likes.

A rank's kernel is a set of clusters that draw tiles in order. A remote tile is sent and done; an own tile
waits for every peer's part of it; a cluster leaves when nothing is left to draw, and only then a waiting one
gets in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flux._native import core

Tile = tuple[int, int, int]  # owner, m and n inside the owner's shard

M_TILES, N_TILES, CLUSTERS = 2, 16, 20
CONFIG = next(c for c in core.tile_configs() if c.block_n == 128)


@dataclass
class Rank:
    order: list[Tile]
    resident: int
    first_is_dealt: bool
    drawn: int = 0
    held: dict[int, Tile] = field(default_factory=dict)  # by resident cluster
    started: int = 0
    left: int = 0

    def draw(self) -> Tile | None:
        self.drawn += 1
        return self.order[self.drawn - 1] if self.drawn <= len(self.order) else None

    def admit(self) -> None:
        while self.started < CLUSTERS and self.started - self.left < self.resident:
            cluster = self.started
            self.started += 1
            # Dealt: tile number `cluster` is its own from the launch on, whether it runs or not.
            self.take(cluster, self.order[cluster] if self.first_is_dealt else self.draw())

    def take(self, cluster: int, tile: Tile | None) -> None:
        self.held.pop(cluster, None)
        if tile is None:
            self.left += 1
        else:
            self.held[cluster] = tile


def finishes(world_size: int, resident: int, first_is_dealt: bool) -> bool:
    rows = M_TILES * CONFIG.block_m * world_size
    columns = N_TILES * CONFIG.block_n
    ranks = [
        Rank(
            core.gemm_rs_tiles(rows, columns, world_size, rank, CONFIG.id, 1, 16),
            resident,
            first_is_dealt,
            drawn=CLUSTERS if first_is_dealt else 0,
        )
        for rank in range(world_size)
    ]
    arrived: set[tuple[int, Tile]] = set()
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(ranks):
            rank.admit()
            for cluster, tile in list(rank.held.items()):
                peers = [p for p in range(world_size) if p != number]
                if tile[0] != number:
                    arrived.add((number, tile))
                elif not all((peer, tile) in arrived for peer in peers):
                    continue
                rank.take(cluster, rank.draw())
                progress = True
    return all(rank.left == CLUSTERS for rank in ranks)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_any_number_of_resident_clusters_is_enough(world_size: int) -> None:
    for resident in range(1, CLUSTERS + 1):
        assert finishes(world_size, resident, first_is_dealt=False), f"{resident} of {CLUSTERS} resident"


def test_a_first_tile_that_is_dealt_would_need_residency() -> None:
    assert finishes(2, CLUSTERS, first_is_dealt=True)
    assert not finishes(2, 5, first_is_dealt=True), (
        "a cluster without an SM holds a tile that others wait for"
    )
