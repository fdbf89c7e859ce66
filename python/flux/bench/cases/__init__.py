"""Ops that can be benchmarked. A new op is one module beside this file and one entry in :data:`OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flux.bench.cases import (
    ag_gemm,
    all_reduce,
    e2e,
    gemm,
    gemm_ar,
    gemm_rs,
    layer,
    moe,
    moe_ctas,
    norms,
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


def _spec(case: Any, patterns: tuple[str, ...], custom: str = "", **rest: bool) -> OpSpec:
    sweep, rows = getattr(case, "sweep", None), getattr(case, "rows", None)
    collective = rest.pop("collective", True)
    return OpSpec(patterns, custom, collective, case.check, case.prepare, sweep, rows=rows, **rest)


OPS: dict[str, OpSpec] = {
    "gemm_rs": _spec(gemm_rs, ("gemm_rs",), "gemm_rs"),
    "ag_gemm": _spec(ag_gemm, ("ag_gemm",), "ag_gemm"),
    "gemm_ar": _spec(gemm_ar, ("gemm_ar",), "gemm_ar", deals_rows=False),
    "gemm_ar_norm": _spec(norms, ("gemm_ar",), "gemm_ar", deals_rows=False, by_name=True),
    "all_reduce": _spec(all_reduce, ("all_reduce",), "all_reduce", deals_rows=False),
    "all_reduce_norm": _spec(norms, ("all_reduce",), "all_reduce", deals_rows=False, by_name=True),
    "gemm": _spec(gemm, ("gemm_rs", "ag_gemm", "gemm_ar"), "local", collective=False),
    **{f"moe_{part}": _spec(moe, ()) for part in ("route", "layer0", "layer1")},
    "moe_ctas": _spec(moe_ctas, ()),
    **{f"layer_{part}": _spec(layer, ()) for part in ("forward", "training")},
    **{f"e2e_{part}": _spec(e2e, (), deals_rows=False) for part in ("prefill", "decode")},
}

# Ops that compare flux only with itself. Not in a family, whose tables show the gain of fusing.
_STUDIES = ("moe_ctas",)

# Names for several ops at once.
FAMILIES = {
    family: tuple(op for op in OPS if op.startswith(f"{family}_") and op not in _STUDIES)
    for family in ("moe", "layer", "e2e")
}
