"""Ops that can be benchmarked. A new op is one module beside this file and one entry in :data:`OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flux.bench.cases import ag_gemm, all_reduce, gemm, gemm_ar, gemm_rs
from flux.bench.cases.common import Context, Prepared
from flux.bench.suites import Problem


@dataclass(frozen=True)
class OpSpec:
    """How one op is measured.

    patterns: which shapes of a suite it takes, and in which order.
    custom: the pattern of a shape given by --n and --k.
    collective: whether its ranks talk to each other; if not, one GPU can measure the shapes of any TP.
    deals_rows: whether M must divide by the ranks.
    check: runs the op on exact data; "exact", or what is wrong with the result.
    prepare: the candidates of one row, ready to be timed.
    sweep: the op with every tile shape there is (--all-configs).
    """

    patterns: tuple[str, ...]
    custom: str
    collective: bool
    check: Callable[[Problem, Context], str]
    prepare: Callable[[Problem, Context], Prepared]
    sweep: Callable[[Problem, Context], Prepared]
    deals_rows: bool = True


OPS: dict[str, OpSpec] = {
    "gemm_rs": OpSpec(("gemm_rs",), "gemm_rs", True, gemm_rs.check, gemm_rs.prepare, gemm_rs.sweep),
    "ag_gemm": OpSpec(("ag_gemm",), "ag_gemm", True, ag_gemm.check, ag_gemm.prepare, ag_gemm.sweep),
    "gemm_ar": OpSpec(
        ("gemm_ar",), "gemm_ar", True, gemm_ar.check, gemm_ar.prepare, gemm_ar.sweep, deals_rows=False
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
    "gemm": OpSpec(("gemm_rs", "ag_gemm", "gemm_ar"), "local", False, gemm.check, gemm.prepare, gemm.sweep),
}
