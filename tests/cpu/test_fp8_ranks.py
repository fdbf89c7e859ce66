"""Collectives with fp8 operands between CPU processes: exact results, planted defects, bounds, and how torch
sees the operators. One set of processes per world size runs all scenarios; each test looks at one answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Answers, by_name, opcheck, run_scenarios
from fp8_random import differs

import flux
from flux.ops import _scales
from flux.ops import gemm_rs as rs
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


def of_reference(reference: Callable[..., Any], case: ScaledCase, rank: int) -> Any:
    x, weight, scale_x, scale_w, bias = case.inputs(rank)
    return reference(x, weight, bias, None, False, scale_x, scale_w, case.out_dtype, "promoted")


class Op:
    """An operator, its reference, and the exact result of a case on a rank."""

    def __init__(self, call: Any, reference: Any, expected: Callable[[ScaledCase, int], Tensor], sums: bool):
        self.call, self.reference, self.expected, self.sums = call, reference, expected, sums

    def case(self, p: int, kind: str, out_dtype: torch.dtype, seed: int) -> ScaledCase:
        rows, n, k = [(3, 40, 100), (65, 300, 390), (130, 130, 256)][seed % 3]
        x_dtype = E5M2 if seed % 4 == 3 else torch.float8_e4m3fn
        return ScaledCase(rows * p, n, k, p, kind, x_dtype, out_dtype, seed % 2 == 0, self.sums, seed)

    def wrong(self, case: ScaledCase, rank: int) -> str:
        return differs("result", self.call(**arguments(case, rank)), self.expected(case, rank))


def own_rows(case: ScaledCase, rank: int) -> Tensor:
    rows = case.m // case.world_size
    return case.total()[rank * rows :][:rows]


OPS = {"gemm_rs": Op(flux.gemm_rs, rs.reference, own_rows, True)}


def cases(op: Op, p: int) -> list[ScaledCase]:
    return [op.case(p, kind, OUT[seed % 3], seed) for seed in range(6) for kind in KINDS]


def exact(rank: int, p: int) -> None:
    for name, op in OPS.items():
        for case in cases(op, p):
            assert not op.wrong(case, rank), (name, case, op.wrong(case, rank))
            expected = op.expected(case, rank)
            assert not differs(name, of_reference(op.reference, case, rank), expected), (name, case)
            out = torch.full_like(expected, 3)
            assert op.call(**arguments(case, rank), out=out) is out
            assert torch.equal(out, expected), (name, case)


# What one rank does wrong with its scales.
DEFECTS: dict[str, Callable[[_scales.Scales], _scales.Scales]] = {
    "scale_x dropped": lambda s: s._replace(x=torch.ones_like(s.x)),
    "scale_w dropped": lambda s: s._replace(w=torch.ones_like(s.w)),
    "scale_x doubled": lambda s: s._replace(x=s.x * s.x),
    "scale_w halved": lambda s: s._replace(w=s.w / 2),
}


def defects(rank: int, p: int) -> None:
    """Wrong scales on the last rank are seen by some rank, in every kind."""
    whole = _scales.Scales.canonical
    for name, op in OPS.items():
        for defect, change in DEFECTS.items():
            for kind in KINDS:
                seen = 0
                for seed in (0, 1, 2, 4, 5):
                    case = op.case(p, kind, torch.float32, seed)

                    def planted(self: _scales.Scales, *rest: Any, change: Any = change) -> _scales.Scales:
                        made = whole(self, *rest)
                        return change(made) if rank == p - 1 else made

                    with mock.patch.object(_scales.Scales, "canonical", planted):
                        seen += bool(op.wrong(case, rank))
                found = torch.tensor([seen])
                dist.all_reduce(found)
                assert int(found) > 0, (name, defect, kind)


def random_data(rank: int, p: int) -> None:
    m, n, k = 32 * p, 130, 300
    torch.manual_seed(rank)
    x, weight = torch.randn(m, k), torch.randn(n, k)
    for rows, columns in (("tensor", "token"), ("group128", "block128")):
        (q, scale_x), (w, scale_w) = flux.quantize(x, rows), flux.quantize(weight, columns)  # type: ignore[arg-type]
        partial = exact_product(q, scale_x, w, scale_w)
        bound = scaled_bound(q, scale_x, w, scale_w, partial, torch.bfloat16)
        for tensor in (total := partial.clone(), bound):
            dist.all_reduce(tensor)
        scales = {"scale_x": scale_x, "scale_w": scale_w}
        result = flux.gemm_rs(q, w, **scales)
        assert torch.equal(result, flux.gemm_rs(q, w, **scales)), "not repeatable"
        mine = slice(rank * m // p, (rank + 1) * m // p)
        error = (result.double() - total[mine]).abs()
        assert (error <= bound[mine] + 2.0**-8 * total[mine].abs()).all()


def torch_sees(rank: int, p: int) -> None:
    name = dist.group.WORLD.group_name
    for kind in KINDS:
        case = ScaledCase(4 * p, 24, 260, p, kind, sums=True)
        x, weight, scale_x, scale_w, _ = case.inputs(rank)
        how = (scale_x, scale_w, torch.float16, "promoted")
        opcheck(torch.ops.flux.gemm_rs.default, (x, weight, None, False, name, *how))
        out = torch.empty(4, 24, dtype=torch.float16)
        opcheck(torch.ops.flux.gemm_rs_out.default, (x, weight, None, False, name, out, *how))

        def layer(x: Tensor, scale_x: Tensor, weight: Tensor = weight, scale_w: Tensor = scale_w) -> Tensor:
            return flux.gemm_rs(x, weight, scale_x=scale_x, scale_w=scale_w).relu()

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, scale_x), layer(x, scale_x))


def disagreements(rank: int, p: int) -> None:
    """Another kind of scales, result or accumulation on one rank is an error on all."""
    if p == 1:
        return
    for name, op in OPS.items():
        case = op.case(p, "row", torch.bfloat16, 1)
        block = op.case(p, "block", torch.bfloat16, 1)
        good = arguments(case, rank)
        others = [arguments(block, rank), good | {"out_dtype": torch.float16}, good | {"accumulate": "fast"}]
        for other in others:
            with pytest.raises(ValueError, match=f"{name}: expected the same call on all ranks .* scaling="):
                op.call(**(other if rank == p - 1 else good))
            assert not op.wrong(case, rank)


SCENARIOS = by_name(exact, defects, random_data, torch_sees, disagreements)


def run(rank: int, p: int) -> dict[str, str]:
    return run_scenarios(SCENARIOS, rank, p)


answers = Answers(run, timeout_s=400)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fp8_between_ranks(world_size: int, scenario: str) -> None:
    told = answers.of(world_size, scenario)
    assert told == [""] * world_size, "\n".join(told)
