"""The claims of flux.testing.data: no missing, doubled or misplaced contribution can pass."""

from __future__ import annotations

import pytest
import torch

from flux.testing import GemmRsCase
from flux.testing.data import EXACT_LIMIT

CASES = [
    GemmRsCase(m, n, k, world_size, dtype, bias=bias, seed=seed)
    for seed, (m, n, k) in enumerate([(256, 96, 64), (24, 8, 2), (48, 16, 500)])
    for world_size in (2, 4, 8)
    for dtype in (torch.bfloat16, torch.float16)
    for bias in (False, True)
]


def partials(case: GemmRsCase) -> list[torch.Tensor]:
    inputs = [case.inputs(rank) for rank in range(case.world_size)]
    return [x.double() @ weight.double().t() for x, weight, _ in inputs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_exact_and_every_contribution_odd(case: GemmRsCase) -> None:
    limit = EXACT_LIMIT[case.dtype]
    parts = partials(case)
    total = torch.stack(parts).sum(0)
    bias = case.inputs(0)[2]
    if bias is not None:
        total += bias.double()
    for part in [*parts, total]:
        assert part.abs().max() <= limit
        assert torch.equal(part.to(case.dtype).double(), part)
    rows = case.m // case.world_size
    for rank in range(case.world_size):
        assert torch.equal(case.expected(rank).double(), total[rank * rows : (rank + 1) * rows])
    for part in parts:
        # Odd, hence not zero: leaving it out or adding it twice changes every single element.
        assert (part % 2 != 0).all()


def test_tiles_differ_from_each_other_and_from_other_calls() -> None:
    case, other = GemmRsCase(512, 128, 64, 2), GemmRsCase(512, 128, 64, 2, seed=1)
    tiles = [
        part[i : i + 128, j : j + 64] for part in partials(case) + partials(other) for i in range(0, 512, 128)
        for j in (0, 64)
    ]  # fmt: skip
    for i, a in enumerate(tiles):
        for b in tiles[:i]:
            assert (a != b).float().mean() > 0.5


def test_every_block_of_k_counts_in_every_tile() -> None:
    case = GemmRsCase(256, 128, 1024, 4)
    x, weight, _ = case.inputs(1)
    for start in range(0, 1024, 64):
        for row in range(0, 256, 128):
            piece = x[row : row + 128, start : start + 64].float() @ weight[:, start : start + 64].float().t()
            assert piece.abs().max() > 0


def test_too_many_ranks_for_a_type() -> None:
    with pytest.raises(ValueError, match="16 ranks cannot be marked in torch.bfloat16"):
        GemmRsCase(16, 8, 8, 16).inputs(0)


def test_the_same_data_every_time() -> None:
    case = GemmRsCase(64, 32, 16, 2, transpose_weight=True, bias=True, seed=3)
    for a, b in zip(case.inputs(1), case.inputs(1), strict=True):
        assert a is not None and b is not None
        assert torch.equal(a, b)
    straight = GemmRsCase(64, 32, 16, 2, bias=True, seed=3)
    assert torch.equal(case.inputs(1)[1].t(), straight.inputs(1)[1])
