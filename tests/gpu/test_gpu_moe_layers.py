"""Both layers of a mixture of experts with all ranks on one GPU, which run the real kernels."""

from __future__ import annotations

import pytest
import torch

from flux._native import core
from flux.comm.workspace import round_up
from flux.moe import reference
from flux.ops.grouped_gemm import schedule_words
from flux.testing.emulate import EmulatedRanks
from flux.testing.moe_data import SKEWS, MoeCase

BLOCK_M = 128


class Ranks(EmulatedRanks):
    def prepare(self, case: MoeCase) -> None:
        p, limit, k = case.world_size, case.max_tokens, case.top_k
        ids = torch.full((p, limit, k), -1, dtype=torch.int32)
        weights = torch.zeros(p, limit, k)
        for rank, tokens in enumerate(case.tokens):
            ids[rank, :tokens], weights[rank, :tokens] = case.routing(rank)
        self.weights = weights.cuda()
        self.arrays, self.layouts = [], []
        for rank in range(p):
            layout = core.MoeLayout(p, rank, case.ep_size, case.num_experts, k, limit)
            shapes = [t.shape for t in reference.routing_tensors(layout, BLOCK_M, ids)]
            arrays = [torch.empty(shape, dtype=torch.int32) for shape in shapes]
            core.moe_route(layout, BLOCK_M, ids.data_ptr(), [a.data_ptr() for a in arrays])
            self.arrays.append([a.cuda() for a in arrays])
            self.layouts.append(layout)

    def room(self, case: MoeCase, columns: int, chunks: int) -> None:
        p, limit = case.world_size, case.max_tokens
        blocks = core.MoeLayout.blocks_of(limit)
        self._stored._grow(
            round_up(4 * (p - 1) * blocks * chunks), round_up((p - 1) * limit * columns * 2), 0
        )

    def layer0(self, case: MoeCase, xs, w1s, config: int = -1, activation: int = 0, join: bool = True):
        self.room(case, case.hidden, 1)
        columns = w1s[0].shape[1] // (2 if activation == 3 else 1)
        outs = [
            torch.full((layout.max_rows, columns), 7, dtype=xs[0].dtype, device="cuda")
            for layout in self.layouts
        ]

        def launch(rank: int) -> None:
            torch.ops.flux._moe_ag_scatter_gemm(
                xs[rank],
                w1s[rank],
                self.arrays[rank],
                case.ep_size,
                case.num_experts,
                case.top_k,
                case.max_tokens,
                activation,
                outs[rank],
                self._stored.address(rank),
                config,
                self.num_sms,
            )

        self._launch(launch, join, ())
        return outs

    def layer1(
        self, case: MoeCase, hs, w2s, config: int = 5, per_chunk: int = 1, ctas: int = -1, join: bool = True
    ):
        block_n = core.tile_configs()[config].block_n
        self.room(case, case.hidden, -(-case.hidden // block_n))
        products = [
            torch.empty(layout.max_rows, case.hidden, dtype=hs[0].dtype, device="cuda")
            for layout in self.layouts
        ]
        schedules = [
            torch.empty(schedule_words(h.shape[0], w.shape[0]), dtype=torch.int32, device="cuda")
            for h, w in zip(hs, w2s, strict=True)
        ]
        outs = [torch.full((t, case.hidden), 7, dtype=hs[0].dtype, device="cuda") for t in case.tokens]

        def launch(rank: int) -> None:
            torch.ops.flux._moe_gemm_gather_rs(
                hs[rank],
                w2s[rank],
                self.arrays[rank],
                self.weights,
                case.ep_size,
                case.num_experts,
                products[rank],
                schedules[rank],
                outs[rank],
                self._stored.address(rank),
                config,
                per_chunk,
                ctas,
                self.num_sms,
            )

        self._launch(launch, join, ())
        return outs


def check(ranks: Ranks, case: MoeCase, config: int, per_chunk: int, ctas: int) -> None:
    ranks.prepare(case)
    p = range(case.world_size)
    out0 = ranks.layer0(case, [case.x(r).cuda() for r in p], [case.w1(r).cuda() for r in p], config)
    ranks.check()
    for r in p:
        expected = case.layer0(r)
        assert torch.equal(out0[r][: len(expected)].cpu(), expected), f"layer 0, rank {r} of {case}, {config}"
    hs = [case.hidden_rows(r, ranks.layouts[r].max_rows).cuda() for r in p]
    out1 = ranks.layer1(case, hs, [case.w2(r).cuda() for r in p], config, per_chunk, ctas)
    ranks.check()
    for r in p:
        assert torch.equal(out1[r].cpu(), case.layer1(r)), (
            f"layer 1, rank {r} of {case}, {config}, {per_chunk}, {ctas}"
        )


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("skew", SKEWS)
def test_layouts_and_skews(world_size: int, skew: str) -> None:
    ranks = Ranks(world_size)
    number = 0
    for ep_size in [d for d in (1, 2, 3, 4) if world_size % d == 0]:
        for tokens in (1, 140, 300):
            case = MoeCase(
                (tokens,) * (world_size - 1) + (max(1, tokens // 2),),
                264,
                72,
                4 * ep_size,
                3,
                ep_size,
                torch.bfloat16 if number % 2 else torch.float16,
                skew,
                0.2 * (number % 2),
                seed=number,
            )
            check(ranks, case, (0, 3, 5, 9)[number % 4], 1 + number % 2, (-1, 0, 5)[number % 3])
            number += 1
