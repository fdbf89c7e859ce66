"""fp8 operands: random ones to time, beside the same values in 16 bits, and exact ones to check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import (
    CALLS,
    Candidate,
    Context,
    agree,
    compare,
    rotating,
)
from flux.bench.cases.common import random_operands as in_16_bits
from flux.bench.cases.graphs import graphed
from flux.bench.suites import Problem
from flux.testing import ScaledCase

T = TypeVar("T")
# How x and weights are quantised, for each kind of scales.
QUANTS = {"tensor": ("tensor", "tensor"), "row": ("token", "token"), "block": ("group128", "block128")}


class Scaled(NamedTuple):
    """fp8 values, and their scales as flux.quantize returns them."""

    q: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Operands:
    """Random operands in fp8 and in 16 bits; several weights for few rows, so that L2 does not hold them."""

    x: Scaled
    weights: list[Scaled]
    wide_x: Tensor
    wide_weights: list[Tensor]


def quantized(x: Tensor, quant: str) -> Scaled:
    return Scaled(*flux.quantize(x, quant))  # type: ignore[arg-type]


def random_operands(problem: Problem, m: int, n: int, k: int, context: Context) -> Operands:
    """Operands of a product x [m, k] · weight [n, k]ᵀ."""
    x, weights = in_16_bits(m, n, k, context, weight_bytes=1)
    of_x, of_weights = QUANTS[problem.scales]
    return Operands(quantized(x, of_x), [quantized(w, of_weights) for w in weights], x, weights)


@dataclass(frozen=True)
class Caller:
    """Makes the candidates of a row. graphs: whether they are replayed from CUDA graphs."""

    problem: Problem
    context: Context
    graphs: bool = False

    def __call__(self, name: str, role: str, weights: Sequence[T], step: Callable[[T], object]) -> Candidate:
        """Calls `step` with the next weight each time."""
        if self.graphs:
            return graphed(name, role, step, weights, self.context)
        return Candidate(name, role, rotating(weights, step))


def flux_product(x: Scaled, weight: Scaled, **options: object) -> Tensor:
    return flux.gemm(x.q, weight.q, scale_x=x.scale, scale_w=weight.scale, **options)  # type: ignore[arg-type]


def exact_case(
    problem: Problem, m: int, n: int, k: int, context: Context, *, sums: bool = False, seed: int = 0
) -> ScaledCase:
    """Data with all scales visible in the results, whose type is that of the benchmark, or else the first one
    that represents them exactly.
    """
    case = None
    for dtype in (context.dtype, torch.float16, torch.float32):
        case = ScaledCase(m, n, k, context.world_size, problem.scales, out_dtype=dtype, sums=sums, seed=seed)
        try:
            case.exponents  # noqa: B018
        except ValueError:
            continue
        break
    assert case is not None
    return case


def of_rank(case: ScaledCase, rank: int, context: Context) -> tuple[Scaled, Scaled]:
    x, weight, of_rows, of_columns, _ = case.inputs(rank, context.device)
    return Scaled(x, of_rows), Scaled(weight, of_columns)


def judge(case: ScaledCase, context: Context, call: Callable[[torch.dtype], Tensor], want: Tensor) -> str:
    """Compares call(dtype of the result) with `want`, in the case's type. If that is another one than the
    benchmark's, whose results must then agree but for rounding, that too.
    """
    said = compare(call(case.out_dtype), want.to(case.out_dtype))
    if said != "exact" or case.out_dtype == context.dtype:
        return said
    return agree({"result": call(context.dtype)}, {"result": want.to(context.dtype)})


def first_wrong(check: Callable[[int], str], calls: int = CALLS) -> str:
    """check(seed) until one is not exact."""
    said = "exact"
    for seed in range(calls):
        said = check(seed)
        if said != "exact":
            break
    return said
