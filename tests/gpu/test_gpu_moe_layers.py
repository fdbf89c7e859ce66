"""Both layers of a mixture of experts with all ranks on one GPU, which run the real kernels."""

from __future__ import annotations

import pytest
import torch

from flux.testing.emulate_moe import EmulatedMoeRanks
from flux.testing.moe_data import SKEWS, MoeCase


def check(ranks: EmulatedMoeRanks, case: MoeCase, config: int, per_chunk: int, ctas: int) -> None:
    layouts, p = ranks.route(case), range(case.world_size)
    how = f"of {case}, {config}, {per_chunk}, {ctas}"
    xs, w1s, w2s = ([make(r).cuda() for r in p] for make in (case.x, case.w1, case.w2))
    if (config + per_chunk) % 2:  # as the backward passes have them
        w1s, w2s = ([w.transpose(1, 2).contiguous().transpose(1, 2) for w in ws] for ws in (w1s, w2s))
    out0 = ranks.ag_scatter_gemm(xs, w1s, config=config)
    ranks.check()
    for r in p:
        expected = case.layer0(r)
        assert torch.equal(out0[r][: len(expected)].cpu(), expected), f"layer 0, rank {r} {how}"
    hs = [case.hidden_rows(r, layouts[r].max_rows).cuda() for r in p]
    out1 = ranks.gemm_gather_rs(hs, w2s, config=config, tiles_per_chunk=per_chunk, communication_ctas=ctas)
    ranks.check()
    for r in p:
        assert torch.equal(out1[r].cpu(), case.layer1(r)), f"layer 1, rank {r} {how}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("skew", SKEWS)
def test_layouts_and_skews(world_size: int, skew: str) -> None:
    ranks = EmulatedMoeRanks(world_size)
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
            check(ranks, case, (0, 3, 5, 9)[number % 4], 1 + number % 2, (1, 0, 5)[number % 3])
            number += 1


@pytest.mark.parametrize("config", [0, 3, 5, 9])
@pytest.mark.parametrize("ep_size", [1, 3])
def test_long_rows(config: int, ep_size: int) -> None:
    """The next tile is asked for in the middle of one; chunks are wider than what a thread sums at a time."""
    ranks = EmulatedMoeRanks(3)
    for seed in range(3):  # both buffers, and one of them again
        case = MoeCase((260, 200, 60), 1608, 1608, 6, 4, ep_size, torch.bfloat16, "skewed", 0.1, seed=seed)
        check(ranks, case, config, 2, 5 * seed)
