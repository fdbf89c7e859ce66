"""Operands in 16 bits or more, and in fp8 with scales: random ones to time, exact ones to check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import CALLS, Context, Step, agree, compare
from flux.bench.suites import Problem
from flux.ops.all_gather import torch_all_gather
from flux.testing import ScaledCase

# Below this M the weight would stay in L2 during a burst, unlike in a model: rotate over copies of it.
DECODE_M = 256
_MIN_WEIGHT_SETS = 3
# How x and weights are quantised, for each kind of scales.
QUANTS = {"tensor": ("tensor", "tensor"), "row": ("token", "token"), "block": ("group128", "block128")}


class Scaled(NamedTuple):
    """fp8 values, and their scales as flux.quantize returns them."""

    q: Tensor
    scale: Tensor

    @property
    def of_all(self) -> bool:
        """Whether all values have one scale."""
        return self.scale.dim() == 1


Operand = Tensor | Scaled


def values(x: Operand) -> Tensor:
    return x.q if isinstance(x, Scaled) else x


def moved(x: Operand, move: Callable[[Tensor], Tensor]) -> Operand:
    """What `move` makes of rows: of values and of their scales. fp8 travels as bytes."""
    if isinstance(x, Tensor):
        return move(x)
    q = move(x.q.view(torch.uint8)).view(x.q.dtype)
    return Scaled(q, x.scale if x.of_all else move(x.scale))


def gathering(own: Operand, context: Context) -> Callable[[], Operand]:
    """Gathers the rows of all ranks, and their scales but for that of a whole tensor."""
    collect, group = torch_all_gather(), context.group

    def room(rows: Tensor) -> Tensor:
        return rows.new_empty(len(rows) * context.world_size, *rows.shape[1:])

    if isinstance(own, Tensor):
        everybody = room(own)

        def gather() -> Operand:
            collect(everybody, own, group=group)
            return everybody

        return gather
    everybody = room(own.q.view(torch.uint8))
    scales = own.scale if own.of_all else room(own.scale)

    def gather_scaled() -> Operand:
        collect(everybody, own.q.view(torch.uint8), group=group)
        if not own.of_all:
            collect(scales, own.scale, group=group)
        return Scaled(everybody.view(own.q.dtype), scales)

    return gather_scaled


@dataclass(frozen=True)
class Operands:
    """Random operands, and if they are fp8 the same ones in 16 bits. Several weights for few rows, so that L2
    does not hold them.
    """

    x: Operand
    weights: list[Any]
    wide_x: Tensor
    wide_weights: list[Tensor]


def quantized(x: Tensor, quant: str) -> Scaled:
    return Scaled(*flux.quantize(x, quant))  # type: ignore[arg-type]


def normal(context: Context, std: float = 0.1, seed: int | None = None) -> Callable[..., Tensor]:
    """Draws tensors of a shape, without a seed other ones on each rank.

    Normal x 0.1: zeros and small integers draw less power and would run 10-20 % faster.
    """
    generator = torch.Generator(context.device).manual_seed(1234 + context.rank if seed is None else seed)

    def draw(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=context.device, dtype=context.dtype)
        return made.mul_(std)

    return draw


def random_operands(problem: Problem, context: Context) -> Operands:
    """Operands of a rank's product x [m, k] · weight [n, k]ᵀ."""
    m, n, k = problem.local(context.tp)
    draw, sets = normal(context), 1
    if context.cuda and m <= DECODE_M:
        l2_bytes = torch.cuda.get_device_properties(context.device).L2_cache_size
        weight_bytes = n * k * (1 if problem.scales else context.dtype.itemsize)
        sets = max(_MIN_WEIGHT_SETS, -(-2 * l2_bytes // weight_bytes))
    x, weights = draw(m, k), [draw(n, k) for _ in range(sets)]
    if not problem.scales:
        return Operands(x, weights, x, weights)
    of_x, of_weights = QUANTS[problem.scales]
    return Operands(quantized(x, of_x), [quantized(w, of_weights) for w in weights], x, weights)


def step_of(op: Callable[..., Any], x: Operand, **options: Any) -> Step:
    """Calls an operator of flux with x and the weight that it is given."""
    if isinstance(x, Scaled):
        q, scale = x
        return lambda w: op(q, w.q, scale_x=scale, scale_w=w.scale, **options)
    return lambda w: op(x, w, **options)


def scaled_call(
    op: Callable[..., Tensor], x: Scaled, weight: Scaled, **options: Any
) -> Callable[[torch.dtype], Tensor]:
    """An operator's result by its type."""
    given = {"scale_x": x.scale, "scale_w": weight.scale, **options}
    return lambda dtype: op(x.q, weight.q, out_dtype=dtype, **given)


def exact_case(
    problem: Problem, m: int, n: int, k: int, context: Context, *, sums: bool = False, seed: int = 0
) -> ScaledCase:
    """fp8 data with all scales visible in the results, whose type is that of the benchmark, or else the first
    one that represents them exactly.
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


def scaled_marked(problem: Problem, context: Context, op: Callable[..., Tensor]) -> str:
    """Checks an operator of several ranks on small fp8 integers with powers of two as scales, other ones on
    each rank, several calls in a row.
    """
    m, n, k = problem.local(context.tp)
    rows, sums = m // context.world_size, problem.op != "ag_gemm"
    own, said = slice(context.rank * rows, (context.rank + 1) * rows), "exact"
    for seed in range(CALLS):
        case = exact_case(problem, m if sums else rows, n, k, context, sums=sums, seed=seed)
        x, weight = of_rank(case, context.rank, context)
        want = case.total(context.device) if sums else case.gathered(context.rank, context.device)
        want = want[own] if problem.op == "gemm_rs" else want
        said = judge(case, context, scaled_call(op, x, weight, group=context.group), want)
        if said != "exact":
            break
    flux.check(context.group)
    return said
