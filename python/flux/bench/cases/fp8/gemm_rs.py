"""flux.gemm_rs with scales, against scaled products and then NCCL, PyTorch's fused operator, and bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flux
from flux.bench.cases.common import (
    Candidate,
    Context,
    Prepared,
    async_tp,
    collectives,
    explained,
)
from flux.bench.cases.fp8.data import (
    Caller,
    Operands,
    Scaled,
    exact_case,
    first_wrong,
    flux_product,
    judge,
    of_rank,
    random_operands,
)
from flux.bench.cases.fp8.gemm import by_library, canonical
from flux.bench.cases.fp8.libraries import opened
from flux.bench.cases.gemm_rs import every_tile
from flux.bench.model import IN_16_BITS
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.ops._scales import Scales


def _call(x: Scaled, weight: Scaled, **options: Any) -> Tensor:
    return flux.gemm_rs(x.q, weight.q, scale_x=x.scale, scale_w=weight.scale, **options)


def check(problem: Problem, context: Context) -> str:
    """Small integers with powers of two as scales, other ones on each rank, several calls in a row."""
    m, n, k = problem.local(context.tp)
    rows = m // context.world_size
    own = slice(context.rank * rows, (context.rank + 1) * rows)

    def one(seed: int) -> str:
        case = exact_case(problem, m, n, k, context, sums=True, seed=seed)
        x, weight = of_rank(case, context.rank, context)
        want = case.total(context.device)[own]
        return judge(
            case, context, lambda dtype: _call(x, weight, group=context.group, out_dtype=dtype), want
        )

    said = first_wrong(one)
    flux.check(context.group)
    return said


def prepare(problem: Problem, context: Context) -> Prepared:
    m, n, k = problem.local(context.tp)
    group, comm = context.ranks, collectives(context)
    given, caller = random_operands(problem, m, n, k, context), Caller(problem, context)
    full = torch.empty(m, n, dtype=context.dtype, device=context.device)
    shard, ours = (
        torch.empty(m // context.world_size, n, dtype=context.dtype, device=context.device) for _ in range(2)
    )
    scatter, x, wide = reduce_scatter(), given.x, given.wide_x
    candidates = [
        *context.ours(
            "gemm_rs",
            lambda name, role, g: caller(name, role, given.weights, lambda w: _call(x, w, group=g, out=ours)),
        ),
        caller(
            IN_16_BITS, "peer", given.wide_weights, lambda w: flux.gemm_rs(wide, w, group=group, out=ours)
        ),
        caller("flux.gemm", "gemm", given.weights, lambda w: flux_product(x, w, out=full)),
        Candidate(comm, "comm", lambda: scatter(shard, full, group=group)),
        caller(
            f"flux.gemm+{comm}",
            "serial",
            given.weights,
            lambda w: scatter(shard, flux_product(x, w, out=full), group=group),
        ),
        *_fast(given, ours, caller, context),
    ]
    found, notes = opened(problem, m, n, k, context)
    for each in found:
        if each.role == "peer":
            candidates.append(by_library(each, "gemm", given, full, caller))
            behind = replace(each, product=_then(each.product, lambda of: scatter(shard, of, group=group)))
            candidates.append(by_library(behind, "serial", given, full, caller, f"{each.name}+{comm}"))
    if context.cuda and problem.scales != "block":
        peers, more = _async_tp(given, m, n, context)
        candidates, notes = candidates + peers, notes + more
    return Prepared(candidates, explained("gemm_rs", m, n, k, context, problem.scales), notes)


def _then(
    product: Callable[[Any, Any, Tensor], Tensor], behind: Callable[[Tensor], object]
) -> Callable[[Any, Any, Tensor], Tensor]:
    def both(x: Any, weight: Any, out: Tensor) -> Tensor:
        behind(product(x, weight, out))
        return out

    return both


def _fast(given: Operands, out: Tensor, caller: Caller, context: Context) -> list[Candidate]:
    """With sums that stay in the tensor cores, for scales that allow it."""
    if caller.problem.scales == "block":
        return []
    x, options = given.x, {"group": context.group, "out": out, "accumulate": "fast"}
    return [caller("flux, fast", "fast", given.weights, lambda w: _call(x, w, **options))]


def _async_tp(given: Operands, m: int, n: int, context: Context) -> tuple[list[Candidate], list[str]]:
    name, symm_mem = context.ranks.group_name, torch.ops.symm_mem
    x, of_x = given.x.q, given.x.scale.reshape(-1, 1) if given.x.scale.numel() > 1 else given.x.scale[0]

    def fused(weight: Scaled) -> object:
        of_w = weight.scale.reshape(1, -1) if weight.scale.numel() > 1 else weight.scale[0]
        return symm_mem.fused_scaled_matmul_reduce_scatter(
            x, weight.q.t(), of_x, of_w, "sum", 0, 0, name, [m, n], None, None, context.dtype, False
        )

    return async_tp(given.weights, fused, context)


def sweep(problem: Problem, context: Context) -> Prepared:
    """The kernel with every tile shape and cluster, against what the plan chose; as in bf16."""
    m, n, k = problem.local(context.tp)
    given = random_operands(problem, m, n, k, context)
    x = given.x.q
    weights = [(weight.q, canonical(given.x, weight)) for weight in given.weights]
    out = torch.empty(m // context.world_size, n, dtype=context.dtype, device=context.device)

    def launch(weight: tuple[Tensor, Scales], address: int, config: int) -> None:
        w, scales = weight
        of_call = {"scale_x": scales.x, "scale_w": scales.w, "fast": False}
        torch.ops.flux._gemm_rs(x, w, None, out, False, address, config, 0, 0, 0, None, **of_call)

    return every_tile((m, n, k), context, weights, launch, problem.scales)
