"""Ops that can be benchmarked. A new op is one module beside this file and one entry in :data:`OPS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flux.bench.cases import gemm, layer, moe, moe_mlp, quantize, ranks
from flux.bench.cases.common import Context, Lineup
from flux.bench.suites import Problem, Request


class Case(Protocol):
    """A module that measures an op.

    It may also have `rows`, of an op that is measured on models and not on the shapes of a suite.
    """

    def check(self, problem: Problem, context: Context) -> str:
        """Runs the op on exact data; "exact", or what is wrong with the result."""

    def prepare(self, problem: Problem, context: Context) -> Lineup:
        """The candidates of one row, ready to be timed."""


@dataclass(frozen=True)
class OpSpec:
    """How one op is measured.

    patterns: which shapes of a suite it takes, and in which order.
    custom: the pattern of a shape given by --n and --k.
    collective: whether its ranks talk to each other; if not, one GPU can measure the shapes of any TP.
    deals_rows: whether M must divide by the ranks.
    wide, scaled: whether it is measured with operands of 16 bits or more, and with fp8 ones.
    by_name: whether it is measured only where somebody asks for it.
    needs: a package that must be installed.
    """

    case: Case
    patterns: tuple[str, ...] = ()
    custom: str = ""
    collective: bool = True
    deals_rows: bool = True
    wide: bool = True
    scaled: bool = False
    by_name: bool = False
    needs: str = ""

    @property
    def rows(self) -> Callable[[Request], list[Problem]] | None:
        return getattr(self.case, "rows", None)


_LOCAL: dict[str, Any] = {"custom": "local", "collective": False, "scaled": True}
OPS: dict[str, OpSpec] = {
    "gemm_rs": OpSpec(ranks, ("gemm_rs",), "gemm_rs", scaled=True),
    "ag_gemm": OpSpec(ranks, ("ag_gemm",), "ag_gemm", scaled=True),
    "gemm_ar": OpSpec(ranks, ("gemm_ar",), "gemm_ar", scaled=True, deals_rows=False),
    "gemm_ar_norm": OpSpec(ranks, ("gemm_ar",), "gemm_ar", by_name=True, deals_rows=False),
    "all_reduce": OpSpec(ranks, ("all_reduce",), "all_reduce", deals_rows=False),
    "all_reduce_norm": OpSpec(ranks, ("all_reduce",), "all_reduce", by_name=True, deals_rows=False),
    "gemm": OpSpec(gemm, ("gemm_rs", "ag_gemm", "gemm_ar"), **_LOCAL),
    "quantize": OpSpec(quantize, ("gemm_rs", "ag_gemm"), wide=False, by_name=True, **_LOCAL),
    "moe_route": OpSpec(moe),
    "moe_layer0": OpSpec(moe, scaled=True),
    "moe_layer1": OpSpec(moe, scaled=True),
    "moe_mlp": OpSpec(moe_mlp),
    "layer_forward": OpSpec(layer, needs="megatron"),
    "layer_training": OpSpec(layer, needs="megatron"),
}

# Names for several ops at once.
FAMILIES = {family: tuple(op for op in OPS if op.startswith(f"{family}_")) for family in ("moe", "layer")}
