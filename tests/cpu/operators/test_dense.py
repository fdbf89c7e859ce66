"""Dense collectives between CPU processes: exact results of marked data on every shape, type and world size,
equal on all ranks where ranks share them. One set of processes per world size makes all calls; each test here
looks at one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import references
import torch
import torch.distributed as dist
from cases import Answers, asked_at, by_name, compare, questions, run_scenarios
from dense_forms import FORMS
from torch import Tensor

import flux
from flux._native import core
from flux.calls import front
from flux.comm import registry
from flux.comm.cpu import CpuWorkspace
from flux.ops import gemm, gemm_ar
from flux.ops.gemm import SERVED_TOKENS
from flux.plan import sums as plan_sums
from flux.testing import AgGemmCase, GemmRsCase, tolerance

WORLD_SIZES = [1, 2, 3, 4]
ONE_SHOT, TWO_SHOT = core.ExchangeMode.ONE_SHOT, core.ExchangeMode.TWO_SHOT
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Rows, of a rank or of a sum, n and k: around tiles, which have 128 rows and up to 256 columns; fewer rows or
# vectors of 8 columns than ranks, or a vector that is cut.
SHAPES = {
    "gemm": [(1, 1, 2), (3, 5, 7), (64, 48, 33), (129, 257, 100)],
    "gemm_rs": [(1, 1, 2), (7, 8, 16), (127, 64, 33), (128, 256, 40), (129, 257, 65), (300, 520, 24)],
    "ag_gemm": [(1, 1, 2), (127, 64, 33), (128, 256, 40), (129, 257, 65), (300, 520, 24)],
    "gemm_ar": [(1, 1, 2), (1, 8, 8), (3, 20, 33), (16, 264, 24), (130, 257, 65), (64, 1000, 16)],
}
CASES = {
    f"{op} {n}x{k} of {rows} rows, {str(dtype)[6:]}{' [K, N]' * transposed}{' bias' * bias}": (
        op, rows, (n, k), dtype, transposed, bias, number,
    )
    for op, shapes in SHAPES.items()
    for number, (rows, n, k) in enumerate(shapes)
    for i, dtype in enumerate([*DTYPES, torch.float64])
    for transposed in (False, True)
    for bias in (False, True)
    if (number + i + transposed + bias) % 2 == 0 and (dtype != torch.float64 or bias)
}  # fmt: skip


def run_case(name: str, rank: int, p: int) -> None:
    op, rows, sizes, dtype, transposed, bias, number = CASES[name]
    kind, m = AgGemmCase if op == "ag_gemm" else GemmRsCase, rows if op in ("gemm", "gemm_ar") else rows * p
    rank, p = (0, 1) if op == "gemm" else (rank, p)
    case = kind(m, *sizes, p, dtype, transposed, bias, seed=number)
    for what, result, expected in FORMS[op](case, rank):
        assert not compare(result, expected), f"{what}: {compare(result, expected)}"


def all_equal(*pairs: tuple[Tensor, Tensor]) -> None:
    assert not (told := [f"pair {i}: {compare(*pair)}" for i, pair in enumerate(pairs) if compare(*pair)]), (
        told
    )


def draw(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def is_near(result: Tensor, exact: Tensor, atol: float, rtol: float) -> bool:
    return bool(((result.double() - exact).abs() <= atol + rtol * exact.abs()).all())


def random_data(rank: int, p: int) -> None:
    for dtype in [*DTYPES, torch.float64]:
        x, weight = draw(rank, dtype, (40 * p, 200), (100, 200))
        for op, terms in (("gemm", 1), ("gemm_rs", p), ("ag_gemm", 1)):
            call = getattr(flux, op)
            result = call(x, weight)
            exact = getattr(references, op)(x.double(), weight.double())
            assert torch.equal(result, call(x, weight)), f"{dtype}: not bitwise repeatable"
            assert is_near(result, exact, *tolerance(200, dtype, terms)), dtype
            short = call(x[:, 1:], weight[:, 1:])
            assert not is_near(short, exact, *tolerance(200, dtype, terms)), "a wrong K would pass"


@contextmanager
def deciding(mode: Any) -> Iterator[None]:
    """All sums go in this mode: the model takes two-shot for large ones only."""
    flux.release()  # and with it the plans
    with mock.patch.object(core, "all_reduce_mode", lambda *_: mode):
        try:
            yield
        finally:
            flux.release()


def differs_between_ranks(tensor: Tensor) -> bool:
    """Whether any rank has other bits, or another sign of a zero."""
    mine = tensor.contiguous().view(torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return any(not torch.equal(mine, other) for other in everybody)


@asked_at(2, 3, 4)
def two_shot(rank: int, p: int) -> None:
    with deciding(TWO_SHOT):
        for name in CASES:
            if name.startswith("gemm_ar"):
                run_case(name, rank, p)
        plan = flux.explain("gemm_ar", 4, 8, 8)
        assert plan.transport.endswith("two-shot"), plan


def rounded_sums(rank: int, p: int) -> None:
    """The same bits on all ranks and in every call, which are those of the reference."""
    m, n, k, eps = 12 * p + 1, 300, 200, 1e-5
    for mode in (ONE_SHOT, TWO_SHOT):
        with deciding(mode):
            for dtype in [*DTYPES, torch.float64]:
                x, weight = draw(rank, dtype, (m, k), (n, k))
                bias, residual, norm_weight = draw(99, dtype, (n,), (m, n), (n,))
                result = flux.gemm_ar(x, weight, bias, residual=residual)
                assert torch.equal(result, flux.gemm_ar(x, weight, bias, residual=residual)), "not repeatable"
                # The same roundings, in the same order.
                reduced, rows = flux.all_reduce(x), flux.reduce_scatter(x[1:])
                all_equal(
                    (result, references.gemm_ar(x, weight, bias, residual=residual)),
                    (reduced, references.all_reduce(x)),
                    (rows, references.reduce_scatter(x[1:])),
                    (rows, reduced[1:][12 * rank :][:12]),
                )
                exact = references.gemm_ar(
                    *(t.double() for t in (x, weight, bias)), residual=residual.double()
                )
                # One rank rounds its product before it adds the residual: as if it had travelled.
                assert is_near(result, exact, *tolerance(k, dtype, max(p, 2))), dtype
                for added in (None, residual):
                    how: Any = {"residual": added, "norm_weight": norm_weight, "eps": eps}
                    norm, total = flux.gemm_ar(x, weight, **how)
                    all_equal((total, flux.gemm_ar(x, weight, residual=added)))
                    assert not any(map(differs_between_ranks, (result, reduced, norm))), dtype
                    wide = total.double()
                    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
                    # The mean of n squares, which are positive, errs by at most n roundings of the type it is
                    # taken in, its root by half of that; mean, root and two products are four more. Then one
                    # rounding to the type of x: half of what finfo calls eps, or of the smallest number.
                    inner = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
                    info = torch.finfo(dtype)
                    rtol = info.eps / 2 + (n / 2 + 4) * inner
                    assert is_near(norm, wide * scale * norm_weight.double(), info.smallest_normal, rtol), (
                        dtype
                    )


def serving(rank: int, p: int) -> None:
    """What graphs of models that serve call, with a few tokens, with more of them, and with a bias."""
    for m, bias in ((3, False), (SERVED_TOKENS + 1, False), (3, True)):
        case = GemmRsCase(m, 24, 16, p, torch.bfloat16, bias=bias, seed=m)
        x, weight, added = case.inputs(rank)
        residual, ones = 2 * torch.ones(m, 24).bfloat16(), torch.ones(24).bfloat16()
        norm, total = gemm_ar.serving(x, weight, added, residual, ones, 1e-6, None)
        all_equal((total, case.expected_sum() + 2), (norm, gemm_ar.rms_norm(total, ones, 1e-6)))


def strides_and_groups(rank: int, p: int) -> None:
    """Layouts of x and the weight, and the group by itself."""
    for op in ("gemm", "gemm_rs", "ag_gemm", "gemm_ar"):
        kind: Any = AgGemmCase if op == "ag_gemm" else GemmRsCase
        ranks, mine, group = (1, 0, {}) if op == "gemm" else (p, rank, {"group": dist.group.WORLD})
        case, call = kind(30 * ranks, 24, 16, ranks, torch.float16, seed=5), getattr(flux, op)
        x, weight, _ = case.inputs(mine)
        expected = case.expected_sum() if op == "gemm_ar" else case.expected(mine)
        strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=x.dtype)[:, ::2].copy_(x)
        all_equal(
            (call(strided, weight.t().contiguous().t()), expected),
            (call(x, weight.t(), transpose_weight=True), expected),
            (call(x.t().contiguous().t(), weight, **group), expected),
            (call(x.view(-1, 5, 16), weight), expected.view(-1, 5, 24)),
            (call(x.view(len(x) // 15, 3, 5, 16), weight), expected.view(-1, 3, 5, 24)),
        )


def other_gathers(rank: int, p: int) -> None:
    case = AgGemmCase(30 * p, 24, 16, p, torch.float16, seed=5)
    x, weight, _ = case.inputs(rank)
    everything = case.gathered()
    gathered = partial(flux.ag_gemm, return_gathered=True)
    all_equal(
        (gathered(x.view(6, 5, 16), weight)[1], everything.view(6 * p, 5, 16)),
        (flux.all_gather(x.view(6, 5, 16)), everything.view(6 * p, 5, 16)),
        (flux.all_gather(x[:, 3]), everything[:, 3]),
        (flux.all_gather(x[:, ::2]), everything[:, ::2]),
    )


def results_are_fresh_tensors(rank: int, p: int) -> None:
    x = torch.eye(4)
    for tensor in (*flux.ag_gemm(x, x, return_gathered=True), flux.all_gather(x), flux.gemm(x, x)):
        tensor.fill_(9)
    all_equal((x, torch.eye(4)))


def other_sums(rank: int, p: int) -> None:
    case = GemmRsCase(6 * 5, 24, 16, p, torch.float16, seed=5)
    x, weight, _ = case.inputs(rank)
    expected = case.expected_sum()
    ones, residual = torch.ones(24).half(), 2 * torch.ones(2, 3, 5, 24).half()
    norm, total = flux.gemm_ar(x.view(2, 3, 5, 16), weight, residual=residual, norm_weight=ones)
    flat = total.view(30, 24).clone()
    deep = torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4)  # not contiguous
    more = torch.arange(3.0).view(1, 3, 1).expand(2 * p, 3, 4)
    marked = torch.arange(4.0 * p).add(100 * rank)
    of_marked = (p * torch.arange(4.0 * p) + 100 * sum(range(p)))[4 * rank :][:4]
    all_equal(
        (total, expected.view(2, 3, 5, 24) + 2),
        (norm, gemm_ar.rms_norm(total, ones, 1e-6)),
        (flux.gemm_ar(x, weight, residual=ones.expand(30, 24)), expected + 1),
        (flux.gemm_ar(x, weight, residual=flat, out=flat), 2 * expected + 2),
        (flux.all_reduce(deep), deep * p),
        (flux.all_reduce(deep, residual=deep, norm_weight=torch.ones(4))[1], deep * (p + 1)),
        (flux.all_reduce(torch.tensor(3.0)), torch.tensor(3.0 * p)),
        (flux.reduce_scatter(more), more[:2] * p),
        (flux.reduce_scatter(marked), of_marked),
        (flux.reduce_scatter(marked, group=dist.group.WORLD), of_marked),
    )


def lists_of_weights(rank: int, p: int) -> None:
    """q, k, v of different widths, with and without bias: one gather, several products."""
    case = AgGemmCase(150 * p, 264, 40, p, seed=3, bias=True)
    cases = [case, replace(case, n=8), replace(case, n=24)]
    x = case.inputs(rank)[0]
    weights, biases = ([c.inputs(rank)[i] for c in cases] for i in (1, 2))
    plain = [replace(c, bias=False).expected(rank) for c in cases]
    expected = [c.expected(rank) for c in cases]
    signal = mock.Mock(wraps=CpuWorkspace.signal)
    with mock.patch.object(CpuWorkspace, "signal", lambda self, *args: signal(self, *args)):
        results, gathered = flux.ag_gemm(x, weights, biases, return_gathered=True)
    if flux.explain("ag_gemm", case.m, case.n, case.k).by_flux:
        assert signal.call_count == 2 * (p - 1)
    outs = [torch.full_like(e, 3) for e in expected]
    given = flux.ag_gemm(x, tuple(weights), [None, biases[1], None], out=outs)
    assert type(given) is list and all(a is b for a, b in zip(given, outs, strict=True))
    transposed = [w.t().contiguous() for w in weights]
    all_equal(
        (gathered, case.gathered()),
        *zip(results, expected, strict=True),
        *zip(outs, [plain[0], expected[1], plain[2]], strict=True),
        *zip(flux.ag_gemm(x, transposed, transpose_weight=True), plain, strict=True),
        *zip(flux.ag_gemm(x, weights[:1], [biases[0]]), expected, strict=False),
        *zip(flux.ag_gemm(x, [weights[0], weights[1][:0]]), [plain[0], plain[1][:, :0]], strict=True),
    )


def too_large_to_exchange(rank: int, p: int) -> None:
    """gemm_rs and all_gather of the rows that can be dealt, an exchange of the others."""
    limits = {"MAX_EXCHANGE_BYTES": 256, "COMPOSED_FROM_BYTES": 64, "RAGGED_FROM_BYTES": 64}
    flux.release()
    with mock.patch.multiple(plan_sums, **limits):
        for m in (6 * p, 6 * p + 1, 7 * p - 1):
            case = GemmRsCase(m, 40, 16, p, bias=True)
            x, weight, bias = case.inputs(rank)
            residual = case.residual() + 4
            norm, total = flux.gemm_ar(x, weight, bias, residual=residual, norm_weight=residual[0] + 1)
            with mock.patch.object(front, "below", wraps=front.below) as dealt:
                result = flux.gemm_ar(x, weight, bias)
            made = [call.args for call in dealt.call_args_list]
            rows = [len(call.x) for op, call, *_ in made if op.name == "gemm_rs"]
            assert p == 1 or rows == [m - m % p], f"{m} rows: {made}"
            in_place = residual.clone()
            flux.gemm_ar(x, weight, bias, residual=in_place, out=in_place)
            all_equal(
                (result, case.expected_sum()),
                (in_place, total),
                (total - residual, case.expected_sum()),
                (norm, gemm_ar.rms_norm(total, residual[0] + 1, 1e-6)),
                (flux.all_reduce(x), references.all_reduce(x)),
            )
            plan = flux.explain("gemm_ar", m, 40, 16)
            way = "as gemm_rs + all_gather" + (f", of {m % p} rows by exchange" if m % p else "")
            assert p == 1 or (plan.reason.endswith(way) and plan.by_flux), plan
    flux.release()


def what_is_reserved_is_used(rank: int, p: int) -> None:
    flux.reserve(max_m=100 * p, max_n=2000, max_k=1)
    workspaces = registry.existing(dist.group.WORLD)
    room = [(w.signal_bytes, w.slot_bytes) for w in workspaces]
    flux.reduce_scatter(torch.ones(100 * p, 2000, dtype=torch.bfloat16))
    dice = random.Random(3)
    for m, n in ((dice.randint(1, 100 * p), dice.randint(1, 2000)) for _ in range(10)):
        case = GemmRsCase(m, n, 16, p)
        x, weight, _ = case.inputs(rank)
        total = case.expected_sum()
        all_equal((flux.gemm_ar(x, weight), total), (flux.all_reduce(gemm.reference(x, weight)), total))
    assert [(w.signal_bytes, w.slot_bytes) for w in workspaces] == room
    made = flux.explain("reduce_scatter", 12 * p, 100, 0)
    assert made.by_flux == (p > 1)
    assert str(made).startswith(f"reduce_scatter: x [{p}, 1200], bfloat16, {p} rank"), made


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    **{name: partial(run_case, name) for name in CASES},
    **by_name(two_shot, random_data, rounded_sums, serving, strides_and_groups, other_gathers, other_sums),
    **by_name(results_are_fresh_tensors, lists_of_weights, too_large_to_exchange, what_is_reserved_is_used),
}


answers = Answers(partial(run_scenarios, SCENARIOS), timeout_s=400)


@pytest.mark.parametrize(("world_size", "name"), questions(WORLD_SIZES, SCENARIOS))
def test_between_processes(world_size: int, name: str) -> None:
    told = answers.of(world_size, name)
    assert told == [""] * world_size, "\n".join(told)
