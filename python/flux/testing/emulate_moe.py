"""Both layers of a mixture of experts with several ranks on one GPU (see flux.testing.emulate)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from flux import _native
from flux.comm.workspace import round_up
from flux.moe.routing import checked_shapes, route_on_host
from flux.ops.grouped_gemm import ACTIVATIONS
from flux.plan.moe import BLOCK_M
from flux.testing.emulate import EmulatedRanks
from flux.testing.moe_data import MoeCase

Tensors = Sequence[torch.Tensor]
_Layout: Any = _native.core.MoeLayout


class EmulatedMoeRanks(EmulatedRanks):
    """Ranks that share the experts and tokens of a case. Layers work from a routing made on the host."""

    def __init__(self, world_size: int, device: torch.device | None = None, timeout_s: float = 10.0) -> None:
        super().__init__(world_size, device, timeout_s)
        self._kept: list[torch.Tensor] = []  # tensors that must live until check()

    def check(self) -> None:
        super().check()
        self._kept.clear()

    def route(self, case: MoeCase) -> list[Any]:
        """Prepares the ranks for the case's layers; returns each rank's native layout."""
        p, limit, k = case.world_size, case.max_tokens, case.top_k
        ids, weights = case.all_choices()
        shapes = checked_shapes(p, case.num_experts, case.ep_size, limit, 0, k)
        self._case, self._weights = case, weights.to(self.device)
        self._layouts = [
            _native.core.MoeLayout(p, rank, case.ep_size, case.num_experts, k, limit) for rank in range(p)
        ]
        self._arrays = [
            [array.to(self.device) for array in route_on_host(layout, ids, shapes)]
            for layout in self._layouts
        ]
        return self._layouts

    def route_by_kernel(
        self,
        ids: Tensors,
        weights: Tensors,
        num_experts: int,
        ep_size: int,
        max_tokens: int,
        *,
        join: bool = True,
        absent: Collection[int] = (),
    ) -> list[list[torch.Tensor]]:
        """Routing of all ranks at once: for every rank the tensors of its flux.moe.Routing, filled with 77.

        Args:
            ids, weights: for every rank [tokens, k] on the GPU, int32 or int64 and float32.
        """
        p, k = self.world_size, ids[0].shape[1]
        core = _native.core
        layouts = [core.MoeLayout(p, rank, ep_size, num_experts, k, max_tokens) for rank in range(p)]
        self._stored._grow(0, 0, round_up(layouts[0].route_exchange_bytes))
        shapes = checked_shapes(p, num_experts, ep_size, max_tokens, 0, k)

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, 77, dtype=torch.int32, device=self.device)

        arrays = [[empty(*shape) for shape in shapes] for _ in range(p)]
        all_weights = [empty(p, max_tokens, k).float() for _ in range(p)]
        scratch = [empty(layouts[0].route_scratch_words) for _ in range(p)]

        def launch(rank: int) -> None:
            given = (ids[rank], weights[rank], arrays[rank], all_weights[rank], scratch[rank])
            how = (rank, ep_size, num_experts, BLOCK_M)
            torch.ops.flux._moe_route(*given, self._stored.address(rank), *how)

        self._kept += scratch
        self._launch(launch, join, absent)
        return [[*tensors, w] for tensors, w in zip(arrays, all_weights, strict=True)]

    def ag_scatter_gemm(
        self,
        xs: Tensors,
        weights: Tensors,
        activation: str | None = None,
        *,
        config: int = -1,
        join: bool = True,
    ) -> list[torch.Tensor]:
        """Layer 0 of all ranks at once: for every rank its rows [max_rows, n]; rows after the last hold 7."""
        case = self._case
        self._make_room(_native.core.MoeSendOrder(self._layouts[0]).signals)
        columns = weights[0].shape[1] // (2 if activation == "swiglu" else 1)
        outs = [xs[0].new_full((layout.max_rows, columns), 7) for layout in self._layouts]
        number = 0 if activation is None else ACTIVATIONS.index(activation) + 1

        def launch(rank: int) -> None:
            layout = (case.ep_size, case.num_experts, case.top_k, case.max_tokens)
            given = (xs[rank], weights[rank], self._arrays[rank], *layout, number, outs[rank])
            how = (self._stored.address(rank), config, self.num_sms)
            torch.ops.flux._moe_ag_scatter_gemm(*given, *how)

        self._launch(launch, join, ())
        return outs

    def gemm_gather_rs(
        self,
        xs: Tensors,
        weights: Tensors,
        *,
        config: int = 5,
        tiles_per_chunk: int = 1,
        communication_ctas: int = 4,
        join: bool = True,
    ) -> list[torch.Tensor]:
        """Layer 1 of all ranks at once: for every rank the sums of its tokens.

        Args:
            tiles_per_chunk: columns of tiles that are summed together.
            communication_ctas: that begin with communication.
        """
        case = self._case
        blocks = _Layout.blocks_of(case.max_tokens, _Layout.block_rows(case.max_tokens))
        self._make_room(blocks * -(-case.hidden // _native.core.tile_configs()[config].block_n))
        products = [xs[0].new_empty(layout.max_rows, case.hidden) for layout in self._layouts]
        outs = [xs[0].new_full((tokens, case.hidden), 7) for tokens in case.tokens]

        def launch(rank: int) -> None:
            given = (xs[rank], weights[rank], self._arrays[rank], self._weights)
            layout = (case.ep_size, case.num_experts, products[rank], outs[rank])
            how = (config, tiles_per_chunk, communication_ctas, self.num_sms)
            torch.ops.flux._moe_gemm_gather_rs(*given, *layout, self._stored.address(rank), *how)

        self._kept += products
        self._launch(launch, join, ())
        return outs

    def _make_room(self, signals: int) -> None:
        """Grows the workspaces. signals: number for each source."""
        peers, limit = self.world_size - 1, self._case.max_tokens
        self._stored._grow(round_up(4 * peers * signals), round_up(peers * limit * self._case.hidden * 2), 0)
