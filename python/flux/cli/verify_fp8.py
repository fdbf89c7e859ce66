"""fp8 operands in `flux verify`: products and sums with scales, gathered scales, and the bits of quantised
norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import flux
from flux.fp8.scales import Scales
from flux.ops.norm_and_quant import End
from flux.testing import ScaledCase
from flux.testing.compare import compare, first_difference, first_wrong, successive
from flux.testing.emulate import EmulatedRanks

Tensors = list[torch.Tensor]
_KINDS = ("tensor", "row", "block")
_ENDS: list[dict[str, Any]] = [{"quant": "tensor"}, {"quant": "row"}, {"quant": "group128", "ue8m0": True}]


class Fp8Case(NamedTuple):
    """Calls of an operator. ends: options of quantised norms, one for each call, or none."""

    op: str
    data: ScaledCase
    ends: list[dict[str, Any]]


def gemm_cases() -> list[tuple[str, ScaledCase]]:
    return [(f"{kind} scales", ScaledCase(131, 264, 640, 1, kind, bias=True, seed=1)) for kind in _KINDS]


def named_cases(world_size: int) -> list[tuple[str, Fp8Case]]:
    """Cases for that many ranks. M is per rank, except for gemm_rs."""
    p = world_size
    made: dict[str, Callable[[str], ScaledCase]] = {
        "gemm_rs": lambda kind: ScaledCase(131 * p, 264, 384, p, kind, bias=True, sums=True, seed=2),
        "ag_gemm": lambda kind: ScaledCase(131, 264, 640, p, kind, bias=True, seed=3),
        "gemm_ar": lambda kind: ScaledCase(40, 264, 384, p, kind, bias=True, sums=True, seed=4),
    }
    cases = [
        (f"{op}, {kind} scales", Fp8Case(op, make(kind), [])) for op, make in made.items() for kind in _KINDS
    ]
    e5m2 = replace(made["gemm_rs"]("row"), x_dtype=torch.float8_e5m2, out_dtype=torch.float16)
    ends = replace(made["gemm_ar"]("block"), bias=False)
    cases.append(("gemm_rs, e5m2, float16 result", Fp8Case("gemm_rs", e5m2, [])))
    cases.append(("gemm_ar, quantised norm", Fp8Case("gemm_ar", ends, _ENDS)))
    return cases


def gemm_case(case: ScaledCase, device: torch.device) -> str:
    x, weight, scale_x, scale_w, bias = _on(device, *case.inputs(0))
    result = flux.gemm(x, weight, bias, scale_x=scale_x, scale_w=scale_w)
    return compare(result.cpu(), case.product(0, 0).to(case.out_dtype))


def rank_case(rank: int, case: Fp8Case, device: torch.device) -> str:
    """Successive calls on one rank of a real group."""
    results = []
    for number, data in enumerate(successive(case.data)):
        x, weight, scale_x, scale_w, bias = _on(device, *data.inputs(rank))
        how: dict[str, Any] = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": data.out_dtype}
        if case.ends:
            end = case.ends[number % len(case.ends)]
            (residual,) = _on(device, data.residual())
            q, scale, total, norm = flux.gemm_ar(
                x,
                weight,
                residual=residual,
                norm_weight=_norm_weight(data, device),
                return_norm=True,
                **end,
                **how,
            )
            results.append((data, [total, norm, q, scale], end))
        elif case.op == "ag_gemm":
            product, rows, scales = flux.ag_gemm(x, weight, bias, return_gathered=True, **how)
            results.append((data, [product, rows, scales], {}))
        else:
            function = flux.gemm_rs if case.op == "gemm_rs" else flux.gemm_ar
            results.append((data, [function(x, weight, bias, **how)], {}))
    flux.check()
    return first_wrong([_compare(case.op, rank, *result) for result in results])


def emulated_case(ranks: EmulatedRanks, case: Fp8Case) -> str:
    """As rank_case, with all ranks on one GPU."""
    said, p = [], ranks.world_size
    for number, data in enumerate(successive(case.data)):
        inputs = [_on(ranks.device, *data.inputs(rank)) for rank in range(p)]
        xs, weights, of_rows, of_columns, biases = ([each[i] for each in inputs] for i in range(5))
        scales = [
            Scales(*pair, data.out_dtype, "promoted").canonical(data.n, data.k)
            for pair in zip(of_rows, of_columns, strict=True)
        ]
        how: dict[str, Any] = {"scales": scales, "join": False}
        bias, end = biases[0], case.ends[number % len(case.ends)] if case.ends else {}
        if end:
            norm = End(_norm_weight(data, ranks.device), 1e-6, end["quant"], None, end.get("ue8m0", False))
            (residual,) = _on(ranks.device, data.residual())
            told = ranks.gemm_ar(xs, weights, mode=number % 2, residual=residual, end=norm, **how)
            order = (1, 0, 2, 3)  # emulated ranks return norms first
            results = [[told[part * p + rank] for part in order] for rank in range(p)]
        elif case.op == "ag_gemm":
            products = ranks.ag_gemm(xs, weights, None if bias is None else [bias] * p, **how)
            told = ranks.collect(xs, **how)
            results = [[products[rank], told[rank], told[p + rank].view(p * data.m, -1)] for rank in range(p)]
        elif case.op == "gemm_rs":
            results = [[out] for out in ranks.gemm_rs(xs, weights, bias, **how)]
        else:
            results = [[out] for out in ranks.gemm_ar(xs, weights, bias, mode=number % 2, **how)]
        ranks.check()
        said += [_compare(case.op, rank, data, outs, end) for rank, outs in enumerate(results)]
    return first_wrong(said)


def _on(device: torch.device, *tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def _norm_weight(case: ScaledCase, device: torch.device) -> torch.Tensor:
    return torch.arange(case.n).remainder(3).add(1).to(device, case.out_dtype)


def _compare(op: str, rank: int, case: ScaledCase, outs: Tensors, end: dict[str, Any]) -> str:
    outs = [out.cpu() for out in outs]
    wanted: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if op == "gemm_rs":
        wanted["sum"] = outs[0], case.total().chunk(case.world_size)[rank]
    elif op == "ag_gemm":
        xs = [case.x(source) for source in range(case.world_size)]
        scales = torch.cat([s.expand(case.m, 1) if s.dim() == 1 else s for _, s in xs])
        wanted["product"] = outs[0], case.gathered(rank)
        wanted["gathered rows"] = outs[1].float(), torch.cat([x.float() for x, _ in xs])
        wanted["gathered scales"] = outs[2], scales
    else:
        total = case.total().float() + (case.residual().float() if end else 0)
        wanted["sum"] = outs[0], total.to(case.out_dtype)
    if end:
        q, scale = flux.quantize(outs[1], **end)
        wanted["quantised norm"] = outs[2].view(torch.uint8), q.view(torch.uint8)
        wanted["its scales"] = outs[3], scale
    return first_difference(wanted)
