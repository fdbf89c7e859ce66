"""flux.gemm_ar and flux.all_reduce between CPU processes: exact sums, equal on all ranks to the last bit. One
set of processes per world size runs all cases; each test here looks at one answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Answers, asked_of_one_and_of_several, case_name, compare, questions, run_all

import flux
from flux._native import core
from flux.calls import front
from flux.ops import all_reduce as reduce_ops
from flux.ops import gemm_ar as ops
from flux.ops.gemm import SERVED_TOKENS
from flux.plan import sums as plan_sums
from flux.testing import GemmRsCase, spawn, tolerance

WORLD_SIZES = [1, 2, 3, 4]
ONE_SHOT, TWO_SHOT = core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT
# m, n, k; some with fewer rows than ranks, fewer vectors of 8 columns than ranks, or a vector that is cut
SHAPES = [(1, 1, 2), (1, 8, 8), (3, 20, 33), (16, 264, 24), (130, 257, 65), (64, 1000, 16)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    (shape, dtype, transpose_weight, bias)
    for i, shape in enumerate(SHAPES)
    for j, dtype in enumerate(DTYPES)
    for transpose_weight in (False, True)
    for bias in (False, True)
    if (i + j + transpose_weight + bias) % 2 == 0
] + [((5, 72, 20), torch.float64, False, True)]


def differs_between_ranks(tensor: torch.Tensor) -> bool:
    """Whether any rank has other bits, or another sign of a zero."""
    mine = tensor.contiguous().view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return any(not torch.equal(mine, other) for other in everybody)


@contextmanager
def deciding(mode: Any) -> Iterator[None]:
    """All sums go by `mode(m, n, world_size)`: the model takes two-shot for large ones only."""
    model = core.all_reduce_mode
    flux.release()  # and with it the plans
    core.all_reduce_mode = mode
    try:
        yield
    finally:
        flux.release()
        core.all_reduce_mode = model


def run_case(rank: int, world_size: int, index: int) -> str:
    (m, n, k), dtype, transpose_weight, bias = CASES[index]
    case = GemmRsCase(m, n, k, world_size, dtype, transpose_weight, bias, seed=index)
    x, weight, b = case.inputs(rank)
    expected = case.expected_sum()
    layout = {"transpose_weight": transpose_weight}
    result = flux.gemm_ar(x, weight, b, **layout)
    out = torch.full_like(expected, 3)
    assert flux.gemm_ar(x, weight, b, out=out, **layout) is out
    # Small even numbers: still exact in every type.
    residual = torch.arange(m * n).view(m, n).remainder(5).mul(2).sub(4).to(dtype)
    total = flux.gemm_ar(x, weight, b, residual=residual, **layout)
    reference = ops.reference(x, weight, b, None, transpose_weight)
    answers = [compare(r, expected) for r in (result, out, reference, total - residual)]
    # What one rank computes carries its mark in every element.
    partial = ops.plain.reference(x, weight, None, transpose_weight)
    expected = expected if b is None else expected - b
    out.fill_(3)
    assert flux.all_reduce(partial, out=out) is out
    answers += [compare(flux.all_reduce(partial), expected), compare(out, expected)]
    answers.append(compare(reduce_ops.reference(partial), expected))
    norm_weight = torch.arange(n).remainder(3).add(1).to(dtype)
    norm, total = flux.all_reduce(partial, residual=residual, norm_weight=norm_weight)
    own_norm, own_total = flux.all_reduce(partial, norm_weight=norm_weight)
    in_place = residual.clone()
    flux.all_reduce(partial, residual=in_place, out=in_place)
    for sum_and_residual in (flux.all_reduce(partial, residual=residual), total, in_place):
        answers.append(compare(sum_and_residual - residual, expected))
    answers.append(compare(reduce_ops.reference(partial, residual=residual), total))
    answers += [compare(norm, ops.rms_norm(total, norm_weight, 1e-6)), compare(own_total, expected)]
    answers.append(compare(own_norm, ops.rms_norm(own_total, norm_weight, 1e-6)))
    flux.all_reduce(partial, residual=residual, out=partial)
    answers.append(compare(partial, total))
    partial = ops.plain.reference(x, weight, None, transpose_weight)
    flux.all_reduce(partial, out=partial)
    answers.append(compare(partial, expected))
    return "; ".join(a for a in answers if a)


def two_shot(rank: int, world_size: int) -> str:
    with deciding(lambda *_: TWO_SHOT):
        answers = {case_name(case): run_case(rank, world_size, i) for i, case in enumerate(CASES)}
        plan = flux.explain("gemm_ar", 4, 8, 8)
        assert world_size == 1 or plan.transport.endswith("two-shot"), plan
    return "; ".join(f"{name}: {answer}" for name, answer in answers.items() if answer)


def random_data(rank: int, world_size: int) -> str:
    m, n, k = 37, 300, 200
    for mode in (ONE_SHOT, TWO_SHOT):
        with deciding(lambda *_, mode=mode: mode):
            for dtype in [*DTYPES, torch.float64]:
                g = torch.Generator().manual_seed(rank)
                x, weight = (torch.randn(size, k, generator=g).to(dtype) for size in (m, n))
                g.manual_seed(99)
                bias, residual = (torch.randn(*s, generator=g).to(dtype) for s in ((n,), (m, n)))
                result = flux.gemm_ar(x, weight, bias, residual=residual)
                if not torch.equal(result, flux.gemm_ar(x, weight, bias, residual=residual)):
                    return f"{dtype}: not bitwise repeatable"
                if differs_between_ranks(result) or differs_between_ranks(flux.all_reduce(x)):
                    return f"{dtype}: not the same on all ranks"
                # The same roundings, in the same order.
                wanted = ops.reference(x, weight, bias, residual=residual)
                if answer := compare(result, wanted) or compare(flux.all_reduce(x), reduce_ops.reference(x)):
                    return f"{dtype}: {answer}"
                exact = ops.reference(x.double(), weight.double(), bias.double(), residual=residual.double())
                # One rank rounds its product before it adds the residual: as if it had travelled.
                atol, rtol = tolerance(k, dtype, max(world_size, 2))
                if not ((result.double() - exact).abs() <= atol + rtol * exact.abs()).all():
                    return f"{dtype}: beyond the tolerance"
    return ""


def norms(rank: int, world_size: int) -> str:
    m, n, k, eps = 21, 264, 48, 1e-5
    for mode in (ONE_SHOT, TWO_SHOT):
        with deciding(lambda *_, mode=mode: mode):
            for dtype in [*DTYPES, torch.float64]:
                g = torch.Generator().manual_seed(rank)
                x, weight = (torch.randn(size, k, generator=g).to(dtype) for size in (m, n))
                g.manual_seed(99)
                residual, norm_weight = (torch.randn(*s, generator=g).to(dtype) for s in ((m, n), (n,)))
                for added in (None, residual):
                    got, total = flux.gemm_ar(
                        x, weight, residual=added, norm_weight=norm_weight, eps=eps, transpose_weight=False
                    )
                    if answer := compare(total, flux.gemm_ar(x, weight, residual=added)):
                        return f"{dtype}, sum: {answer}"
                    if differs_between_ranks(got):
                        return f"{dtype}: not the same on all ranks"
                    wide = total.double()
                    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
                    exact = wide * scale * norm_weight.double()
                    # The mean of n squares, which are positive, errs by at most n roundings of the type it is
                    # taken in, its root by half of that; mean, root and two products are four more. Then one
                    # rounding to the type of x: half of what finfo calls eps, or of the smallest number.
                    inner = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
                    info = torch.finfo(dtype)
                    rtol = info.eps / 2 + (n / 2 + 4) * inner
                    if not ((got.double() - exact).abs() <= rtol * exact.abs() + info.smallest_normal).all():
                        return f"{dtype}: beyond the tolerance"
    return ""


def serving(rank: int, world_size: int) -> str:
    """What graphs of models that serve call, with a few tokens, with more of them, and with a bias."""
    answers = []
    for m, bias in ((3, False), (SERVED_TOKENS + 1, False), (3, True)):
        case = GemmRsCase(m, 24, 16, world_size, torch.bfloat16, bias=bias, seed=m)
        x, weight, added = case.inputs(rank)
        residual, ones = 2 * torch.ones(m, 24).bfloat16(), torch.ones(24).bfloat16()
        norm, total = ops.serving(x, weight, added, residual, ones, 1e-6, None)
        answers += [compare(total, case.expected_sum() + 2), compare(norm, ops.rms_norm(total, ones, 1e-6))]
    return "; ".join(a for a in answers if a)


def other_forms(rank: int, world_size: int) -> str:
    case = GemmRsCase(6 * 5, 24, 16, world_size, torch.float16, seed=5)
    x, weight, _ = case.inputs(rank)
    expected = case.expected_sum()
    strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype)[:, ::2].copy_(x)
    ones = torch.ones(24).half()
    residual = 2 * torch.ones(2, 3, 5, 24).half()
    norm, total = flux.gemm_ar(x.view(2, 3, 5, 16), weight, residual=residual, norm_weight=ones)
    deep = torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4)  # not contiguous
    answers = [
        compare(flux.gemm_ar(x.view(6, 5, 16), weight), expected.view(6, 5, 24)),
        compare(total, expected.view(2, 3, 5, 24) + 2),
        compare(norm, ops.rms_norm(total, ones, 1e-6)),
        compare(flux.gemm_ar(strided, weight.t().contiguous().t()), expected),
        compare(flux.gemm_ar(x, weight.t(), transpose_weight=True), expected),
        compare(flux.gemm_ar(x, weight, residual=ones.expand(30, 24)), expected + 1),
        compare(
            flux.gemm_ar(x, weight, residual=total.view(30, 24), out=total.view(30, 24)), 2 * expected + 2
        ),
        compare(flux.gemm_ar(x, weight, group=dist.group.WORLD), expected),
        compare(flux.gemm_ar(x[:0], weight), expected[:0]),
        compare(flux.gemm_ar(x[:0], weight, norm_weight=ones)[0], expected[:0]),
        compare(flux.gemm_ar(x, weight[:0]), expected[:, :0]),
        compare(flux.gemm_ar(x[:, :0], weight[:, :0], ones), torch.ones_like(expected)),
        compare(flux.all_reduce(deep), deep * world_size),
        compare(flux.all_reduce(deep, residual=deep, norm_weight=torch.ones(4))[1], deep * (world_size + 1)),
        compare(flux.all_reduce(x[:0], norm_weight=x[0])[0], x[:0]),
        compare(flux.all_reduce(torch.tensor(3.0)), torch.tensor(3.0 * world_size)),
        compare(flux.all_reduce(x[:0]), x[:0]),
    ]
    return "; ".join(a for a in answers if a)


@asked_of_one_and_of_several
def torch_sees(rank: int, world_size: int) -> str:
    """opcheck, meta tensors and torch.compile, in the same order on all ranks."""
    name = dist.group.WORLD.group_name
    x, weight, bias, residual = torch.randn(4, 8), torch.randn(6, 8), torch.ones(6), torch.ones(4, 6)
    flux_ops = torch.ops.flux
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (flux_ops.gemm_ar, (x, weight, bias, False, residual, name)),
        (flux_ops.gemm_ar_out, (x, weight, None, False, None, name, torch.empty(4, 6))),
        (flux_ops.gemm_ar_norm, (x, weight, None, False, residual, bias, 1e-6, name)),
        (flux_ops.all_reduce, (x, None, name)),
        (flux_ops.all_reduce, (residual, residual + 1, name)),
        (flux_ops.all_reduce_out, (x, None, name, torch.empty(4, 8))),
        (flux_ops.all_reduce_norm, (residual, residual + 1, bias, 1e-6, name)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments)
    meta = torch.empty(2, 3, 8, device="meta"), weight.to("meta")
    assert tuple(flux.gemm_ar(*meta).shape) == (2, 3, 6)
    assert [tuple(t.shape) for t in flux.gemm_ar(*meta, norm_weight=bias.to("meta"))] == [(2, 3, 6)] * 2
    assert tuple(flux.all_reduce(meta[0]).shape) == (2, 3, 8)
    assert [tuple(t.shape) for t in flux.all_reduce(meta[0], norm_weight=meta[1][0])] == [(2, 3, 8)] * 2

    def layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, residual = flux.gemm_ar(x * 2, weight, bias, residual=residual, norm_weight=bias)
        z, residual = flux.all_reduce(y, residual=residual, norm_weight=bias)
        return torch.relu(z) + flux.gemm_ar(x, weight).sum(), flux.all_reduce(residual)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (4, 6):
        x, residual = torch.randn(rows, 8), torch.ones(rows, 6)
        torch.testing.assert_close(compiled(x, residual), layer(x, residual))
    return ""


def too_large_to_exchange(rank: int, world_size: int) -> str:
    """gemm_rs and all_gather of the rows that can be dealt, an exchange of the others."""
    names = ("MAX_EXCHANGE_BYTES", "COMPOSED_FROM_BYTES", "RAGGED_FROM_BYTES")
    limits = {name: getattr(plan_sums, name) for name in names}
    vars(plan_sums).update(zip(names, (256, 64, 64), strict=True))
    flux.release()
    try:
        told = []
        for m in (6 * world_size, 6 * world_size + 1, 7 * world_size - 1):
            case = GemmRsCase(m, 40, 16, world_size, bias=True)
            x, weight, bias = case.inputs(rank)
            residual = torch.arange(m * 40).view(m, 40).remainder(5).mul(2).bfloat16()
            norm, total = flux.gemm_ar(x, weight, bias, residual=residual, norm_weight=residual[0] + 1)
            with mock.patch.object(front, "below", wraps=front.below) as dealt:
                told.append(compare(flux.gemm_ar(x, weight, bias), case.expected_sum()))
            rows = [
                len(call.x)
                for op, call, *_ in [made.args for made in dealt.call_args_list]
                if op.name == "gemm_rs"
            ]
            if world_size > 1 and rows != [m - m % world_size]:
                told.append(f"{m} rows: {dealt.call_args_list}")
            in_place = residual.clone()
            flux.gemm_ar(x, weight, bias, residual=in_place, out=in_place)
            told += [
                compare(in_place, total),
                compare(total - residual, case.expected_sum()),
                compare(norm, ops.rms_norm(total, residual[0] + 1, 1e-6)),
                compare(flux.all_reduce(x), reduce_ops.reference(x)),
            ]
            plan = flux.explain("gemm_ar", m, 40, 16)
            way = "as gemm_rs + all_gather"
            way += f", of {m % world_size} rows by exchange" if m % world_size else ""
            if world_size > 1 and not (plan.reason.endswith(way) and plan.by_flux):
                told.append(str(plan))
        return "; ".join(t for t in told if t)
    finally:
        vars(plan_sums).update(limits)
        flux.release()


def unfused(rank: int, world_size: int) -> str:
    answers = [run_case(rank, world_size, index) for index in range(0, len(CASES), 5)]
    for op in ("gemm_ar", "all_reduce"):
        plan = flux.explain(op, 8, 8, 8)
        if plan.by_flux or "FLUX_FUSED=off" not in plan.reason:
            answers.append(str(plan))
    return "; ".join(a for a in answers if a)


SCENARIOS = {
    f.__name__: f
    for f in (two_shot, random_data, norms, serving, other_forms, torch_sees, too_large_to_exchange)
}


def run_everything(rank: int, world_size: int) -> dict[str, str]:
    return run_all(rank, world_size, CASES, run_case, SCENARIOS)


_answers = Answers(run_everything)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(p, case_name(case)) for p in WORLD_SIZES for case in CASES] + questions(WORLD_SIZES, SCENARIOS),
)
def test_gemm_ar(world_size: int, name: str) -> None:
    assert _answers.of(world_size, name) == [""] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_unfused_gives_the_same(world_size: int) -> None:
    assert spawn(unfused, world_size, backend="gloo", env={"FLUX_FUSED": "off"}) == [""] * world_size
