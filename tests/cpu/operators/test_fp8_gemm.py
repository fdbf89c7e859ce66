"""flux.gemm of fp8 operands on CPUs: exact results with every layout of scales, bounds, arguments, and how
torch sees the operator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fp8_layouts import LAYOUTS

import flux
from flux import _native
from flux.fp8 import scales as fp8
from flux.fp8.products import why_not_torchs
from flux.ops import gemm as ops
from flux.plan.choose import planned
from flux.plan.plan import PlanInput
from flux.testing import ScaledCase, scaled_bound
from flux.testing.scaled_data import exact_product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# m, n, k: not multiples of anything, one block of K, and whole blocks
SHAPES = [(1, 1, 2), (5, 7, 100), (3, 130, 128), (64, 48, 300), (129, 257, 512)]
KINDS = ["tensor", "row", "block"]
OUT = [torch.bfloat16, torch.float16, torch.float32]
Arguments = dict[str, Any]
Change = Callable[[fp8.Scales], fp8.Scales]


def call(case: ScaledCase, rank: int = 0, **change: Any) -> torch.Tensor:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    given = {"x": x, "weight": weight, "bias": bias, "scale_x": scale_x, "scale_w": scale_w}
    result: torch.Tensor = flux.gemm(**({"out_dtype": case.out_dtype} | given | change))
    return result


def exact(case: ScaledCase, rank: int = 0) -> torch.Tensor:
    return case.product(rank, rank).to(case.out_dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_other_libraries(layout: str, kind: str) -> None:
    taken = 0
    for seed, (m, n, k) in enumerate(SHAPES):
        case = ScaledCase(m, n, k, 1, kind, seed=seed)
        change = LAYOUTS[layout](*case.inputs(0)[:4])
        taken += change is not None
        assert torch.equal(call(case, **(change or {})), exact(case)), (m, n, k)
    assert taken or (kind, layout) in {
        ("tensor", "vllm block"),
        ("row", "vllm block"),
        ("tensor", "deep_gemm"),
        ("row", "transformer_engine"),
    }


def test_canonical_scales_are_not_copied() -> None:
    case = ScaledCase(10, 300, 300, 1)
    x, weight, scale_x, scale_w, _ = case.inputs(0)
    once = fp8.Scales(scale_x, scale_w, torch.bfloat16, "promoted").canonical(300, 300, False)
    assert once.x.stride() == (1, 12) and once.x.data_ptr() % 16 == 0 and once.w.is_contiguous()
    again = once.canonical(300, 300, False)
    assert again.x.data_ptr() == once.x.data_ptr() and again.w.data_ptr() == scale_w.data_ptr()
    for rows in (1, 10):  # torch gives a single row any stride
        q, quantised = flux.quantize(torch.randn(rows, 300))
        in_place = fp8.column_major(quantised)
        assert in_place.data_ptr() == quantised.data_ptr(), rows
        assert in_place.stride() == (1, -(-rows // 4) * 4), rows


def test_leading_dimensions() -> None:
    for kind in KINDS:
        case = ScaledCase(12, 20, 260, 1, kind)
        x, weight, scale_x, scale_w, _ = case.inputs(0)
        deep = x.view(3, 4, 260)
        expected = exact(case).view(3, 4, 20)
        given = {"scale_w": scale_w, "scale_x": scale_x}
        assert torch.equal(flux.gemm(deep, weight, **given), expected)
        if kind != "tensor":
            given["scale_x"] = scale_x.view(3, 4, -1)
            assert torch.equal(flux.gemm(deep, weight, **given), expected)


def planted(change: Change, here: bool = True, method: str = "canonical") -> Any:
    """In a context the code between the caller and the arithmetic has a defect, if it is to be here."""
    whole = getattr(fp8.Scales, method)
    made = lambda *given: change(whole(*given)) if here else whole(*given)  # noqa: E731
    return mock.patch.object(fp8.Scales, method, made)


def _swapped(scale: torch.Tensor) -> torch.Tensor:
    return scale.roll(1, 0)


MUTANTS: dict[str, Change] = {
    "scale_x dropped": lambda s: s._replace(x=torch.ones_like(s.x)),
    "scale_w dropped": lambda s: s._replace(w=torch.ones_like(s.w)),
    "scale_x doubled": lambda s: s._replace(x=s.x * s.x),
    "scale_w doubled": lambda s: s._replace(w=s.w * s.w),
    "scale_x inverted": lambda s: s._replace(x=1 / s.x),
    "rows swapped": lambda s: s._replace(x=_swapped(s.x)),
    "columns swapped": lambda s: s._replace(w=_swapped(s.w)),
    "blocks of x swapped": lambda s: s._replace(x=s.x.roll(1, -1)),
    "blocks of w swapped": lambda s: s._replace(w=s.w.roll(1, -1)),
    "x's scales as one": lambda s: s._replace(x=s.x[:1].expand_as(s.x)),
    "w's scales as one": lambda s: s._replace(w=s.w[:1].expand_as(s.w)),
    "read row by row": lambda s: s._replace(x=s.x.t().contiguous().view(s.x.shape)),
    "w read transposed": lambda s: s._replace(w=s.w.t().contiguous().view(s.w.shape)),
}
# Of one scale there is nothing to swap.
NOT_OF_ONE = {name for name in MUTANTS if "swapped" in name or "one" in name or "read" in name}
NOT_OF_VECTORS = {name for name in MUTANTS if "read" in name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_scale_is_caught(mutant: str, kind: str) -> None:
    if kind == "tensor" and mutant in NOT_OF_ONE or kind == "row" and mutant in NOT_OF_VECTORS:
        with pytest.raises(AssertionError, match="alike"):
            _differences(mutant, kind)
        return
    _differences(mutant, kind)


def _differences(mutant: str, kind: str) -> None:
    cases = [ScaledCase(33, 300, 520, 1, kind, seed=seed) for seed in range(8)]
    assert all(torch.equal(call(case), exact(case)) for case in cases)
    with planted(MUTANTS[mutant]):
        assert not all(torch.equal(call(case), exact(case)) for case in cases), "all alike"


@pytest.mark.parametrize("kind", [*KINDS, "static"])
@pytest.mark.parametrize("out_dtype", OUT)
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_random_data_within_the_bound(kind: str, out_dtype: torch.dtype, accumulate: str) -> None:
    if kind == "block" and accumulate == "fast":
        return  # refused: see BAD
    torch.manual_seed(2)
    rows, columns = {"tensor": ("tensor",) * 2, "row": ("row",) * 2, "block": ("group128", "block128")}.get(
        kind, ("tensor", "row")
    )
    x, weight = torch.randn(96, 700), torch.randn(200, 700) * torch.rand(200, 1).exp()
    (q, scale_x), (w, scale_w) = flux.quantize(x, rows), flux.quantize(weight, columns)  # type: ignore[arg-type]
    result = flux.gemm(q, w, scale_x=scale_x, scale_w=scale_w, out_dtype=out_dtype, accumulate=accumulate)  # type: ignore[arg-type]
    wanted = exact_product(q, scale_x, w, scale_w)
    bound = scaled_bound(q, scale_x, w, scale_w, wanted, out_dtype, accumulate)
    assert ((result.double() - wanted).abs() <= bound).all()
    # The bound is not so wide that a scale of another row would pass.
    other = flux.gemm(q, w, scale_x=scale_x.roll(1, 0) * 1.05, scale_w=scale_w, out_dtype=out_dtype)
    assert ((other.double() - wanted).abs() > bound).any()
    # What quantisation costs is another matter: some percent of the size of an element.
    error = (result.double() - x.double() @ weight.double().t()).square().mean().sqrt()
    assert error < 0.06 * wanted.square().mean().sqrt()


def test_sums_of_many_blocks_are_not_lost() -> None:
    """2¹⁴ in the first block, 1 in each later one, -2¹⁴ in the last: 13 bits lose the ones."""
    blocks = 20
    x, weight = torch.zeros(1, 128 * blocks), torch.ones(16, 128 * blocks)
    x[0, ::128] = 1.0
    x[0, :64], x[0, -64:] = 256.0, -256.0
    result = flux.gemm(
        x.to(E4M3), weight.to(E4M3), scale_x=torch.ones(1), scale_w=torch.ones(1), out_dtype=torch.float32
    )
    assert (result == blocks - 1).all()


X, W = torch.ones(8, 256).to(E4M3), torch.ones(160, 256).to(E4M3)
SX, SW = torch.ones(8, 2), torch.ones(2, 2)
ROWS: Arguments = {"scale_x": torch.ones(8, 1), "scale_w": torch.ones(160)}
BAD: list[tuple[Arguments, str]] = [
    ({"scale_x": None, "scale_w": None}, "scale_x: expected a tensor, as x is torch.float8_e4m3fn"),
    ({"x": X.bfloat16()}, "x: expected dtype float8_e4m3fn or float8_e5m2 with scales, got .*bfloat16"),
    ({"x": X.float().to(torch.float8_e4m3fnuz)}, "x: expected dtype float8_e4m3fn"),
    ({"x": X.view(torch.uint8)}, "x: expected dtype float8_e4m3fn .* got torch.uint8"),
    ({"weight": W.t().contiguous().t()}, r"weight: expected \[n, k\] with stride\(1\) == 1"),
    (
        {"weight": W.t().contiguous(), "transpose_weight": True, "scale_w": SW.t()},
        r"weight: expected .* stride\(0\) == 1, got shape \[256, 160\], strides \[160, 1\]",
    ),
    ({"scale_x": torch.ones(8, 3)}, r"scale_x: expected .*\[8, 2\], got shape \[8, 3\]"),
    ({"scale_x": torch.ones(2, 8)}, r"scale_x: .*TransformerEngine's layout, pass scale.t\(\)\[:m\]"),
    ({"scale_w": torch.ones(160, 2)}, r"scale_w: expected shape \[2, 2\]"),
    ({"scale_w": torch.ones(160)}, r"scale_w: expected shape \[2, 2\], one entry for each 128"),
    ({"scale_x": torch.ones(8, 1)}, r"scale_w: expected one entry, \[160\] or \[1, 160\]"),
    (ROWS | {"scale_w": torch.ones(159)}, r"scale_w: expected one entry, \[160\]"),
    ({"accumulate": "fast"}, "accumulate: expected 'promoted' with block scales"),
]


@pytest.mark.parametrize(("change", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_arguments(change: Arguments, told: str) -> None:
    arguments = {"x": X, "weight": W, "scale_x": SX, "scale_w": SW} | change
    with pytest.raises(ValueError, match="gemm: " + told):
        flux.gemm(**arguments)
    meta = {
        name: value.to("meta") if isinstance(value, torch.Tensor) and "device" not in told else value
        for name, value in arguments.items()
    }
    if "device" not in told:
        with pytest.raises(ValueError, match="gemm: " + told):  # the fake makes the same checks
            flux.gemm(**meta)


def test_without_scales_their_options_are_refused() -> None:
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    assert flux.gemm(x, weight, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="gemm: out_dtype: expected None or the dtype of x without scales"):
        flux.gemm(x, weight, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="gemm: accumulate: expected 'promoted' without scales, got 'fast'"):
        flux.gemm(x, weight, accumulate="fast")


def test_gradients_are_refused() -> None:
    bias = torch.zeros(160, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="gemm: bias: expected a tensor that needs no gradient"):
        flux.gemm(X, W, bias, scale_x=SX, scale_w=SW)
    with torch.no_grad():
        assert not flux.gemm(X, W, bias, scale_x=SX, scale_w=SW).requires_grad
    with pytest.raises(ValueError, match="gemm: scale_x: expected None in a call that needs gradients"):
        torch.ops.flux.gemm(X, W, bias, False, SX, SW)


def test_autocast_casts_nothing() -> None:
    x, weight, scale_x, scale_w, _ = ScaledCase(6, 140, 260, 1, "block").inputs(0)
    how: Arguments = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": torch.float16}
    expected = flux.gemm(x, weight, torch.ones(140, dtype=torch.float16), **how)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flux.gemm(x, weight, torch.ones(140, dtype=torch.float16), **how), expected)


def test_vmap() -> None:
    cases = [ScaledCase(6, 20, 260, 1, "block", seed=seed) for seed in range(3)]
    x, weight, scale_x, scale_w = (
        torch.stack(tensors) for tensors in zip(*(c.inputs(0)[:4] for c in cases), strict=True)
    )
    mapped = torch.vmap(lambda x, w, a, b: flux.gemm(x, w, scale_x=a, scale_w=b))(x, weight, scale_x, scale_w)
    assert torch.equal(mapped, torch.stack([exact(case) for case in cases]))


def test_torchs_product_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on GPUs without a kernel, or where torch's is sooner."""
    asked: list[torch.dtype] = []
    scaled_mm = torch._scaled_mm
    told = lambda *a, **b: asked.append(b["out_dtype"]) or scaled_mm(*a, **b)  # noqa: E731
    monkeypatch.setattr(torch, "_scaled_mm", told)
    shapes = [*SHAPES, (7, 48, 160), (9, 128, 256), (1, 48, 160)]
    for kind, (seed, (m, n, k)), out_dtype in itertools.product(KINDS, enumerate(shapes), OUT):
        case = ScaledCase(m, n, k, 1, kind, bias=True, seed=seed, out_dtype=out_dtype)
        x, weight, scale_x, scale_w, bias = case.inputs(0)
        taken = kind != "block" and not (n % 16 or k % 16)
        for w in (scale_w, scale_w[:1]) if kind == "row" else (scale_w,):
            scales = fp8.Scales(scale_x, w, out_dtype, "promoted").canonical(n, k, False)
            want = exact(case) if w is scale_w else call(case, scale_w=w)
            apart = torch.full((m, 2 * n), 7.0, dtype=out_dtype)
            asked.clear()
            for out in (torch.empty(m, n, dtype=out_dtype), apart[:, :n]):
                ops.unfused(ops.Product(x, weight, bias, False, out, scales))
                assert torch.equal(out, want), (kind, m, n, k)
            assert (apart[:, n:] == 7).all()
            # In one kernel, or in fp32 with scales behind.
            assert asked == ([out_dtype if scales.whole else torch.float32] * 2 if taken else [])


