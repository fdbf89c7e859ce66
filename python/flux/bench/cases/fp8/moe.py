"""Expert layers with fp8 operands, against the collective and a scaled grouped GEMM in turn, and bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flux
from flux.bench.cases import moe
from flux.bench.cases.common import CALLS, Candidate, Context, Prepared, agree, collectives, compare, tried
from flux.bench.cases.common import first_wrong as first_wrong_of
from flux.bench.cases.fp8.data import QUANTS, Scaled, quantized
from flux.bench.cases.moe_peers import Parts, used_rows
from flux.bench.model import IN_16_BITS, in_way
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.moe.ag_scatter_gemm import in_parts as layer0_in_parts
from flux.moe.combine import weighted_sum
from flux.moe.gemm_gather_rs import in_parts as layer1_in_parts
from flux.moe.routing import plan_of
from flux.ops._scales import Scales
from flux.ops.all_gather import torch_all_gather
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_moe_data import ScaledMoe

# Columns and types of checks: the first whose sums are exact. Tokens, experts and layout are as in the row.
_CHECKS = ((512, torch.bfloat16), (256, torch.bfloat16), (512, torch.float16), (256, torch.float16))


def scaled_case(problem: moe.MoeProblem, context: Context) -> ScaledMoe:
    """Exact data for the experts and tokens of a row."""
    p = context.world_size
    skew = "one expert" if problem.hot else "skewed" if problem.load_std else "even"
    found = None
    for columns, dtype in _CHECKS:
        tokens = (problem.m // p,) * p
        layout = (problem.experts, problem.top_k, problem.ep_size, context.dtype, skew)
        found = ScaledMoe(MoeCase(tokens, columns, columns, *layout), problem.scales, out_dtype=dtype)
        if found.needs <= EXACT_LIMIT[dtype]:
            break
    assert found is not None
    return found


def check(problem: Problem, context: Context) -> str:
    """Small integers with powers of two as scales, other ones on each rank, several calls in a row."""
    assert isinstance(problem, moe.MoeProblem)
    results = []
    for seed in range(CALLS):
        case = scaled_case(problem, context)
        case = replace(case, moe=replace(case.moe, seed=seed))
        routing = case.route(context.rank, str(context.device))
        if problem.op == "moe_layer0":
            given, experts, want = case.x(context.rank), case.w1(context.rank), case.layer0(context.rank)
        else:
            given = case.hidden(context.rank, routing.rows.shape[0])
            experts, want = case.w2(context.rank), case.layer1(context.rank)
        x, weight = (Scaled(*(t.to(context.device) for t in pair)) for pair in (given, experts))
        got = _layer(problem.op, x, weight, routing, out_dtype=case.out_dtype)
        results.append(compare(got[: len(want)].cpu(), want))
    flux.check(context.group)
    return first_wrong_of(results)


def _layer(op: str, x: Scaled, weight: Scaled, routing: flux.moe.Routing, **options: Any) -> Tensor:
    layer = flux.moe.ag_scatter_gemm if op == "moe_layer0" else flux.moe.gemm_gather_rs
    return layer(x.q, weight.q, routing, scale_x=x.scale, scale_w=weight.scale, **options)


def prepare(problem: Problem, context: Context) -> Prepared:
    assert isinstance(problem, moe.MoeProblem)
    (wide_x, wide_weight, routing), note = moe.random_inputs(problem, context)
    of_x, of_weights = QUANTS[problem.scales]
    x, weight = quantized(wide_x, of_x), quantized(wide_weight, of_weights)
    experts, n, k = weight.q.shape
    scales = Scales(x.scale, weight.scale, context.dtype, "promoted")
    canonical = scales.canonical_experts(experts, n, k)
    first = problem.op == "moe_layer0"
    in_16_bits = flux.moe.ag_scatter_gemm if first else flux.moe.gemm_gather_rs
    candidates = [
        Candidate("flux", "flux", lambda: _layer(problem.op, x, weight, routing)),
        Candidate(IN_16_BITS, "peer", lambda: in_16_bits(wide_x, wide_weight, routing)),
    ]
    if first:
        parts: Callable[[], Tensor] = lambda: layer0_in_parts(x.q, weight.q, routing, None, canonical)  # noqa: E731
    else:
        parts = lambda: layer1_in_parts(x.q, weight.q, routing, canonical)  # noqa: E731
    candidates.append(Candidate(in_way("parts"), "parts", parts))
    others, notes = (_layer0_peers if first else _layer1_peers)(x, weight, problem.scales, routing, context)
    op = "moe.ag_scatter_gemm" if first else "moe.gemm_gather_rs"
    assert context.group is not None
    workspace, _ = moe.plan_of(op, wide_weight, routing, context)
    plan = plan_of(workspace, op, weight.q, routing, x.q.dtype, scales)
    more = [note, *notes, *moe.why_unfused(plan)]
    return Prepared([*candidates, *others], moe.plan_dict(plan), more)


Grouped = Callable[[Scaled, Tensor, Tensor], Tensor]  # of rows, offsets and their ends


def grouped_products(
    x: Scaled, weight: Scaled, scales: str, offsets: Tensor, context: Context
) -> tuple[dict[str, Grouped], list[str]]:
    """Grouped GEMMs with these weights: flux's, and torch's if it gives the same product of these rows, or
    why it does not.
    """
    of_experts = weight.scale
    if of_experts.dim() < 3:
        of_experts = of_experts.reshape(-1, 1).expand(weight.q.shape[:2]).contiguous()
    transposed = weight.q.transpose(1, 2)

    def by_flux(rows: Scaled, offsets: Tensor, ends: Tensor) -> Tensor:
        return flux.grouped_gemm(rows.q, weight.q, offsets, scale_x=rows.scale, scale_w=weight.scale)

    def by_torch(rows: Scaled, offsets: Tensor, ends: Tensor) -> Tensor:
        of_rows = rows.scale.reshape(-1)
        if of_rows.numel() == 1:
            of_rows = of_rows.expand(rows.q.shape[0]).contiguous()
        of_columns = of_experts.reshape(weight.q.shape[:2])
        result: Tensor = torch._scaled_grouped_mm(
            rows.q, transposed, of_rows, of_columns, offs=ends, out_dtype=context.dtype
        )
        return result

    found: dict[str, Grouped] = {"flux.grouped_gemm": by_flux}
    if scales == "block":
        return found, ["torch._scaled_grouped_mm takes no block scales: it is no peer"]

    def right() -> bool:
        ends = offsets[1:]
        got, want = by_torch(x, offsets, ends), by_flux(x, offsets, ends)
        said = agree({"product": got}, {"product": want})
        if not said.startswith("agrees"):
            raise RuntimeError(f"wrong: {said}")
        return True

    is_right, error = tried(right, context)
    if not is_right:
        return found, [f"torch._scaled_grouped_mm could not run: {error}"]
    return found | {"_scaled_grouped_mm": by_torch}, []


def _of_rows(x: Scaled, rows: Tensor) -> Scaled:
    scale = x.scale if x.scale.dim() == 1 else x.scale.index_select(0, rows)
    return Scaled(_bytes(x.q).index_select(0, rows).view(x.q.dtype), scale)


def _bytes(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


def _layer0_peers(
    x: Scaled, weight: Scaled, scales: str, routing: flux.moe.Routing, context: Context
) -> tuple[list[Candidate], list[str]]:
    comm, collect, p = collectives(context), torch_all_gather(), context.world_size
    tokens, rows = x.q.shape[0], used_rows(routing)
    offsets, ends = routing.offsets, routing.offsets[1:]
    gathered = _bytes(x.q).new_empty(tokens * p, x.q.shape[1])
    # NCCL gathers what is contiguous. The scale of a tensor is each rank's own, so it travels for every row.
    own = (x.scale.expand(tokens, 1) if x.scale.dim() == 1 else x.scale).contiguous()
    all_scales = own.new_empty(tokens * p, own.shape[1])

    def gather() -> None:
        collect(gathered, _bytes(x.q), group=context.group)
        collect(all_scales, own, group=context.group)

    gather()
    arrived = Scaled(gathered.view(x.q.dtype), all_scales)
    permuted = _of_rows(arrived, rows)
    found, notes = grouped_products(permuted, weight, scales, offsets, context)
    candidates = [Candidate(comm, "comm", gather)]
    parts = Parts.of(routing, context) if routing.ep_size == p else None
    for name, product in found.items():

        def serial(product: Grouped = product) -> None:
            gather()
            product(_of_rows(arrived, rows), offsets, ends)

        def dispatched(product: Grouped = product) -> None:
            assert parts is not None
            some = Scaled(parts.dispatch(_bytes(x.q)).view(x.q.dtype), parts.dispatch(own))
            product(_of_rows(some, parts.rows), offsets, ends)

        candidates.append(Candidate(name, "gemm", functools.partial(product, permuted, offsets, ends)))
        candidates.append(Candidate(f"{comm}+{name}", "serial", serial))
        if parts is not None:
            candidates.append(Candidate(f"all-to-all+{name}", "peer", dispatched))
    return candidates, notes


def _layer1_peers(
    x: Scaled, weight: Scaled, scales: str, routing: flux.moe.Routing, context: Context
) -> tuple[list[Candidate], list[str]]:
    comm, scatter, p = collectives(context), reduce_scatter(), context.world_size
    n, dtype = weight.q.shape[1], context.dtype
    partial = x.q.new_zeros(routing.max_tokens * p, n, dtype=dtype)
    total = partial.new_empty(routing.max_tokens, n)
    count = used_rows(routing).numel()
    used = Scaled(x.q[:count], x.scale if x.scale.dim() == 1 else x.scale[:count])
    offsets, ends = routing.offsets, routing.offsets[1:]
    found, notes = grouped_products(used, weight, scales, offsets, context)
    candidates = [Candidate(comm, "comm", lambda: scatter(total, partial, group=context.group))]
    parts = Parts.of(routing, context) if routing.ep_size == p else None
    for name, product in found.items():

        def serial(product: Grouped = product) -> None:
            summed = weighted_sum(product(used, offsets, ends), routing.positions, routing.weights)
            scatter(total, summed.to(dtype).view(partial.shape), group=context.group)

        def combined(product: Grouped = product) -> None:
            assert parts is not None
            summed = weighted_sum(product(used, offsets, ends), parts.positions, parts.weights)
            parts.combine(summed[0].to(dtype))

        candidates.append(Candidate(name, "gemm", functools.partial(product, used, offsets, ends)))
        candidates.append(Candidate(f"{name}+{comm}", "serial", serial))
        if parts is not None:
            candidates.append(Candidate(f"{name}+all-to-all", "peer", combined))
    return candidates, notes
