"""Sums whose contributions travel as int8, with several ranks on one GPU (see flux.testing.emulate)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from flux import _native
from flux.testing.emulate import EmulatedRanks


class EmulatedInt8Ranks(EmulatedRanks):
    """Ranks that reduce-scatter with wire="int8"."""

    def reduce_scatter_int8(
        self,
        xs: Sequence[torch.Tensor],
        *,
        rounds_own: bool = False,
        join: bool = True,
        absent: Collection[int] = (),
    ) -> list[torch.Tensor]:
        """ReduceScatter of all ranks at once: for every rank its [rows, n] of the sum of all `xs`
        [world_size, rows, n]. rounds_own: what a rank has for itself is rounded to int8, too.
        """
        p, rows, n = xs[0].shape
        self._stored.reserve_exchange(_native.core.int8_scatter_bytes(rows, n, p))
        sums = self._empty(xs[0], rows, n)

        def launch(rank: int) -> None:
            given = (self._stored.address(rank), self.num_sms, rounds_own)
            torch.ops.flux._reduce_scatter_int8(xs[rank], sums[rank], *given)

        self._launch(launch, join, absent)
        return sums
