"""fp8 on one GPU, which emulates ranks: quantisation has the bits of the CPU path, and products and sums of
small integers are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import flux
from flux._native import core
from flux.fp8.products import scaled_mm
from flux.fp8.scales import Scales
from flux.ops.norm_and_quant import QUANTS as ENDS
from flux.ops.norm_and_quant import End, rms_norm
from flux.ops.quantize import QUANTS
from flux.testing import ScaledCase
from flux.testing.emulate import EmulatedRanks
from flux.testing.scaled_data import exact_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("tensor", "row", "block")
TRANSPORTS = [pytest.param(False, id="pushed"), pytest.param(True, id="copied")]
# Rows of a rank (around one block of 128, and more), n, k: block scales take the next multiple of 128.
SHAPES = [(1, 8, 16), (127, 200, 400), (128, 64, 128), (129, 264, 528), (300, 1032, 256)]
SUMS = [(1, 8, 16), (1, 4096, 256), (5, 136, 144), (16, 1024, 512), (64, 520, 384), (130, 264, 528)]
ALONE, PAIR_M, PAIR_N, SPLIT = 1, 2, 3, 4  # clusters
ALL_TILES = core.tile_configs(1)
TILES = [tile for tile in ALL_TILES if tile.supports_sending or tile.supports_gathering]
SENDING = [tile for tile in TILES if tile.supports_sending]
KEEPING = [tile for tile in TILES if tile.supports_gathering]
CHOSEN = -1


def bits(q: torch.Tensor) -> torch.Tensor:
    return q.cpu().view(torch.uint8)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_has_the_bits_of_the_cpu_path(quant: str, dtype: torch.dtype, ue8m0: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in [(1, 8), (3, 136), (130, 264), (2, 130, 1032), (2048, 4096)]:
        x = torch.randn(shape, generator=generator)
        x *= torch.exp2(torch.randint(-14, 3, shape, generator=generator))
        for x16 in (x.to(torch.bfloat16), x.half()):
            expected, scales = flux.quantize(x16, quant, ue8m0=ue8m0, dtype=dtype)
            q, found = flux.quantize(x16.cuda(), quant, ue8m0=ue8m0, dtype=dtype)
            assert torch.equal(found.cpu(), scales)
            assert torch.equal(bits(q), bits(expected))


def test_quantize_edges() -> None:
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    for quant in QUANTS:
        expected, scales = flux.quantize(x, quant)
        q, found = flux.quantize(x.cuda(), quant)
        assert torch.equal(found.cpu().nan_to_num(7, 8), scales.nan_to_num(7, 8))
        assert torch.equal(bits(q), bits(expected))


@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_torchs_product_is_exact(kind: str, dtype: torch.dtype, accumulate: str) -> None:
    """Which the plan takes where it was measured to be sooner."""
    for m, n, k in [(1, 16, 16), (200, 1040, 528), (256, 4096, 1024)]:
        for has_bias in (False, True):
            case = ScaledCase(m, n, k, 1, kind, E4M3, dtype, bias=has_bias, seed=m)
            xs, weights, scales, bias = operands(case, accumulate)
            expected = case.product(0, 0).to(dtype).cuda()
            whole = torch.full((m, 2 * n), torch.nan, dtype=dtype, device="cuda")
            for out in (torch.full_like(expected, torch.nan), whole[:, :n]):
                scaled_mm(xs[0], weights[0], bias, scales[0], out)
                assert torch.equal(out, expected), (case, accumulate, out.is_contiguous())


@pytest.mark.parametrize("tile", ALL_TILES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gemm_in_every_tile_is_exact(kind: str, tile: core.TileConfig) -> None:
    if not tile.promotes and kind == "block":
        pytest.skip("tiles without promotion have no scales of blocks")
    if not tile.supports_keeping:
        pytest.skip("only tiles that are sent need slabs for a whole tile")
    for number, (m, n, k) in enumerate([(1, 8, 256), (129, 264, 640), (300, 1032, 4352)]):
        x_dtype = E5M2 if tile.promotes and number == 1 else E4M3
        case = ScaledCase(m, n, k, 1, kind, x_dtype, torch.bfloat16, bias=number == 2, seed=number)
        xs, weights, scales, bias = operands(case, "promoted" if tile.promotes else "fast")
        expected = case.product(0, 0).cuda()
        kwargs = {"scale_x": scales[0].x, "scale_w": scales[0].w, "fast": not tile.promotes}
        for cluster in (ALONE, PAIR_M, PAIR_N, *([SPLIT] if tile.supports_split else [])):
            out = torch.empty(m, n, dtype=case.out_dtype, device="cuda")
            config = tile.id | cluster << 8 | 4 << 16
            torch.ops.flux._gemm(xs[0], weights[0], bias, out, False, config, 0, **kwargs)
            assert torch.equal(out.double(), expected), (case, cluster)


class Operands(NamedTuple):
    """Those of all ranks on the GPU."""

    xs: list[torch.Tensor]
    weights: list[torch.Tensor]
    scales: list[Scales]
    bias: torch.Tensor | None


# Many tests have the same cases, whose data takes a CPU longer than a GPU takes for the tests.
@functools.cache
def operands(case: ScaledCase, accumulate: str) -> Operands:
    made = [
        [part if part is None else part.cuda() for part in case.inputs(r)] for r in range(case.world_size)
    ]
    xs, weights, of_rows, of_columns, biases = (list(parts) for parts in zip(*made, strict=True))
    scales = [
        Scales(*pair, case.out_dtype, accumulate).canonical(case.n, case.k)
        for pair in zip(of_rows, of_columns, strict=True)
    ]
    return Operands(xs, weights, scales, biases[0])


@functools.cache
def total_of(case: ScaledCase) -> torch.Tensor:
    return case.total().cuda()


@functools.cache
def gathered_of(case: ScaledCase, rank: int) -> torch.Tensor:
    return case.gathered(rank).cuda()


def cases(
    world_size: int, shapes: list[tuple[int, int, int]], sums: bool
) -> Iterator[tuple[ScaledCase, str]]:
    """Problems of every kind of scales, the first of their shapes for one rank, and how they accumulate."""
    for kind in KINDS:
        for number, (m, n, k) in enumerate(shapes):
            depth = -(-k // 128) * 128 if kind == "block" else k
            x_dtype, out_dtype = (E4M3, E5M2)[number % 2], (torch.bfloat16, torch.float16)[number // 2 % 2]
            bias = number % 3 == 0
            case = ScaledCase(m, n, depth, world_size, kind, x_dtype, out_dtype, bias, sums, number)
            yield case, "promoted"
            if kind != "block":
                yield replace(case, x_dtype=E4M3), "fast"


def check_gemm_rs(ranks: EmulatedRanks, case: ScaledCase, accumulate: str, **how: Any) -> None:
    xs, weights, scales, bias = operands(case, accumulate)
    results = ranks.gemm_rs(xs, weights, bias, scales=scales, **how)
    ranks.check()
    for rank, (result, right) in enumerate(zip(results, total_of(case).chunk(case.world_size), strict=True)):
        assert torch.equal(result, right), (rank, case, accumulate, how)


def check_ag_gemm(ranks: EmulatedRanks, case: ScaledCase, accumulate: str, **how: Any) -> None:
    xs, weights, scales, bias = operands(case, accumulate)
    biases = None if bias is None else [bias] * case.world_size
    results = ranks.ag_gemm(xs, weights, biases, scales=scales, **how)
    ranks.check()
    for rank, result in enumerate(results):
        assert torch.equal(result, gathered_of(case, rank)), (rank, case, accumulate, how)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("tile", [None, *SENDING], ids=str)
def test_gemm_rs_is_exact(tile: core.TileConfig | None, world_size: int, copied: bool) -> None:
    ranks = EmulatedRanks(world_size)
    shapes = [(rows * world_size, n, k) for rows, n, k in SHAPES]
    for case, accumulate in cases(world_size, shapes, sums=True):
        if tile is not None and not tile.promotes and accumulate != "fast":
            continue
        for cluster in (ALONE, PAIR_M):
            config = CHOSEN if tile is None else tile.id | cluster << 8
            check_gemm_rs(ranks, case, accumulate, config=config, copied=copied, chunks=cluster)


@pytest.mark.parametrize("copied", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("tile", [None, *KEEPING], ids=str)
def test_ag_gemm_is_exact(tile: core.TileConfig | None, world_size: int, copied: bool) -> None:
    """Then a second weight for the same rows, and the gathered rows and scales themselves."""
    ranks = EmulatedRanks(world_size)
    for number, (case, accumulate) in enumerate(cases(world_size, SHAPES, sums=False)):
        if tile is not None and not tile.promotes and accumulate != "fast":
            continue
        xs, _, scales, _ = operands(case, accumulate)
        config = CHOSEN if tile is None else tile.id | (ALONE, PAIR_M, PAIR_N)[number % 3] << 8
        for reuse in (False, True):
            check_ag_gemm(ranks, case, accumulate, config=config, copied=copied, reuse=reuse)
        collected = ranks.collect(xs, copied=copied, scales=scales)
        ranks.check()
        rows, of_rows = collected[:world_size], collected[world_size:]
        expected = torch.cat([x.float() for x in xs])
        expected_scales = torch.cat(
            [each.x.expand(case.m) if each.x.dim() == 1 else each.x for each in scales]
        )
        for rank in range(world_size):
            assert torch.equal(rows[rank].float(), expected), (rank, case)
            assert torch.equal(of_rows[rank], expected_scales), (rank, case)


@pytest.mark.parametrize("mode", [0, 1], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gemm_ar_is_exact(world_size: int, mode: int) -> None:
    ranks = EmulatedRanks(world_size)
    for case, accumulate in cases(world_size, SUMS, sums=True):
        xs, weights, scales, bias = operands(case, accumulate)
        results = ranks.gemm_ar(xs, weights, bias, mode=mode, scales=scales)
        ranks.check()
        expected = total_of(case)
        for rank, result in enumerate(results):
            assert torch.equal(result, expected), (rank, case, accumulate)


@pytest.mark.parametrize("mode", [0, 1], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("quant", ENDS)
def test_quantised_norm_has_the_bits_of_quantize(quant: str, world_size: int, mode: int) -> None:
    """Behind gemm_ar and all_reduce; the sum is exact, and the norm near that of torch."""
    ranks = EmulatedRanks(world_size)
    for number, (m, n, k) in enumerate(
        [(1, 8, 16), (5, 4096, 128), (16, 1000, 256), (64, 520, 384), (300, 2056, 256)]
    ):
        for ue8m0 in (False, True):
            case = ScaledCase(
                m, n, k, world_size, KINDS[number % 3 if k % 128 == 0 else 0], sums=True, seed=number
            )
            xs, weights, scales, _ = operands(case, "promoted")
            norm_weight = torch.arange(n).remainder(3).add(1).bfloat16().cuda()
            static = torch.tensor([0.02], device="cuda") if quant == "tensor" and not ue8m0 else None
            end = End(norm_weight, 1e-6, quant, static, ue8m0)
            residual = case.residual().cuda()
            total = (total_of(case).float() + residual).bfloat16()
            partial = [
                exact_product(*case.x(r), *case.weight(r)).bfloat16().cuda() for r in range(world_size)
            ]
            how = {"mode": mode, "residual": residual, "end": end}
            for results in (
                ranks.gemm_ar(xs, weights, scales=scales, **how),
                ranks.all_reduce(partial, **how),
            ):
                ranks.check()
                norms, sums, qs, q_scales = (results[i * world_size :][:world_size] for i in range(4))
                for rank in range(world_size):
                    what = (rank, case, quant, ue8m0)
                    assert torch.equal(sums[rank], total), what
                    near = rms_norm(total, norm_weight, 1e-6)
                    assert torch.allclose(norms[rank].float(), near.float(), rtol=2**-7, atol=1e-6), what
                    options = {"ue8m0": ue8m0} if static is None else {"scale": static.cpu()}
                    expected, of_groups = flux.quantize(norms[rank].cpu(), quant, **options)
                    assert torch.equal(q_scales[rank].cpu(), of_groups), what
                    assert torch.equal(bits(qs[rank]), bits(expected)), what


def test_calls_with_scales_and_without_take_turns_on_one_workspace() -> None:
    """Nothing joins the streams of the ranks, so slots, signals and epochs are used by all of them."""
    ranks = EmulatedRanks(4)
    pending = []
    for case, accumulate in cases(4, [(m, n, k) for m, n, k in SHAPES if m % 4 == 0], sums=True):
        scattered, gathering = operands(case, accumulate), replace(case, sums=False, m=case.m // 4)
        rows = operands(gathering, accumulate)
        plain = [x.bfloat16() for x in rows.xs]
        torch.cuda.synchronize()
        for _ in range(3):
            first = ranks.gemm_rs(*scattered[:2], scattered.bias, scales=scattered.scales, join=False)
            biases = None if rows.bias is None else [rows.bias] * 4
            second = ranks.ag_gemm(*rows[:2], biases, scales=rows.scales, join=False)
            third = ranks.all_gather(plain, join=False)
            pending.append((case, gathering, (scattered, rows, plain), first, second, third))
    ranks.check()
    for case, gathering, (_, _, plain), first, second, third in pending:
        shards = total_of(case).chunk(4)
        for rank in range(4):
            assert torch.equal(first[rank], shards[rank]), (rank, case)
            assert torch.equal(second[rank], gathered_of(gathering, rank)), (rank, gathering)
            assert torch.equal(third[rank], torch.cat(plain)), rank
