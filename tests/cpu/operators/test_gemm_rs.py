"""flux.gemm_rs between CPU processes: exact sums on every shape, type and world size. One set of processes
per world size runs all cases; each test here looks at one answer.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Answers, asked_of_one_and_of_several, case_name, compare, questions, run_all

import flux
from flux.ops import gemm_rs as ops
from flux.testing import GemmRsCase, spawn, tolerance

WORLD_SIZES = [1, 2, 3, 4]
# (rows of one shard, n, k): tiles are 128 rows and up to 256 columns
SHAPES = [(1, 1, 2), (7, 8, 16), (127, 64, 33), (128, 256, 40), (129, 257, 65), (300, 520, 24)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    (shape, dtype, transpose_weight, bias)
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate(DTYPES)
    for transpose_weight in (False, True)
    for bias in (False, True)
    if (i + j + transpose_weight + bias) % 2 == 0
] + [((64, 72, 20), torch.float64, False, True)]


def run_case(rank: int, world_size: int, index: int) -> str:
    (rows, n, k), dtype, transpose_weight, bias = CASES[index]
    case = GemmRsCase(rows * world_size, n, k, world_size, dtype, transpose_weight, bias, seed=index)
    x, weight, b = case.inputs(rank)
    expected = case.expected(rank)
    result = flux.gemm_rs(x, weight, b, transpose_weight=transpose_weight)
    out = torch.full_like(expected, 3)
    flux.gemm_rs(x, weight, b, transpose_weight=transpose_weight, out=out)
    reference = ops.reference(x, weight, b, None, transpose_weight)
    return compare(result, expected) or compare(out, expected) or compare(reference, expected)


def random_data(rank: int, world_size: int) -> str:
    m, n, k = 160 * world_size, 300, 200
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(rank)
        x, weight = (torch.randn(size, k, generator=g).to(dtype) for size in (m, n))
        result = flux.gemm_rs(x, weight)
        if not torch.equal(result, flux.gemm_rs(x, weight)):
            return f"{dtype}: not bitwise repeatable"
        exact = ops.reference(x.double(), weight.double())
        atol, rtol = tolerance(k, dtype, world_size)
        if ((result.double() - exact).abs() > atol + rtol * exact.abs()).any():
            return f"{dtype}: beyond the tolerance"
    return ""


def other_forms(rank: int, world_size: int) -> str:
    case = GemmRsCase(6 * world_size * 5, 24, 16, world_size, torch.float16, seed=5)
    x, weight, _ = case.inputs(rank)
    expected = case.expected(rank)
    strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype)[:, ::2].copy_(x)
    answers = [
        compare(flux.gemm_rs(x.view(6 * world_size, 5, 16), weight), expected.view(6, 5, 24)),
        compare(flux.gemm_rs(x.view(world_size, 2, 3, 5, 16), weight), expected.view(1, 2, 3, 5, 24)),
        compare(flux.gemm_rs(strided, weight.t().contiguous().t()), expected),
        compare(flux.gemm_rs(x, weight.t(), transpose_weight=True), expected),
        compare(flux.gemm_rs(x.t().contiguous().t(), weight, group=dist.group.WORLD), expected),
        compare(flux.gemm_rs(x[:0], weight), expected[:0]),
        compare(flux.gemm_rs(x, weight[:0]), expected[:, :0]),
        compare(flux.gemm_rs(x[:, :0], weight[:, :0], torch.ones(24).half()), torch.ones_like(expected)),
    ]
    return "; ".join(a for a in answers if a)


@asked_of_one_and_of_several
def torch_sees(rank: int, world_size: int) -> str:
    """opcheck, meta tensors and torch.compile, in the same order on all ranks."""
    name = dist.group.WORLD.group_name
    x, weight, bias = torch.randn(4 * world_size, 8), torch.randn(6, 8), torch.randn(6)
    torch.library.opcheck(torch.ops.flux.gemm_rs.default, (x, weight, bias, False, name))
    arguments = (x, weight, None, False, name, torch.empty(4, 6))
    torch.library.opcheck(torch.ops.flux.gemm_rs_out.default, arguments)
    meta = flux.gemm_rs(torch.empty(2 * world_size, 3, 8, device="meta"), weight.to("meta"))
    assert tuple(meta.shape) == (2, 3, 6)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.relu(flux.gemm_rs(x * 2, weight, bias, group=dist.group.WORLD))
            + flux.gemm_rs(x, weight).sum()
        )

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (4, 6):
        x = torch.randn(rows * world_size, 8)
        torch.testing.assert_close(compiled(x), layer(x))
    return ""


def unfused(rank: int, world_size: int) -> str:
    answers = [run_case(rank, world_size, index) for index in range(0, len(CASES), 5)]
    plan = flux.explain("gemm_rs", 8 * world_size, 8, 8)
    if world_size > 1 and (plan.by_flux or "FLUX_FUSED=off" not in plan.reason):
        answers.append(str(plan))
    return "; ".join(a for a in answers if a)


SCENARIOS = {f.__name__: f for f in (random_data, other_forms, torch_sees)}


def run_everything(rank: int, world_size: int) -> dict[str, str]:
    return run_all(rank, world_size, CASES, run_case, SCENARIOS)


_answers = Answers(run_everything)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(p, case_name(case)) for p in WORLD_SIZES for case in CASES] + questions(WORLD_SIZES, SCENARIOS),
)
def test_gemm_rs(world_size: int, name: str) -> None:
    assert _answers.of(world_size, name) == [""] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_unfused_gives_the_same(world_size: int) -> None:
    assert spawn(unfused, world_size, backend="gloo", env={"FLUX_FUSED": "off"}) == [""] * world_size
