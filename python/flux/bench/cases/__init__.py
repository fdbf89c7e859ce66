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
    moe_mlp,
    norms,
)
from flux.bench.cases.common import Context, Prepared
from flux.bench.cases.fp8 import gemm as fp8_gemm
from flux.bench.cases.fp8 import moe as fp8_moe
from flux.bench.cases.fp8 import quantize, ranks
from flux.bench.suites import Problem, Request


@dataclass(frozen=True)
class Case:
    """How one op is measured with operands of some kind.

    check: runs the op on exact data; "exact", or what is wrong with the result.
    prepare: the candidates of one row, ready to be timed.
    sweep: the op with every tile shape there is (--all-configs); None where it has no such choice.
    """

    check: Callable[[Problem, Context], str]
    prepare: Callable[[Problem, Context], Prepared]
    sweep: Callable[[Problem, Context], Prepared] | None


@dataclass(frozen=True)
class OpSpec:
    """How one op is measured.

    patterns: which shapes of a suite it takes, and in which order.
    custom: the pattern of a shape given by --n and --k.
    collective: whether its ranks talk to each other; if not, one GPU can measure the shapes of any TP.
    deals_rows: whether M must divide by the ranks.
    wide: with operands of 16 bits or more; None for an op that has fp8 rows only.
    scaled: with fp8 operands; None for an op that takes none, or that nobody measures with them.
    rows: the rows of an op that is measured on models and not on the shapes of a suite.
    by_name: whether it is measured only where somebody asks for it.
    """

    patterns: tuple[str, ...]
    custom: str
    collective: bool
    wide: Case | None
    scaled: Case | None = None
    deals_rows: bool = True
    rows: Callable[[Request], list[Problem]] | None = None
    by_name: bool = False

    def case(self, problem: Problem) -> Case:
        """What measures a problem of this op."""
        case = self.scaled if problem.scales else self.wide
        assert case is not None, "the command takes no such problem"
        return case


def _case(module: Any) -> Case | None:
    return module and Case(module.check, module.prepare, getattr(module, "sweep", None))


def _spec(case: Any, patterns: tuple[str, ...], custom: str = "", scaled: Any = None, **rest: bool) -> OpSpec:
    """The entry of an op from its module, and from the one with its fp8 rows."""
    rows, collective = getattr(case, "rows", None), rest.pop("collective", True)
    return OpSpec(patterns, custom, collective, _case(case), _case(scaled), rows=rows, **rest)


OPS: dict[str, OpSpec] = {
    "gemm_rs": _spec(gemm_rs, ("gemm_rs",), "gemm_rs", ranks),
    "ag_gemm": _spec(ag_gemm, ("ag_gemm",), "ag_gemm", ranks),
    "gemm_ar": _spec(gemm_ar, ("gemm_ar",), "gemm_ar", ranks, deals_rows=False),
    "gemm_ar_norm": _spec(norms, ("gemm_ar",), "gemm_ar", deals_rows=False, by_name=True),
    "all_reduce": _spec(all_reduce, ("all_reduce",), "all_reduce", deals_rows=False),
    "all_reduce_norm": _spec(norms, ("all_reduce",), "all_reduce", deals_rows=False, by_name=True),
    "gemm": _spec(gemm, ("gemm_rs", "ag_gemm", "gemm_ar"), "local", fp8_gemm, collective=False),
    "quantize": _spec(None, ("gemm_rs", "ag_gemm"), "local", quantize, collective=False, by_name=True),
    "moe_route": _spec(moe, ()),
    **{f"moe_{part}": _spec(moe, (), scaled=fp8_moe) for part in ("layer0", "layer1")},
    "moe_mlp": _spec(moe_mlp, ()),
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
