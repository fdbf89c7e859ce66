"""Layer 1 of a mixture of experts with each number of communication CTAs, against what the plan chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flux
from flux.bench.cases import moe, moe_peers
from flux.bench.cases.common import Context, Lineup
from flux.bench.cases.operands import values
from flux.bench.model import forced_name
from flux.bench.suites import Problem, Request
from flux.moe.gemm_gather_rs import launch
from flux.plan.moe import MoePlan
from flux.testing.compare import compare, first_wrong

_LAYER = "moe_layer1"
# Numbers that leave no SM to compute are skipped.
_NUMBERS = (0, 4, 8, 12, 16, 24, 32, 48, 64)

Layer = Callable[[torch.Tensor, torch.Tensor, flux.moe.Routing], torch.Tensor]


def rows(request: Request) -> list[Problem]:
    """Those of moe_layer1; with even loads, unless others are asked for."""
    if not request.cuda:
        raise ValueError(f"bench: {request.op} needs GPUs: a CPU has no CTAs to divide")
    return moe.rows(replace(request, imbalance=request.imbalance or ("0",)))


def check(problem: Problem, context: Context) -> str:
    """The plan's number and every other on integers that carry each rank's mark. No call has the data of the
    one before, or of the one that used its buffer last.
    """
    assert isinstance(problem, moe.MoeProblem)
    calls = list(moe.exact_calls(problem, context))
    layers = {
        "the plan's number": flux.moe.gemm_gather_rs,
        **_forced(*moe.planned(_LAYER, calls[0][0], context)),
    }
    results = []
    for i, (name, layer) in enumerate(layers.items()):
        (x, weight, routing), want = calls[i % len(calls)]
        said = compare(layer(values(x), values(weight), routing)[: len(want)].cpu(), want)
        results.append(said if said == "exact" else f"{name}: {said}")
    flux.check(context.group)
    return first_wrong(results)


def prepare(problem: Problem, context: Context) -> Lineup:
    assert isinstance(problem, moe.MoeProblem)
    inputs, note = moe.random_inputs(problem, context)
    x, weight, routing = inputs
    workspace, plan = moe.planned(_LAYER, inputs, context)
    lineup = Lineup(context, plan=moe.plan_dict(plan), notes=[note, *moe.why_unfused(plan)])
    lineup.add_call("flux", "flux", moe.call_of(_LAYER, inputs))
    for name, layer in _forced(workspace, plan).items():
        lineup.add_call(name, "config", partial(layer, values(x), values(weight), routing))
    moe_peers.layer(lineup, False, *inputs)
    if plan.fused and lineup.plan:
        lineup.plan["communication_ctas"] = plan.communication_ctas
        lineup.notes.append(
            f"the plan: {plan.communication_ctas} of {workspace.num_sms} CTAs begin with communication"
        )
    return lineup


def _forced(workspace: Any, plan: MoePlan) -> dict[str, Layer]:
    """flux.moe.gemm_gather_rs with each number of communication CTAs; nothing where it runs unfused."""

    def layer(ctas: int, x: torch.Tensor, weight: torch.Tensor, routing: flux.moe.Routing) -> torch.Tensor:
        forced = replace(plan, communication_ctas=ctas)
        return launch(x, weight, routing, forced, workspace)

    numbers = [ctas for ctas in _NUMBERS if ctas < workspace.num_sms] if plan.fused else []
    return {forced_name(ctas): partial(layer, ctas) for ctas in numbers}
