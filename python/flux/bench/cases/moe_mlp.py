"""Routing and both layers of experts with SwiGLU in one call, against pipelines of collectives or
all-to-alls and grouped GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

import flux
from flux.bench.cases import moe
from flux.bench.cases.common import Candidate, Context, Lineup
from flux.bench.cases.moe_peers import Transport, collective, exchange, grouped_mm
from flux.bench.cases.operands import gathering, normal, values
from flux.bench.model import in_way
from flux.bench.suites import Problem, Request
from flux.moe import reference
from flux.moe.ag_scatter_gemm import in_parts as layer0_in_parts
from flux.moe.gemm_gather_rs import in_parts as layer1_in_parts
from flux.moe.layer import Layer
from flux.testing.compare import agree

_ACTIVATION = "swiglu"
_CHECK_COLUMNS = 256  # of a token and of an expert; tokens, experts and layout are those of the row


def rows(request: Request) -> list[Problem]:
    """Those of a layer, of models that have gates."""
    return [row for row in moe.rows(request) if moe.MODELS[row.model].gates == 2]


def _of_rank(
    whole1: Tensor, whole2: Tensor, problem: moe.MoeProblem, context: Context
) -> tuple[Tensor, Tensor]:
    """A rank's part of all experts' weights: some experts, and of those some columns."""
    p, ep_size, wide = context.world_size, problem.ep_size, whole2.shape[2]
    share, count = p // ep_size, problem.experts // ep_size
    mine = slice(context.rank // share * count, (context.rank // share + 1) * count)
    part = slice(context.rank % share * (wide // share), (context.rank % share + 1) * (wide // share))
    gates, ups = whole1[mine, :wide][:, part], whole1[mine, wide:][:, part]
    return torch.cat([gates, ups], 1), whole2[mine, :, part].contiguous()


def _call(
    x: Tensor, w1: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, problem: moe.MoeProblem, context: Context
) -> Tensor:
    routing = moe.route(problem, context, ids, weights)
    hidden = flux.moe.ag_scatter_gemm(x, w1, routing, activation=_ACTIVATION)
    return flux.moe.gemm_gather_rs(hidden, w2, routing)


def check(problem: Problem, context: Context) -> str:
    """Against torch on this rank's tokens and the weights of all experts, which are the same on all ranks."""
    assert isinstance(problem, moe.MoeProblem)
    columns = min(_CHECK_COLUMNS, problem.n // 2, problem.k)
    ids, weights = moe.choices(problem, context)
    same, own = (normal(context, 0.3, seed) for seed in (7, 70 + context.rank))
    x = own(ids.shape[0], columns)
    whole = same(problem.experts, 2 * columns, columns), same(problem.experts, columns, columns)
    got = _call(x, *_of_rank(*whole, problem, context), ids, weights, problem, context)
    want = reference.moe_mlp(x, ids, weights, *whole, _ACTIVATION)
    flux.check(group=context.group)
    return agree({"result": got[: len(want)]}, {"result": want.to(got.dtype)})


def prepare(problem: Problem, context: Context) -> Lineup:
    assert isinstance(problem, moe.MoeProblem)
    (given, first, routing), note = moe.random_inputs(problem, context)
    x, w1 = values(given), values(first)
    experts, wide, hidden = w1.shape
    w2 = w1.new_empty(experts, hidden, wide // 2).normal_().mul_(0.1)
    ids, weights = moe.choices(problem, context)
    lineup = Lineup(context, notes=[note])

    def in_parts() -> Tensor:
        of_call = moe.route(problem, context, ids, weights)
        rows = layer0_in_parts(Layer(x, w1, of_call, _ACTIVATION))
        return layer1_in_parts(Layer(rows, w2, of_call))

    def ours() -> Tensor:
        return _call(x, w1, w2, ids, weights, problem, context)

    lineup.add_call("flux", "flux", ours)
    lineup.add_call(in_way("parts"), "parts", in_parts)

    def by_torch(rows: Tensor) -> Tensor:
        gate, up = grouped_mm(rows, w1.transpose(1, 2), offs=routing.offsets[1:]).chunk(2, 1)
        made: Tensor = grouped_mm(silu(gate) * up, w2.transpose(1, 2), offs=routing.offsets[1:])
        return made

    def by_flux(rows: Tensor) -> Tensor:
        made = flux.grouped_gemm(rows, w1, routing.offsets, activation=_ACTIVATION)
        return flux.grouped_gemm(made, w2, routing.offsets)

    def pipeline(multiply: Callable[[Tensor], Tensor], name: str, by: Transport) -> Candidate:
        return Candidate(f"{by.name}+{name}", by.role, lambda: by.behind(multiply(values(by.before()))))

    total = x.new_empty(routing.max_tokens, x.shape[1])
    usual = collective(gathering(x, context), total, routing, context)
    lineup.candidates.append(pipeline(by_torch, "grouped_mm", usual))
    exchange(lineup, x, routing, partial(pipeline, by_flux, "flux.grouped_gemm"))
    return lineup
