"""Operands in 16 bits or more, and in fp8 with scales: random ones to time, exact ones to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import Context, Step
from flux.bench.suites import Problem
from flux.ops import gemm
from flux.ops.ways.all_gather import torch_all_gather
from flux.testing import AgGemmCase, GemmRsCase, ScaledCase
from flux.testing.compare import CALLS, agree, compare, first_wrong

# Below this M the weight would stay in L2 during a burst, unlike in a model: rotate over copies of it.
DECODE_M = 256
_MIN_WEIGHT_SETS = 3
SUMMED_K = 32  # of the products that an all-reduce sums in checks
# How x and weights are quantised, for each kind of scales.
QUANTS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group128", "block128")}


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
    if isinstance(own, Scaled):
        rows, dtype = gathering(own.q.view(torch.uint8), context), own.q.dtype
        scales = gathering(own.scale, context) if not own.of_all else lambda: own.scale
        return lambda: Scaled(values(rows()).view(dtype), values(scales()))
    collect, group = torch_all_gather, context.group
    everybody = own.new_empty(len(own) * context.world_size, *own.shape[1:])

    def gather() -> Operand:
        collect(everybody, own, group=group)
        return everybody

    return gather


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
    if isinstance(x, Scaled):
        q, scale = x
        return lambda w: op(q, w.q, scale_x=scale, scale_w=w.scale, **options)
    return lambda w: op(x, w, **options)


class Exact(NamedTuple):
    """Operands of a call, small integers, and what must come of it, in the type of the result."""

    x: Operand
    weight: Operand
    want: Tensor


def plain(op: str) -> str:
    """The operator without its norm."""
    return op.removesuffix("_norm")


def exact_calls(problem: Problem, context: Context) -> Iterator[Exact]:
    """A rank's operands that carry its mark; each time others, so that no call passes with data of another.

    fp8 ones have powers of two as scales, all visible in the result. Its type is that of the benchmark, or
    else the first one that represents it exactly.
    """
    m, n, k = problem.local(context.tp)
    rank, p, dtype, device = context.rank, context.world_size, context.dtype, context.device
    op = plain(problem.op)
    sums = op not in ("gemm", "ag_gemm")
    for seed in range(CALLS if op != "gemm" else 1):
        if problem.scales:
            sizes = (m // p if op == "ag_gemm" else m, n, k, p, problem.scales)
            types = (dtype, torch.float16, torch.float32)
            cases = [ScaledCase(*sizes, out_dtype=each, sums=sums, seed=seed) for each in types]
            scaled = next((each for each in cases if each.fits), cases[-1])
            x, weight, of_rows, of_columns, _ = scaled.inputs(rank, device)
            if op == "gemm":
                want = scaled.product(rank, rank, device).to(scaled.out_dtype)
            else:
                want = scaled.total(device) if sums else scaled.gathered(rank, device)
            want = want.chunk(p)[rank] if op == "gemm_rs" else want
            yield Exact(Scaled(x, of_rows), Scaled(weight, of_columns), want)
            continue
        case: AgGemmCase | GemmRsCase
        if op == "ag_gemm":
            case = AgGemmCase(m, n, k, p, dtype, seed=seed)
        elif op == "gemm":  # a GEMM+ReduceScatter of one rank
            case, rank = GemmRsCase(m, n, k, 1, dtype, seed=rank), 0
        else:
            case = GemmRsCase(m, n, k if op != "all_reduce" else SUMMED_K, p, dtype, seed=seed)
        x, weight, _ = case.inputs(rank, device)
        if isinstance(case, GemmRsCase) and op in ("gemm_ar", "all_reduce"):
            want = case.expected_sum(device)
        else:
            want = case.expected(rank, device)
        yield Exact(gemm.reference(x, weight) if op == "all_reduce" else x, weight, want)


def checked(problem: Problem, context: Context, judge: Callable[[Exact], str]) -> str:
    """What `judge` says of each exact call, all of them in a row."""
    said = first_wrong([judge(exact) for exact in exact_calls(problem, context)])
    if context.group is not None:
        flux.check(group=context.group)
    return said


def judged(exact: Exact, context: Context, op: Callable[..., Tensor], **options: Any) -> str:
    """Compares an operator's result. If its type is another one than the benchmark's, whose results must then
    agree but for rounding, that too.
    """
    if isinstance(exact.x, Tensor):
        return compare(op(exact.x, exact.weight, **options), exact.want)

    def call(dtype: torch.dtype) -> Tensor:
        result: Tensor = step_of(op, exact.x, out_dtype=dtype, **options)(exact.weight)
        return result

    said = compare(call(exact.want.dtype), exact.want)
    if said != "exact" or exact.want.dtype == context.dtype:
        return said
    return agree({"result": call(context.dtype)}, {"result": exact.want.to(context.dtype)})


def check_op(problem: Problem, context: Context, op: Callable[..., Tensor], **options: Any) -> str:
    return checked(problem, context, lambda exact: judged(exact, context, op, **options))