def test_explain() -> None:
    plan = flux.explain("gemm", 8, 160, 256, E4M3, scales="block", out_dtype=torch.float16)
    assert "float8_e4m3fn, block scales, result float16" in str(plan) and plan.scaling is not None
    with pytest.raises(ValueError, match="explain: scales: expected tensor, row or block, as the dtype is"):
        flux.explain("gemm", 8, 160, 256, E4M3)
    with pytest.raises(ValueError, match=r"explain: scales: expected None, as the dtype is torch\.bfloat16"):
        flux.explain("gemm", 8, 160, 256, scales="row")
    with pytest.raises(ValueError, match="explain: accumulate: expected"):
        flux.explain("gemm", 8, 160, 256, E4M3, scales="row", accumulate="never")
    assert why_not_torchs(16, 32, "block") is not None


@pytest.mark.parametrize("op", ["gemm", "gemm_rs", "ag_gemm", "gemm_ar"])
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_plans_for_gpus_have_tiles_for_fp8(op: str, x_dtype: torch.dtype, accumulate: str) -> None:
    fast = accumulate == "fast"
    for m, kind, invariant in itertools.product((8, 256, 4096), ("row", "block"), (False, True)):
        if fast and kind == "block":
            continue
        scaling = fp8.Scaling(kind, torch.bfloat16, fast)
        p = 1 if op == "gemm" else 4
        problem = PlanInput("cuda", m, 8192, 4096, x_dtype, False, p, num_sms=132, scaling=scaling)
        with flux.batch_invariant() if invariant else contextlib.nullcontext():
            plan = planned(op, problem)
        assert plan.by_flux, plan
        if plan.way == "kernel":
            if plan.config >= _native.core.FIRST_SWAP_AB:
                continue  # ids of swap-AB tiles are not those of tile_config
            tile = _native.core.tile_config(plan.config)
            assert tile.operand_bytes == 1, plan
            assert tile.promotes or (fast and x_dtype == E4M3), plan
    case = ScaledCase(8, 160, 256, 1, "row", x_dtype)
    x, _, scale_x, scale_w, _ = case.inputs(0)
    scales = fp8.Scales(scale_x, scale_w, torch.bfloat16, accumulate).canonical(160, 256)
    assert scales.for_kernel(x)["fast"] == (fast and x_dtype == E4M3)
