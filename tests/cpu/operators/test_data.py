"""The claims of flux.testing.data: no missing, doubled or misplaced contribution can pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flux.testing import AgGemmCase, GemmRsCase
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
    assert torch.equal(case.expected_sum().double(), total)
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


@pytest.mark.parametrize("kind", [GemmRsCase, AgGemmCase])
def test_the_same_data_every_time(kind: type[GemmRsCase | AgGemmCase]) -> None:
    case = kind(64, 32, 16, 2, transpose_weight=True, bias=True, seed=3)
    for a, b in zip(case.inputs(1), case.inputs(1), strict=True):
        assert a is not None and b is not None
        assert torch.equal(a, b)
    straight = replace(case, transpose_weight=False)
    assert torch.equal(case.inputs(1)[1].t(), straight.inputs(1)[1])
    with pytest.raises(ValueError, match="64 ranks cannot be marked in torch.bfloat16"):
        kind(64, 8, 8, 64).inputs(0)


AG_CASES = [
    AgGemmCase(m, n, k, world_size, dtype, bias=bias, seed=seed)
    for seed, (m, n, k) in enumerate([(384, 96, 64), (24, 8, 2), (48, 16, 500), (24, 8, 1)])
    for world_size in (1, 2, 3, 4, 8)
    for dtype in (torch.bfloat16, torch.float16)
    for bias in (False, True)
]


def product(case: AgGemmCase, rank: int) -> torch.Tensor:
    return case.gathered().double() @ case.inputs(rank)[1].double().t()


@pytest.mark.parametrize("case", AG_CASES, ids=str)
def test_gathered_everything_is_exact_and_every_element_marked(case: AgGemmCase) -> None:
    rows = case.m // case.world_size
    for rank in range(case.world_size):
        total = product(case, rank)
        for source in range(case.world_size):
            of_source = total[source * rows : (source + 1) * rows]
            assert (of_source % case.unit == case.mark(source)).all()
            assert torch.equal(case.gathered()[source * rows : (source + 1) * rows], case.inputs(source)[0])
        bias = case.inputs(rank)[2]
        if bias is not None:
            assert (bias % 2 == 1).all()
            total += bias.double()
        assert total.abs().max() <= EXACT_LIMIT[case.dtype]
        assert torch.equal(case.expected(rank).double(), total)


def test_gathered_no_row_passes_for_one_of_another_rank_or_call() -> None:
    for world_size in (1, 2, 3, 4, 8):
        for first in range(4):
            marks = [
                AgGemmCase(8, 8, 8, world_size, seed=seed).mark(source)
                for seed in range(first, first + 3)
                for source in range(world_size)
            ]
            # 0 is what a row that nobody wrote has.
            assert len({0, *marks}) == len(marks) + 1
            assert max(marks) < AgGemmCase(8, 8, 8, world_size).unit


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_gathered_rows_differ_from_each_other(world_size: int) -> None:
    total = AgGemmCase(512 * world_size, 64, 2048, world_size).expected(0)
    for distance in (1, 64, 128):
        assert (total[distance:] != total[:-distance]).float().mean() > 0.7


def test_gathered_every_block_of_k_counts_in_every_element_of_a_row_of_every_tile() -> None:
    for world_size, k in ((2, 3840), (4, 1792 * 64), (8, 12288)):
        case = AgGemmCase(256 * world_size, 8, k, world_size)
        x, weight, _ = case.inputs(1)
        for row in range(0, 256, 128):
            pieces = x[row : row + 128].view(128, -1, 64).float()
            products = torch.einsum("rbk,nbk->brn", pieces, weight.view(8, -1, 64).float())
            assert (products != 0).all(2).any(1).all()


def test_gathered_x_does_not_depend_on_the_weight() -> None:
    case = AgGemmCase(64, 32, 16, 2, transpose_weight=True, bias=True, seed=3)
    other = replace(case, n=24)
    assert torch.equal(case.inputs(1)[0], other.inputs(1)[0])
    assert not torch.equal(case.inputs(1)[1][:, :24], other.inputs(1)[1])
