"""A model of the ranks' CTAs that runs them in any order: what each may do next follows from the plans of
`_core` and from the signals alone. It finds deadlocks, and tiles that are read before they have arrived or
after they were overwritten.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flux._native import core

# (layout, signal words of the workspace for each slot, slot, m_tile, n_tile) -> word
SignalIndex = Callable[[Any, int, int, int, int], int]
Condition = Callable[[], bool]
Steps = Iterator[
    Condition | None
]  # a step ends where others may run, or with what the next one has to wait for
UNIT = 4096  # bytes; slots are modelled in pieces of this size


@dataclass(frozen=True)
class Call:
    """One call of gemm_rs, the same on all ranks."""

    m: int
    n: int
    config: int
    cluster: int
    group_m: int


class WrongData(AssertionError):
    """A rank read a slot that did not hold what the plan says."""


class Deadlock(AssertionError):
    """No CTA of any rank could go on."""


def fixed_region_of_each_slot(layout: Any, words_per_slot: int, slot: int, m: int, n: int) -> int:
    """What flux does: a word belongs to one source for ever."""
    return slot * words_per_slot + int(layout.signal_index(m, n, 0))


def region_of_the_call(layout: Any, words_per_slot: int, slot: int, m: int, n: int) -> int:
    """What looks simpler, and is wrong from three ranks on: a word changes its source with the shape."""
    return slot * layout.num_signals // (layout.world_size - 1) + int(layout.signal_index(m, n, 0))


def clusters_of_tiles(
    m: int, n: int, world_size: int, rank: int, config: int, cluster: int, group_m: int
) -> list[list[Any]]:
    """The tiles of the CTAs of each cluster, in the order of gemm_rs; None is a CTA without a tile."""
    tiles = core.gemm_rs_tiles(m, n, world_size, rank, config, cluster, group_m, idle=True)
    size = 1 if cluster == 1 else 2
    return [tiles[i : i + size] for i in range(0, len(tiles), size)]


def cta_tiles(order: list[list[Any]], num_sms: int, cta: int) -> list[Any]:
    """The tiles of a CTA with a fixed stride. The grid has as many whole clusters as fit on the SMs, and at
    most one for each cluster of tiles.
    """
    size = len(order[0])
    step = min(num_sms // size, len(order))
    return [] if cta >= step * size else [tiles[cta % size] for tiles in order[cta // size :: step]]


class Model:
    """`world_size` ranks of `num_sms` CTAs making the same calls; each CTA yields where others may run.

    `drawn`: clusters draw their tiles from a counter instead of walking the order with a fixed stride.
    """

    def __init__(
        self,
        world_size: int,
        num_sms: int,
        calls: list[Call],
        signal_index: SignalIndex = fixed_region_of_each_slot,
        drawn: bool = False,
    ) -> None:
        self.world_size = world_size
        self.num_sms = num_sms
        self.calls = calls
        self.signal_index = signal_index
        self.drawn = drawn
        self.layouts = [core.gemm_rs_layout(c.m, c.n, world_size, c.config) for c in calls]
        self.words_per_slot = max(layout.num_signals for layout in self.layouts) // (world_size - 1)
        self.signals: list[dict[int, int]] = [{} for _ in range(world_size)]
        self.slots: list[dict[tuple[int, int], Any]] = [
            {} for _ in range(world_size)
        ]  # (parity, unit) -> what it holds
        self.read: list[set[tuple[int, int, int]]] = [set() for _ in range(world_size)]

    def run(self, rng: random.Random) -> None:
        """All calls on all ranks, in an order drawn from `rng`."""
        epochs = dict.fromkeys(range(self.world_size), 1)
        # What is left of the running call of each rank, and what a CTA waits for.
        ctas = {(rank, i): cta for rank in epochs for i, cta in enumerate(self._ctas(rank, 1))}
        waits: dict[tuple[int, int], Condition] = {}
        while ctas:
            ready = [cta for cta in ctas if cta not in waits or waits[cta]()]
            if not ready:
                raise Deadlock(f"the ranks are in calls {epochs}, and nobody can go on")
            cta = rng.choice(ready)
            # Several steps at once now and then let a rank run ahead as far as the protocol permits.
            for _ in range(rng.choice((1, 1, 3, 20))):
                waits.pop(cta, None)
                try:
                    condition = next(ctas[cta])
                except StopIteration:
                    del ctas[cta]
                    rank = cta[0]
                    if not any(other == rank for other, _ in ctas):
                        self._end_of_call(rank, epochs[rank])
                        epochs[rank] += 1
                        if epochs[rank] <= len(self.calls):
                            next_call = self._ctas(rank, epochs[rank])
                            ctas.update({(rank, i): steps for i, steps in enumerate(next_call)})
                    break
                if condition is not None and not condition():
                    waits[cta] = condition
                    break

    def _end_of_call(self, rank: int, epoch: int) -> None:
        layout = self.layouts[epoch - 1]
        own = {(epoch, m, n) for m in range(layout.m_tiles) for n in range(layout.n_tiles)}
        assert own <= self.read[rank], "an own tile was never finished"

    def _ctas(self, rank: int, epoch: int) -> list[Steps]:
        done = [0] * self.num_sms
        if not self.drawn:
            order = self._order(rank, epoch)
            walks = [cta_tiles(order, self.num_sms, cta) for cta in range(self.num_sms)]
            return [self._cta(rank, epoch, cta, done, iter(walk)) for cta, walk in enumerate(walks)]
        order = self._order(rank, epoch)
        size = len(order[0])
        draw = iter(range(len(order)))
        ctas = []
        for cluster in range(self.num_sms // size):
            drawn: list[int] = []
            for cta in range(size):
                walk = self._draw(order, draw, drawn, cta)
                ctas.append(self._cta(rank, epoch, cluster * size + cta, done, walk))
        return ctas

    def _order(self, rank: int, epoch: int) -> list[list[Any]]:
        c = self.calls[epoch - 1]
        return clusters_of_tiles(c.m, c.n, self.world_size, rank, c.config, c.cluster, c.group_m)

    def _draw(self, order: list[list[Any]], draw: Iterator[int], drawn: list[int], cta: int) -> Iterator[Any]:
        """The tiles of one CTA whose cluster draws them from a counter that all clusters share."""
        for position in range(len(order) + 1):
            if position == len(drawn):
                drawn.append(next(draw, -1))
            if drawn[position] < 0:
                return
            yield order[drawn[position]][cta]

    def _cta(self, rank: int, epoch: int, cta: int, done: list[int], tiles: Iterator[Any]) -> Steps:
        call, layout = self.calls[epoch - 1], self.layouts[epoch - 1]
        partner = cta ^ 1 if call.cluster != 1 else cta
        for position, tile in enumerate(tiles):
            # CTAs of a pair load for each other. Stricter than the kernel: neither starts a tile before both
            # finished the last.
            yield lambda position=position: done[partner] >= position
            if tile is not None:
                owner, m, n = tile
                if owner != rank:
                    yield from self._send(rank, owner, m, n, epoch, layout)
                else:
                    yield from self._receive(rank, m, n, epoch, layout)
            done[cta] += 1
            yield None

    def _units(self, layout: Any, slot: int, m: int, n: int, epoch: int) -> list[tuple[int, int]]:
        start = layout.tile_offset(slot, m, n)
        return [(epoch & 1, unit) for unit in range(start // UNIT, (start + layout.tile_bytes) // UNIT)]

    def _send(self, rank: int, owner: int, m: int, n: int, epoch: int, layout: Any) -> Steps:
        slot = layout.slot_index(rank, owner)
        for unit in self._units(layout, slot, m, n, epoch):
            self.slots[owner][unit] = (epoch, rank, m, n)
        yield None
        self.signals[owner][self.signal_index(layout, self.words_per_slot, slot, m, n)] = epoch

    def _receive(self, rank: int, m: int, n: int, epoch: int, layout: Any) -> Steps:
        for source in range(self.world_size):
            if source == rank:
                continue
            slot = layout.slot_index(source, rank)
            word = self.signal_index(layout, self.words_per_slot, slot, m, n)
            yield lambda word=word: self.signals[rank].get(word, 0) >= epoch
            for unit in self._units(layout, slot, m, n, epoch):
                found = self.slots[rank].get(unit)
                if found != (epoch, source, m, n):
                    raise WrongData(f"rank {rank}, call {epoch}, tile {(m, n)} of {source}: found {found}")
        self.read[rank].add((epoch, m, n))
