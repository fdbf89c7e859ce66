"""Mixtures of experts: routing, and each fused half against the collective and a grouped GEMM in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flux
from flux.bench.cases import moe_peers
from flux.bench.cases.common import Context, Lineup
from flux.bench.cases.operands import QUANTS, Operand, Scaled, normal, quantized, values
from flux.bench.model import IN_16_BITS, in_way
from flux.bench.suites import Problem, Request, one_of
from flux.comm import registry
from flux.comm.workspace import Workspace
from flux.fp8.scales import Scales
from flux.moe.ag_scatter_gemm import in_parts as layer0_in_parts
from flux.moe.gemm_gather_rs import in_parts as layer1_in_parts
from flux.moe.layer import Layer, plan_of
from flux.plan.moe import MoePlan
from flux.testing.compare import CALLS, compare, first_wrong
from flux.testing.data import EXACT_LIMIT
from flux.testing.moe_data import MoeCase
from flux.testing.scaled_moe_data import ScaledMoe

_CHECK_COLUMNS = 512  # columns of the correctness check; tokens, experts and layout are those of the row
# Columns and types of results with fp8 operands: the first whose sums are exact.
_SCALED_CHECKS = ((512, torch.bfloat16), (256, torch.bfloat16), (512, torch.float16), (256, torch.float16))
_HOT, _ZIPF = "hot", "zipf"
_M = (512, 2048, 8192)
_CPU_M = (64,)
_FROM_TOKENS = ("moe_layer0", "moe_mlp")  # n and k of these are those of the first weight

# The layers, as plans name them.
_PLANNED = {"moe_layer0": "moe.ag_scatter_gemm", "moe_layer1": "moe.gemm_gather_rs"}

Inputs = tuple[Operand, Operand, flux.moe.Routing]  # x, weight and routing of a layer


@dataclass(frozen=True)
class Model:
    """The expert layer of a model. gates: matrices that the first GEMM multiplies with, 2 for SwiGLU."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gates: int = 2


MODELS = {
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "qwen3-235b": Model(4096, 1536, 128, 8),
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "flux-demo": Model(8192, 8192, 32, 4, gates=1),
    "tiny": Model(128, 256, 8, 2),
}


