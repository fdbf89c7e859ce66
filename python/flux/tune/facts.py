"""What a row says about the ways to run its problem (flux.tuning)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from flux.bench.cases.moe import MODELS
from flux.bench.model import DTYPE_BYTES, Row, in_way
from flux.fp8.scales import kind_of
from flux.plan.moe import facts_op
from flux.tuning.facts import WAYS, Fact, scaled

# Microseconds between two launches, which the sum of the times of parts does not have: 0.3 to 0.7
# (benchmarks/results/tuning/2026-11-22-gemm_ar-launches-tp2-2xH200.json, sep and gemm + ar).
_BETWEEN_LAUNCHES_US = 0.5
# The collective of flux that is a part of an operator, as candidates are named.
_COLLECTIVES = {"gemm_ar": "all_reduce", "ag_gemm": "all_gather", "gemm_rs": "reduce_scatter"}
# The operators of mixtures of experts, as benchmarks and as plans name them.
_LAYERS = {"moe_layer0": "moe.ag_scatter_gemm", "moe_layer1": "moe.gemm_gather_rs"}


def facts_of(row: Row, tuned: bool = False) -> Iterator[Fact]:
    """Facts of a row that has several ways: of its operator, and of the parts that were timed alone. Without
    their source.

    Args:
        tuned: flux chose by measurements, so it is not known how its parts ran.
    """
    return (fact for fact in _facts(row, tuned) if len(fact.us) > 1)


def _facts(row: Row, tuned: bool) -> Iterator[Fact]:
    if not row.ok:
        return
    (m, n, k), times = row.local, {name: t.median * 1e3 for name, t in row.times.items()}
    # Of flux and of the GEMM: NCCL's times spread more, and by less than they differ.
    steady = (t for name, t in row.times.items() if t.role in ("flux", "gemm") or name.startswith("flux"))
    noise = max((t.spread for t in steady), default=0.0)
    dtype = DTYPE_BYTES[row.dtype]

    def fact(op: str, sizes: tuple[int, int, int], ways: dict[str, str], ranks: int) -> Iterator[Fact]:
        us = {way: round(times[name], 3) for way, name in ways.items() if name in times}
        if "fused" in us or "composed" in us:
            yield Fact(op, ranks, dtype, *sizes, us, noise=round(noise, 4))

    ours = {way: in_way(way) for way in WAYS if in_way(way) in times}
    if row.scales:
        # Of several ranks torch's way is not timed: unlike peers it applies scales behind the product.
        if row.op in _COLLECTIVES or row.op == "gemm_ar_norm":
            op = scaled(row.op, kind_of(row.op, row.scales))
            yield from fact(op, (m, n, k), {_way_of(row): "flux"} | ours, row.tp)
        elif (row.op, row.scales) == ("gemm", "tensor") and (row.plan or {}).get("fused"):
            yield from fact(scaled("gemm", "tensor"), (m, n, k), {"fused": "flux", "torch": "_scaled_mm"}, 1)
        return
    serial = next((name for name, t in row.times.items() if t.role == "serial"), "")
    gemms = {"fused": "flux.gemm", "torch": "cuBLAS"}
    if tuned and row.op in ("gemm", "all_reduce"):
        return
    if row.op == "gemm":
        yield from fact("gemm", (m, n, k), {"fused": "flux", "torch": "cuBLAS"}, 1)
    elif row.op == "all_reduce":
        yield from fact("all_reduce", (m * n, 0, 0), {"fused": "flux", "torch": "NCCL"} | ours, row.tp)
    elif row.op == "gemm_ar_norm":
        yield from fact(row.op, (m, n, k), {"torch": serial, _way_of(row): "flux"} | ours, row.tp)
    elif row.op in _COLLECTIVES:
        part = _COLLECTIVES[row.op]
        elements = m * k if part == "all_gather" else m * n
        if not tuned:
            yield from fact("gemm", (m, n, k), gemms, 1)
            yield from fact(part, (elements, 0, 0), {"fused": f"flux.{part}", "torch": "NCCL"}, row.tp)
        alone = [times[name] for name in gemms.values() if name in times]
        for whole in fact(row.op, (m, n, k), {"torch": serial, _way_of(row): "flux"} | ours, row.tp):
            together = min(alone, default=0.0) + times.get(f"flux.{part}", 0.0) + _BETWEEN_LAUNCHES_US
            yield _with_parts(whole, together if alone and f"flux.{part}" in times else None)
    elif row.op in _LAYERS and row.model in MODELS:
        model, ep = MODELS[row.model], re.match(r"EP(\d+)", row.variant)
        op = facts_op(_LAYERS[row.op], model.experts, model.top_k, int(ep[1]) if ep else 1)
        grouped = times.get("torch grouped_mm", 0.0)
        sooner = min(grouped, times.get("flux.grouped_gemm", grouped))
        for whole in fact(op, (row.m, n, k), {"fused": "flux", "parts": in_way("parts")}, row.tp):
            yield _with_parts(whole, times[serial] - grouped + sooner if grouped and serial else None)


def _way_of(row: Row) -> str:
    """The way that the plan chose. Old rows do not name it."""
    plan = row.plan or {}
    return plan.get("way") or ("composed" if "gemm_rs + all_gather" in plan.get("config", "") else "fused")


def _with_parts(fact: Fact, together: float | None) -> Fact:
    """The fact, with the sum of the times of its parts if they were not timed together."""
    if together is None or "parts" in fact.us:
        return fact
    return replace(fact, us={**fact.us, "parts": round(together, 3)}, summed=("parts",))
