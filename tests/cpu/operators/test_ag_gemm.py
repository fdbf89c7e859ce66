"""flux.ag_gemm and flux.all_gather between CPU processes: exact products of marked rows on every shape, type
and world size. One set of processes per world size runs all cases; each test here looks at one answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Answers, case_name, compare, run_all

import flux
from flux.comm.cpu import CpuWorkspace
from flux.ops import ag_gemm as ops
from flux.ops import all_gather as gather_ops
from flux.testing import AgGemmCase, spawn, tolerance

WORLD_SIZES = [1, 2, 3, 4]
# (rows of one rank, n, k): tiles are 128 rows and up to 256 columns
SHAPES = [(1, 1, 2), (127, 64, 33), (128, 256, 40), (129, 257, 65), (300, 520, 24)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CASES = [
    (shape, dtype, transpose_weight, bias)
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate(DTYPES)
    for transpose_weight in (False, True)
    for bias in (False, True)
    if (i + j + transpose_weight + 2 * bias) % 4 == 0
]


def first(answers: list[str]) -> str:
    return next((answer for answer in answers if answer), "")


def run_case(rank: int, world_size: int, index: int) -> str:
    (rows, n, k), dtype, transpose_weight, bias = CASES[index]
    case = AgGemmCase(rows * world_size, n, k, world_size, dtype, transpose_weight, bias, seed=index)
    x, weight, b = case.inputs(rank)
    expected, gathered = case.expected(rank), case.gathered()
    result = flux.ag_gemm(x, weight, b, transpose_weight=transpose_weight)
    out = torch.full_like(expected, 3)
    layout = {"transpose_weight": transpose_weight}
    told, rows_of_all = flux.ag_gemm(x, weight, b, out=out, return_gathered=True, **layout)
    if told is not out:
        return "out is not returned"
    alone = torch.full_like(gathered, 3)
    if flux.all_gather(x, out=alone) is not alone:
        return "out of all_gather is not returned"
    reference = ops.reference(x, weight, b, None, transpose_weight)
    return first(
        [compare(r, expected) for r in (result, out, reference)]
        + [compare(g, gathered) for g in (rows_of_all, alone, flux.all_gather(x), gather_ops.reference(x))]
    )


def random_data(rank: int, world_size: int) -> str:
    rows, n, k = 160, 300, 200
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(rank)
        x, weight = (torch.randn(size, k, generator=g).to(dtype) for size in (rows, n))
        result = flux.ag_gemm(x, weight)
        if not torch.equal(result, flux.ag_gemm(x, weight)):
            return f"{dtype}: not bitwise repeatable"
        exact = ops.reference(x.double(), weight.double())
        atol, rtol = tolerance(k, dtype)
        if ((result.double() - exact).abs() > atol + rtol * exact.abs()).any():
            return f"{dtype}: beyond the tolerance"
    return ""


def other_forms(rank: int, world_size: int) -> str:
    p = world_size
    case = AgGemmCase(30 * p, 24, 16, p, torch.float16, seed=5)
    x, weight, _ = case.inputs(rank)
    expected, gathered = case.expected(rank), case.gathered()
    strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype)[:, ::2].copy_(x)
    folded, folded_rows = flux.ag_gemm(x.view(6, 5, 16), weight, return_gathered=True)
    alone, rows_alone = flux.ag_gemm(x[:, :0], weight[:, :0], torch.ones(24).half(), return_gathered=True)
    return first(
        [
            compare(folded, expected.view(6 * p, 5, 24)),
            compare(folded_rows, gathered.view(6 * p, 5, 16)),
            compare(flux.ag_gemm(x.view(2, 3, 5, 16), weight), expected.view(2 * p, 3, 5, 24)),
            compare(flux.ag_gemm(strided, weight.t().contiguous().t()), expected),
            compare(flux.ag_gemm(x, weight.t(), transpose_weight=True), expected),
            compare(flux.ag_gemm(x.t().contiguous().t(), weight, group=dist.group.WORLD), expected),
            compare(flux.ag_gemm(x[:0], weight), expected[:0]),
            compare(flux.ag_gemm(x, weight[:0]), expected[:, :0]),
            compare(flux.ag_gemm(x, weight[:0], return_gathered=True)[1], gathered),
            compare(alone, torch.ones_like(expected)),
            compare(rows_alone, gathered[:, :0]),
            compare(flux.all_gather(x.view(6, 5, 16)), gathered.view(6 * p, 5, 16)),
            compare(flux.all_gather(x[:, 3]), gathered[:, 3]),
            compare(flux.all_gather(strided), gathered),
            compare(flux.all_gather(x[:0]), gathered[:0]),
            compare(flux.all_gather(x[:, :0]), gathered[:, :0]),
        ]
    )


def lists_of_weights(rank: int, world_size: int) -> str:
    """q, k, v of different widths, with and without bias: one gather, several products."""
    case = AgGemmCase(150 * world_size, 264, 40, world_size, seed=3, bias=True)
    cases = [case, replace(case, n=8), replace(case, n=24)]
    x = case.inputs(rank)[0]
    weights = [c.inputs(rank)[1] for c in cases]
    biases = [c.inputs(rank)[2] for c in cases]
    plain = [replace(c, bias=False).expected(rank) for c in cases]
    expected = [c.expected(rank) for c in cases]
    sent = []
    signal = CpuWorkspace.signal

    def counted(self: CpuWorkspace, *args: Any) -> None:
        sent.append(args)
        signal(self, *args)

    CpuWorkspace.signal = counted  # type: ignore[method-assign]
    try:
        results, gathered = flux.ag_gemm(x, weights, biases, return_gathered=True)
    finally:
        CpuWorkspace.signal = signal  # type: ignore[method-assign]
    if flux.explain("ag_gemm", case.m, case.n, case.k).by_flux and len(sent) != 2 * (world_size - 1):
        return f"{len(sent)} blocks were sent"
    outs = [torch.full_like(e, 3) for e in expected]
    given = flux.ag_gemm(x, tuple(weights), [None, biases[1], None], out=outs)
    if type(given) is not list or any(a is not b for a, b in zip(given, outs, strict=True)):
        return "out is not returned"
    transposed = [w.t().contiguous() for w in weights]
    more = [
        *zip(flux.ag_gemm(x, transposed, transpose_weight=True), plain, strict=True),
        *zip(flux.ag_gemm(x, weights[:1], [biases[0]]), expected, strict=False),
        *zip(flux.ag_gemm(x, [weights[0], weights[1][:0]]), [plain[0], plain[1][:, :0]], strict=True),
    ]
    return first(
        [compare(r, e) for r, e in zip(results, expected, strict=True)]
        + [compare(gathered, case.gathered())]
        + [compare(r, e) for r, e in zip(outs, [plain[0], expected[1], plain[2]], strict=True)]
        + [compare(r, e) for r, e in more]
    )


def unfused(rank: int, world_size: int) -> str:
    answers = [run_case(rank, world_size, index) for index in range(0, len(CASES), 3)]
    answers += [other_forms(rank, world_size), lists_of_weights(rank, world_size)]
    plan = flux.explain("ag_gemm", 8 * world_size, 8, 8)
    if plan.by_flux or "FLUX_FUSED=off" not in plan.reason:
        answers.append(str(plan))
    return first(answers)


SCENARIOS = {f.__name__: f for f in (random_data, other_forms, lists_of_weights)}


def run_everything(rank: int, world_size: int) -> dict[str, str]:
    return run_all(rank, world_size, CASES, run_case, SCENARIOS)


_answers = Answers(run_everything)


@pytest.mark.parametrize("name", [case_name(case) for case in CASES] + list(SCENARIOS))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ag_gemm(world_size: int, name: str) -> None:
    assert _answers.of(world_size, name) == [""] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_unfused_gives_the_same(world_size: int) -> None:
    assert spawn(unfused, world_size, backend="gloo", env={"FLUX_FUSED": "off"}) == [""] * world_size


def torch_sees(rank: int, world_size: int) -> str:
    """opcheck, meta tensors and torch.compile, in the same order on all ranks."""
    p, name = world_size, dist.group.WORLD.group_name
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    op, out_op = torch.ops.flux.ag_gemm.default, torch.ops.flux.ag_gemm_out.default
    torch.library.opcheck(op, (x, [weight], [], False, False, name))
    torch.library.opcheck(op, (x, [weight, weight[:3]], [bias, None], False, True, name))
    torch.library.opcheck(out_op, (x, [weight], [bias], False, False, name, [torch.empty(4 * p, 6)]))
    outs = [torch.empty(4 * p, 6), torch.empty(4 * p, 8)]
    torch.library.opcheck(out_op, (x, [weight], [], False, True, name, outs))
    torch.library.opcheck(torch.ops.flux.all_gather.default, (x, name))
    torch.library.opcheck(torch.ops.flux.all_gather_out.default, (x, name, torch.empty(4 * p, 8)))
    (first, second), gathered = flux.ag_gemm(
        torch.empty(2, 3, 8, device="meta"), [weight.to("meta"), weight[:1].to("meta")], return_gathered=True
    )
    assert first.shape == (2 * p, 3, 6) and second.shape == (2 * p, 3, 1) and gathered.shape == (2 * p, 3, 8)
    assert flux.all_gather(torch.empty(3, device="meta")).shape == (3 * p,)

    def layer(x: torch.Tensor) -> list[torch.Tensor]:
        (a, b), rows = flux.ag_gemm(
            x * 2, [weight, weight[:4]], [bias, None], group=dist.group.WORLD, return_gathered=True
        )
        out = torch.empty(x.shape[0] * p, 6)
        flux.ag_gemm(x, weight, out=out)
        return [torch.relu(a) + out, b, rows, flux.all_gather(x) + flux.ag_gemm(x, weight).sum()]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), layer(x))
    return ""


def test_torch_sees_operators() -> None:
    assert spawn(torch_sees, 2, backend="gloo") == [""] * 2


def test_results_of_one_rank_are_fresh_tensors() -> None:
    assert spawn(one_rank, 1, backend="gloo") == [""]


def one_rank(rank: int, world_size: int) -> str:
    x = torch.eye(4)
    result, gathered = flux.ag_gemm(x, x, return_gathered=True)
    for tensor in (result, gathered, flux.all_gather(x)):
        tensor.fill_(9)
    return compare(x, torch.eye(4))