@dataclass(frozen=True)
class MoeProblem(Problem):
    """One row: m counts the tokens of all ranks, n and k are those of one expert's weight, uncut.

    load_std: standard deviation of the experts' shares of the tokens (COMET, arXiv 2502.19811, section 5).
    hot: every token chooses expert 0 too. zipf: the i-th most popular expert has 1/i of the first's load.
    """

    experts: int = 1
    top_k: int = 1
    ep_size: int = 1
    load_std: float = 0.0
    hot: bool = False
    zipf: bool = False

    def local(self, tp: int) -> tuple[int, int, int]:
        """Rows that a rank expects, and N and K of its part of an expert."""
        if self.ep_size < 1 or tp % self.ep_size:
            raise ValueError(f"{self.op}: --ep expected to be a divisor of {tp} ranks, got {self.ep_size}")
        share = tp // self.ep_size
        rows = self.m * self.top_k // self.ep_size
        if self.op == "moe_route":
            return self.m, self.experts, self.top_k
        cut = self.n if self.op in _FROM_TOKENS else self.k
        if self.experts % self.ep_size or cut % share or self.m % tp:
            sizes = f"{self.experts} experts, {cut} columns of an expert and {self.m} tokens"
            raise ValueError(f"{self.op}: {sizes} cannot be divided over {tp} ranks with --ep {self.ep_size}")
        if self.op in _FROM_TOKENS:
            return rows, self.n // share, self.k
        return rows, self.n, self.k // share

    def on_wire(self, tp: int, element_bytes: int) -> int:
        """A token goes to, or its partial sums come from, all ranks that hold one of its experts, on average
        over even loads. Routing: an index and a weight of four bytes for each choice, to all ranks.
        """
        if self.op == "moe_route":
            return (tp - 1) * self.m // tp * self.top_k * 8
        elsewhere = self.experts - self.experts // self.ep_size
        reached = 1 - math.comb(elsewhere, self.top_k) / math.comb(self.experts, self.top_k)
        width = {"moe_layer0": self.k, "moe_mlp": 2 * self.k}.get(self.op, self.n)
        return int((tp - 1) * reached * (self.m // tp) * width * element_bytes)

    @property
    def variant(self) -> str:
        layout = f"EP{self.ep_size}" if self.ep_size > 1 else "TP"
        return f"{layout} {_HOT if self.hot else _ZIPF if self.zipf else f'std {self.load_std:g}'}"


def rows(request: Request) -> list[Problem]:
    """Models x layouts x imbalances x tokens. Routing does not depend on who holds what of the experts."""
    wanted = [_load(text) for text in request.imbalance or ("0", _ZIPF)]
    layouts = request.ep or tuple(dict.fromkeys((1, request.world)))
    for model in request.pick(tuple(MODELS)):
        least = 1 / MODELS[model].experts
        if too_wide := [load["load_std"] for load in wanted if load.get("load_std", 0.0) > least]:
            raise ValueError(
                f"bench: --imbalance of {model} expected to be at most the mean share of its experts, "
                f"{least:.3g}, or half of them get no token; got {too_wide[0]:g}"
            )
    return [
        problem(request.op, model, m, ep_size, **load)
        for model in request.pick(tuple(MODELS))
        for ep_size in layouts
        for load in wanted
        for m in request.m or (_M if request.cuda else _CPU_M)
    ]


def _load(text: str) -> dict[str, Any]:
    """What --imbalance says of the experts' loads, as the fields of a problem."""
    if text in (_HOT, _ZIPF):
        return {text: True}
    try:
        spread = float(text)
    except ValueError:
        spread = math.nan
    if not 0 <= spread <= 1:
        what = f"a standard deviation of the loads from 0 to 1, such as 0.032, or {_ZIPF} or {_HOT}"
        raise ValueError(f"bench: --imbalance expected to be {what}, got {text!r}")
    return {"load_std": spread}


def problem(op: str, model: str, m: int, ep_size: int = 1, **load: Any) -> MoeProblem:
    """The row of a model by name; op is one of the family "moe"; load: what MoeProblem says of
    loads.
    """
    one_of(model, MODELS)
    of = MODELS[model]
    n, k = (of.gates * of.intermediate, of.hidden) if op in _FROM_TOKENS else (of.hidden, of.intermediate)
    return MoeProblem(op, model, op, m, n, k, of.experts, of.top_k, ep_size, **load)


def choose_experts(problem: MoeProblem, tokens: int, generator: torch.Generator) -> Tensor:
    """topk_ids [tokens, k] whose experts' loads have about the wanted spread. Without replacement, so a large
    k flattens it: the row notes what came of it.
    """
    experts = problem.experts
    # The same seed on all ranks, so that the same experts are popular.
    shape = torch.randn(experts, generator=torch.Generator().manual_seed(7))
    share = (1 / experts + problem.load_std * (shape - shape.mean()) / shape.std(correction=0)).clamp(min=0)
    if problem.zipf:
        share = 1 / (1.0 + shape.argsort().argsort())
    # Highest rand ** (1 / share) first; its logarithm does not underflow.
    score = torch.rand(tokens, experts, generator=generator).log() / share.clamp(min=1e-9)
    if problem.hot:
        score[:, 0] = math.inf
    return score.topk(problem.top_k).indices


def check(problem: Problem, context: Context) -> str:
    """A layer on integers that carry each rank's mark, several calls in a row; of a routing, all it says."""
    assert isinstance(problem, MoeProblem)
    if problem.op == "moe_route":
        ids, weights = choices(problem, context)
        return moe_peers.check_routing(route(problem, context, ids, weights), ids, context)
    results = []
    for inputs, want in exact_calls(problem, context):
        options = {"out_dtype": want.dtype} if problem.scales else {}
        got = call_of(problem.op, inputs, **options)()
        results.append(compare(got[: len(want)].cpu(), want))
    flux.check(group=context.group)
    return first_wrong(results)


def exact_calls(problem: MoeProblem, context: Context) -> Iterator[tuple[Inputs, Tensor]]:
    """A layer's inputs, integers that carry each rank's mark, and what must come of them; each time others.
    A collective.
    """
    rank, device = context.rank, context.device
    for seed in range(CALLS):
        data = (_scaled if problem.scales else _case)(problem, context, seed)
        case = data if isinstance(data, MoeCase) else data.moe
        routing = route(problem, context, *(made.to(device) for made in case.routing(rank)))
        if problem.op == "moe_layer0":
            given, experts, want = data.x(rank), data.w1(rank), data.layer0(rank)
        else:
            given = data.hidden_rows(rank, routing.rows.shape[0])
            experts, want = data.w2(rank), data.layer1(rank)
        yield (_on(device, given), _on(device, experts), routing), want


def _on(device: torch.device, data: Tensor | tuple[Tensor, Tensor]) -> Operand:
    return data.to(device) if isinstance(data, Tensor) else Scaled(*(each.to(device) for each in data))


def _case(problem: MoeProblem, context: Context, seed: int, columns: int = _CHECK_COLUMNS) -> MoeCase:
    p, columns = context.world_size, min(columns, problem.n, problem.k)
    load = "one expert" if problem.hot else "skewed" if problem.load_std or problem.zipf else "even"
    layout = (problem.experts, problem.top_k, problem.ep_size, context.dtype, load)
    return MoeCase((problem.m // p,) * p, columns, columns, *layout, seed=seed)


def _scaled(problem: MoeProblem, context: Context, seed: int) -> ScaledMoe:
    """fp8 data of the first columns and type whose sums are exact."""
    cases = [
        ScaledMoe(_case(problem, context, seed, columns), problem.scales, out_dtype=dtype)
        for columns, dtype in _SCALED_CHECKS
    ]
    return next((case for case in cases if case.needs <= EXACT_LIMIT[case.out_dtype]), cases[-1])


def call_of(op: str, inputs: Inputs, **options: Any) -> Callable[[], Tensor]:
    layer = flux.moe.ag_scatter_gemm if op == "moe_layer0" else flux.moe.gemm_gather_rs
    x, weight, routing = inputs
    if isinstance(x, Scaled) and isinstance(weight, Scaled):
        options |= {"scale_x": x.scale, "scale_w": weight.scale}
    return partial(layer, values(x), values(weight), routing, **options)


def prepare(problem: Problem, context: Context) -> Lineup:
    assert isinstance(problem, MoeProblem)
    lineup, op = Lineup(context), problem.op
    if op == "moe_route":
        ids, weights = choices(problem, context)
        lineup.add_call("flux", "flux", lambda: route(problem, context, ids, weights))
        moe_peers.route(lineup, ids, weights, problem.experts)
        lineup.notes.append(_spread(problem, ids))
        return lineup
    wide, note = random_inputs(problem, context)
    x, weight, routing = inputs = _quantized(wide, problem.scales)
    lineup.add_call("flux", "flux", call_of(op, inputs))
    if context.cuda and op == "moe_layer1":
        lineup.add_call("flux, int8", "int8", call_of(op, inputs, wire="int8"))
    scales = None
    if isinstance(x, Scaled) and isinstance(weight, Scaled):
        lineup.add_call(IN_16_BITS, "peer", call_of(op, wide))
        scales = Scales(x.scale, weight.scale, context.dtype, "promoted")
    laid_out = scales and scales.canonical_experts(*values(weight).shape)
    in_parts = layer0_in_parts if op == "moe_layer0" else layer1_in_parts
    call = Layer(values(x), values(weight), routing, scales=laid_out)
    lineup.add_call(in_way("parts"), "parts", lambda: in_parts(call))
    moe_peers.layer(lineup, op == "moe_layer0", *inputs)
    _, plan = planned(op, inputs, context, scales)
    lineup.plan = plan_dict(plan)
    lineup.notes = [note, *why_unfused(plan), *lineup.notes]
    return lineup


def planned(
    op: str, inputs: Inputs, context: Context, scales: Scales | None = None
) -> tuple[Workspace, MoePlan]:
    """How flux runs a layer, and where."""
    x, weight, routing = inputs
    workspace = registry.get(context.ranks, context.device, _PLANNED[op])
    call = Layer(values(x), values(weight), routing, scales=scales)
    return workspace, plan_of(workspace, _PLANNED[op], call)


def _quantized(inputs: Inputs, scales: str) -> Inputs:
    x, weight, routing = inputs
    if not scales:
        return inputs
    of_x, of_weights = QUANTS[scales]
    return quantized(values(x), of_x), quantized(values(weight), of_weights), routing


def random_inputs(problem: MoeProblem, context: Context) -> tuple[Inputs, str]:
    """A layer's inputs in 16 bits or more, when it is timed, and a note on the routing. A collective."""
    draw = normal(context)
    ids, weights = choices(problem, context)
    routing = route(problem, context, ids, weights)
    _, n, k = problem.local(context.world_size)
    weight = draw(problem.experts // problem.ep_size, n, k)
    rows = ids.shape[0] if problem.op in _FROM_TOKENS else routing.rows.shape[0]
    return (draw(rows, k), weight, routing), _spread(problem, ids)


def plan_dict(plan: MoePlan) -> dict[str, Any]:
    """A plan, as a result file says it."""
    return {
        "fused": plan.by_flux,
        "config": f"{len(plan.columns)} chunks of columns",
        "reason": plan.reason,
        "candidates": [],
    }


def why_unfused(plan: MoePlan) -> list[str]:
    """The note of a row that flux runs unfused."""
    return [] if plan.by_flux else [f"flux runs unfused: {plan.reason}"]


def _spread(problem: MoeProblem, ids: Tensor) -> str:
    loads = torch.bincount(ids.flatten().cpu(), minlength=problem.experts) / ids.shape[0]
    return f"std of the experts' shares of this rank's tokens: {float(loads.std(correction=0)):.3f}"


def choices(problem: MoeProblem, context: Context) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1234 + context.rank)
    tokens = problem.m // context.world_size
    ids = choose_experts(problem, tokens, generator).to(context.device, torch.int32)
    return ids, torch.full(ids.shape, 1 / problem.top_k, device=context.device)


def route(problem: MoeProblem, context: Context, ids: Tensor, weights: Tensor) -> flux.moe.Routing:
    return flux.moe.route(ids, weights, problem.experts, group=context.group, ep_size=problem.ep_size)
