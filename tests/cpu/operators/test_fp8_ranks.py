"""Collectives with fp8 operands between CPU processes: planted defects, bounds, how torch sees the operators.
soak.py has exact results of random calls. One set of processes per world size runs all scenarios.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import asked_at, scenario_test
from dense_calls import differs
from test_fp8_gemm import MUTANTS, planted

import flux
from flux.testing import ScaledCase, scaled_bound
from flux.testing.scaled_data import exact_product

Tensor = torch.Tensor
WORLD_SIZES = [1, 2, 3, 4]
KINDS = ["tensor", "row", "block"]
OUT = [torch.bfloat16, torch.float16, torch.float32]
E5M2 = torch.float8_e5m2


def arguments(case: ScaledCase, rank: int) -> dict[str, Any]:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    given = {"x": x, "weight": weight, "bias": bias, "scale_x": scale_x, "scale_w": scale_w}
    return given | {"out_dtype": case.out_dtype}


class Op:
    """An operator, and the exact result of a case on a rank."""

    def __init__(self, call: Any, expected: Callable[[ScaledCase, int], Tensor], sums: bool):
        self.call, self.expected, self.sums = call, expected, sums

    def case(self, p: int, kind: str, out_dtype: torch.dtype, seed: int) -> ScaledCase:
        rows, n, k = [(3, 40, 100), (65, 300, 390), (130, 130, 256)][seed % 3]
        x_dtype = E5M2 if seed % 4 == 3 else torch.float8_e4m3fn
        m = rows * p if self.call is flux.gemm_rs else rows
        return ScaledCase(m, n, k, p, kind, x_dtype, out_dtype, seed % 2 == 0, self.sums, seed)


def own_rows(case: ScaledCase, rank: int) -> Tensor:
    rows = case.m // case.world_size
    return case.total()[rank * rows :][:rows]


OPS = {
    "gemm_rs": Op(flux.gemm_rs, own_rows, True),
    "ag_gemm": Op(flux.ag_gemm, ScaledCase.gathered, False),
    "gemm_ar": Op(flux.gemm_ar, lambda case, rank: case.total(), True),
}


def gathered_rows(rank: int, p: int) -> None:
    """ag_gemm of several weights, with the gathered rows and their scales; more than two dimensions."""
    for kind in KINDS:
        case = ScaledCase(6, 40, 390, p, kind, seed=7)
        other = ScaledCase(6, 40, 390, p, kind, seed=7, bias=True)
        x, weight, scale_x, scale_w, bias = other.inputs(rank)
        scales = {"scale_x": scale_x, "scale_w": [scale_w, scale_w]}
        (plain, biased), rows, of_rows = flux.ag_gemm(
            x, [weight, weight], [None, bias], return_gathered=True, **scales
        )
        assert not differs("plain", plain, case.gathered(rank))
        assert not differs("biased", biased, other.gathered(rank))
        everybody = [case.x(source) for source in range(p)]
        expected = torch.cat([q.view(torch.uint8) for q, _ in everybody])
        assert torch.equal(rows.view(torch.uint8), expected)
        scale = torch.cat([s.expand(6, -1) if kind != "tensor" else s.expand(6, 1) for _, s in everybody])
        assert torch.equal(of_rows, scale), kind
        if kind == "block":
            assert of_rows.stride() == (1, -(-6 * p // 4) * 4)
        deep = scale_x if kind == "tensor" else scale_x.view(2, 3, -1)
        result = flux.ag_gemm(x.view(2, 3, -1), weight, scale_x=deep, scale_w=scale_w)
        assert torch.equal(result.view(6 * p, 40), plain)


def added(rank: int, p: int) -> None:
    """gemm_ar with a residual, in place too, and more than two dimensions."""
    for kind in KINDS:
        case = ScaledCase(6, 40, 390, p, kind, sums=True, seed=3)
        x, weight, scale_x, scale_w, _ = case.inputs(rank)
        residual, scales = case.residual(), {"scale_x": scale_x, "scale_w": scale_w}
        expected = (case.total().float() + residual).bfloat16()
        assert not differs("sum", flux.gemm_ar(x, weight, residual=residual, **scales), expected)
        deep = scales | {"scale_x": scale_x if kind == "tensor" else scale_x.view(2, 3, -1)}
        of_deep = flux.gemm_ar(x.view(2, 3, -1), weight, residual=residual.view(2, 3, -1), **deep)
        assert torch.equal(of_deep.view(6, 40), expected)
        flux.gemm_ar(x, weight, residual=residual, out=residual, **scales)
        assert torch.equal(residual, expected)


def bad_calls(rank: int, p: int) -> None:
    x, weight, norm = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    call = {"norm_weight": norm, "quant": "tensor"}
    bad: list[tuple[dict[str, Any], str]] = [
        (call | {"quant": "block128"}, "quant: expected None or one of tensor, row, group128"),
        (call | {"quant": "row", "quant_scale": norm[:1]}, "quant_scale: expected None with 'row'"),
        (call | {"quant_scale": norm}, "quant_scale: expected float32 with one entry"),
        (call | {"quant_scale": norm[:1], "ue8m0": True}, "ue8m0: expected False"),
        ({"quant": "tensor"}, "quant: expected None without norm_weight"),
        ({"norm_weight": norm, "ue8m0": True}, "ue8m0: expected the default without quant"),
        ({"norm_weight": norm, "return_norm": True}, "return_norm: expected the default without quant"),
        ({"norm_weight": norm, "quant_scale": norm[:1]}, "quant_scale: expected the default without quant"),
        (call | {"out": torch.ones(4, 6)}, "out: expected None with norm_weight"),
    ]
    for arguments, message in bad:
        for op, operands in ((flux.gemm_ar, (x, weight)), (flux.all_reduce, (torch.ones(4, 6),))):
            with pytest.raises(ValueError, match=message):
                op(*operands, **arguments)  # type: ignore[operator]
    with pytest.raises(TypeError, match="gemm_ar: quant: expected a string"):
        flux.gemm_ar(x, weight, norm_weight=norm, quant=3)  # type: ignore[call-overload]
    case = ScaledCase(4, 24, 260, p, "block", sums=True)
    q, w, scale_x, scale_w, _ = case.inputs(rank)
    bias = torch.ones(24)
    with pytest.raises(ValueError, match=r"residual: expected dtype torch.bfloat16, that of the result"):
        flux.gemm_ar(q, w, residual=bias.expand(4, 24), scale_x=scale_x, scale_w=scale_w)
    with pytest.raises(ValueError, match="entries, one for each weight"):
        flux.ag_gemm(q, [w, w], scale_x=scale_x, scale_w=[scale_w])


# What one rank does wrong with its scales.
DEFECTS = {name: each for name, each in MUTANTS.items() if name.endswith(("dropped", "doubled", "swapped"))}


@asked_at(2, 3, 4)  # on one rank, test_fp8_gemm.py has the same
def defects(rank: int, p: int) -> None:
    """Wrong scales on the last rank are seen by some rank, in every kind."""
    seen = {(name, defect, kind): 0 for name in OPS for defect in DEFECTS for kind in KINDS}
    for name, defect in product(OPS, DEFECTS):
        if "swapped" in defect:
            del seen[name, defect, "tensor"]  # it has one scale
    for name, kind, seed in product(OPS, KINDS, (0, 1, 2, 4, 5)):
        case = OPS[name].case(p, kind, torch.float32, seed)
        given, expected = arguments(case, rank), OPS[name].expected(case, rank)  # take longer than the calls
        for defect, change in DEFECTS.items():
            if (name, defect, kind) not in seen:
                continue
            with planted(change, rank == p - 1):
                seen[name, defect, kind] += bool(differs("result", OPS[name].call(**given), expected))
    found = torch.tensor([*seen.values()])
    dist.all_reduce(found)
    assert (found > 0).all(), dict(zip(seen, found.tolist(), strict=True))


def random_data(rank: int, p: int) -> None:
    """Within the bound of an fp64 product of what the operands stand for."""
    m, n, k = 32 * p, 130, 300
    torch.manual_seed(rank)
    x, weight = torch.randn(m, k), torch.randn(n, k)
    for rows, columns in (("tensor", "row"), ("group128", "block128")):
        (q, scale_x), (w, scale_w) = flux.quantize(x, rows), flux.quantize(weight, columns)  # type: ignore[arg-type]
        scales = {"scale_x": scale_x, "scale_w": scale_w}
        total = exact_product(q, scale_x, w, scale_w)
        bound = scaled_bound(q, scale_x, w, scale_w, total, torch.bfloat16)
        whole, of_whole = total.clone(), bound.clone()
        for tensor in (whole, of_whole):
            dist.all_reduce(tensor)
        of_whole += 2.0**-8 * whole.abs()
        mine = slice(rank * m // p, (rank + 1) * m // p)
        found = [
            (flux.gemm_rs(q, w, **scales), flux.gemm_rs(q, w, **scales), whole[mine], of_whole[mine]),
            (flux.gemm_ar(q, w, **scales), flux.gemm_ar(q, w, **scales), whole, of_whole),
        ]
        gathered = flux.ag_gemm(q, w, **scales)
        found.append((gathered[rank * m :][:m], flux.ag_gemm(q, w, **scales)[rank * m :][:m], total, bound))
        for result, again, exact, most in found:
            assert torch.equal(result, again), "not repeatable"
            assert ((result.double() - exact).abs() <= most).all()


SCENARIOS = (*(gathered_rows, added, bad_calls, defects, random_data),)
test_fp8_between_ranks = scenario_test(WORLD_SIZES, *SCENARIOS, timeout_s=400)
