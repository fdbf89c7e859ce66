"""Ops that can be benchmarked. A new op is one module beside this file and one entry in :data:`OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flux.bench.cases import (
    ag_gemm,
    all_reduce,
    all_reduce_norm,
    e2e,
    gemm,
    gemm_ar,
    gemm_ar_norm,
    gemm_rs,
    layer,
    moe,
    moe_ctas,
)
from flux.bench.cases.common import Context, Prepared
from flux.bench.suites import Problem, Request


@dataclass(frozen=True)
class OpSpec:
    """How one op is measured.

    patterns: which shapes of a suite it takes, and in which order.
    custom: the pattern of a shape given by --n and --k.
    collective: whether its ranks talk to each other; if not, one GPU can measure the shapes of any TP.
    deals_rows: whether M must divide by the ranks.
    check: runs the op on exact data; "exact", or what is wrong with the result.
    prepare: the candidates of one row, ready to be timed.
    sweep: the op with every tile shape there is (--all-configs); None where it has no such choice.
    rows: the rows of an op that is measured on models and not on the shapes of a suite.
    by_name: whether it is measured only where somebody asks for it.
    """

    patterns: tuple[str, ...]
    custom: str
    collective: bool
    check: Callable[[Problem, Context], str]
    prepare: Callable[[Problem, Context], Prepared]
    sweep: Callable[[Problem, Context], Prepared] | None
    deals_rows: bool = True
    rows: Callable[[Request], list[Problem]] | None = None
    by_name: bool = False


def _of_models(case: Any, deals_rows: bool = True) -> OpSpec:
    return OpSpec((), "", True, case.check, case.prepare, None, deals_rows, case.rows)


OPS: dict[str, OpSpec] = {
    "gemm_rs": OpSpec(("gemm_rs",), "gemm_rs", True, gemm_rs.check, gemm_rs.prepare, gemm_rs.sweep),
    "ag_gemm": OpSpec(("ag_gemm",), "ag_gemm", True, ag_gemm.check, ag_gemm.prepare, ag_gemm.sweep),
    "gemm_ar": OpSpec(
        ("gemm_ar",), "gemm_ar", True, gemm_ar.check, gemm_ar.prepare, gemm_ar.sweep, deals_rows=False
    ),
    "gemm_ar_norm": OpSpec(
        ("gemm_ar",),
        "gemm_ar",
        True,
        gemm_ar_norm.check,
        gemm_ar_norm.prepare,
        None,
        deals_rows=False,
        by_name=True,
    ),
    "all_reduce": OpSpec(
        ("all_reduce",),
        "all_reduce",
        True,
        all_reduce.check,
        all_reduce.prepare,
        all_reduce.sweep,
        deals_rows=False,
    ),
    "all_reduce_norm": OpSpec(
        ("all_reduce",),
        "all_reduce",
        True,
        all_reduce_norm.check,
        all_reduce_norm.prepare,
        None,
        deals_rows=False,
        by_name=True,
    ),
    "gemm": OpSpec(("gemm_rs", "ag_gemm", "gemm_ar"), "local", False, gemm.check, gemm.prepare, gemm.sweep),
    "moe_route": _of_models(moe),
    "moe_layer0": _of_models(moe),
    "moe_layer1": _of_models(moe),
    "moe_ctas": _of_models(moe_ctas),
    "layer_forward": _of_models(layer),
    "layer_training": _of_models(layer),
    "e2e_prefill": _of_models(e2e, deals_rows=False),
    "e2e_decode": _of_models(e2e, deals_rows=False),
}

# Ops that compare flux only with itself. Not in a family, whose tables show the gain of fusing.
_STUDIES = ("moe_ctas",)

# Names for several ops at once.
FAMILIES = {
    family: tuple(op for op in OPS if op.startswith(f"{family}_") and op not in _STUDIES)
    for family in ("moe", "layer", "e2e")
}
