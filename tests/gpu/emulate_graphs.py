"""CUDA graphs of several ranks on one GPU (see flux.testing.emulate)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from flux.testing.emulate import EmulatedRanks

T = TypeVar("T")


class EmulatedGraphRanks(EmulatedRanks):
    """Ranks whose calls can be captured, by each rank in a graph of its own, as real ranks do it. In one
    graph they would be branches. CUDA may run branches one after the other, and each waits for the others.
    """

    _recorded: list[Callable[[int], None]] | None = None

    def capture(self, calls: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Captures what `calls` launches on these ranks, and runs nothing.

        Returns:
            What `calls` returned, and a function that replays the graphs of all ranks at once.
        """
        recorded: list[Callable[[int], None]] = []
        self._recorded = recorded
        try:
            results = calls()
        finally:
            self._recorded = None
        graphs = []
        for rank, stream in enumerate(self.streams):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[rank], stream=stream):
                for launch in recorded:
                    launch(rank)
        return results, lambda: self._launch(lambda rank: graphs[rank].replay(), True, ())

    def _launch(self, launch: Callable[[int], None], join: bool, absent: Collection[int]) -> None:
        if self._recorded is None:
            super()._launch(launch, join, absent)
        else:
            self._recorded.append(launch)
