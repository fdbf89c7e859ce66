"""Mixtures of experts: each fused half against a grouped GEMM with the collective before or behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import flux
from flux.bench.cases.common import Candidate, Context, Prepared, compare
from flux.bench.suites import Problem
from flux.comm.group import reduce_scatter
from flux.moe import reference
from flux.moe.gemm_gather_rs import weighted_sum
from flux.ops.all_gather import torch_all_gather
from flux.testing.moe_data import MoeCase

_CHECK_COLUMNS = 512  # of the correctness check: tokens, experts and layout are those of the row
_CALLS = 3  # both buffers of the workspace, and one of them again


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
    hot: every token chooses expert 0 too.
    """

    experts: int = 1
    top_k: int = 1
    ep_size: int = 1
    load_std: float = 0.0
    hot: bool = False

    def local(self, tp: int) -> tuple[int, int, int]:
        """Rows that a rank expects, and N and K of its part of an expert."""
        share = tp // self.ep_size
        rows = self.m * self.top_k // self.ep_size
        if self.op == "moe_layer0":
            return rows, self.n // share, self.k
        return rows, self.n, self.k // share


def problem(op: str, model: str, m: int, ep_size: int = 1, load_std: float = 0.0) -> MoeProblem:
    """The row of a model by name; op is "moe_layer0" or "moe_layer1"."""
    if model not in MODELS:
        raise ValueError(f"bench: model expected to be one of {', '.join(MODELS)}, got {model!r}")
    of = MODELS[model]
    n, k = (of.gates * of.intermediate, of.hidden) if op == "moe_layer0" else (of.hidden, of.intermediate)
    return MoeProblem(op, model, op, m, n, k, of.experts, of.top_k, ep_size, load_std)


def choose_experts(problem: MoeProblem, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """topk_ids [tokens, k] whose experts' loads have about the wanted spread. Without replacement, so a large
    k flattens it: the row notes what came of it.
    """
    experts = problem.experts
    # The same experts are popular on all ranks.
    shape = torch.randn(experts, generator=torch.Generator().manual_seed(7))
    share = (1 / experts + problem.load_std * (shape - shape.mean()) / shape.std(correction=0)).clamp(min=0)
    score = torch.rand(tokens, experts, generator=generator) ** (1 / share.clamp(min=1e-9))
    if problem.hot:
        score[:, 0] = 2
    return score.topk(problem.top_k).indices


def check(problem: MoeProblem, context: Context) -> str:
    """Both layers on integers that carry each rank's mark, several calls in a row."""
    p, results = context.world_size, []
    columns = min(_CHECK_COLUMNS, problem.n, problem.k)
    case = MoeCase(
        (problem.m // p,) * p,
        columns,
        columns,
        problem.experts,
        problem.top_k,
        problem.ep_size,
        context.dtype,
        "one expert" if problem.hot else "skewed" if problem.load_std else "even",
    )
    for seed in range(_CALLS):
        case, rank, device = replace(case, seed=seed), context.rank, context.device
        ids, weights = case.routing(rank)
        routing = flux.moe.route(
            ids.to(device), weights.to(device), case.num_experts, group=context.group, ep_size=case.ep_size
        )
        if problem.op == "moe_layer0":
            want = case.layer0(rank)
            got = flux.moe.ag_scatter_gemm(case.x(rank).to(device), case.w1(rank).to(device), routing)
        else:
            want = case.layer1(rank)
            hidden = case.hidden_rows(rank, routing.rows.shape[0]).to(device)
            got = flux.moe.gemm_gather_rs(hidden, case.w2(rank).to(device), routing)
        results.append(compare(got[: len(want)].cpu(), want))
    flux.check(context.group)
    return next((r for r in results if r != "exact"), "exact")


def prepare(problem: MoeProblem, context: Context) -> Prepared:
    group, p = context.group, context.world_size
    assert group is not None
    tokens = problem.m // p
    _, n, k = problem.local(p)
    generator = torch.Generator().manual_seed(1234 + context.rank)
    ids = choose_experts(problem, tokens, generator).to(context.device)
    # Normal x 0.1, as everywhere: zeros and small integers would draw less power.
    random = torch.Generator(context.device).manual_seed(1234 + context.rank)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=random, device=context.device, dtype=context.dtype)
        return made.mul_(0.1)

    weights = torch.full(ids.shape, 1 / problem.top_k, device=context.device)
    routing = flux.moe.route(ids, weights, problem.experts, group=group, ep_size=problem.ep_size)
    weight = normal(problem.experts // problem.ep_size, n, k)
    make = _layer0 if problem.op == "moe_layer0" else _layer1
    x = normal(tokens, k) if problem.op == "moe_layer0" else normal(routing.rows.shape[0], k)
    candidates = [
        *make(x, weight, routing, context),
        Candidate(
            "flux.route",
            "comm",
            lambda: flux.moe.route(ids, weights, problem.experts, group=group, ep_size=problem.ep_size),
        ),
    ]
    loads = torch.bincount(ids.flatten().cpu(), minlength=problem.experts) / ids.shape[0]
    notes = [f"std of the experts' shares of this rank's tokens: {float(loads.std(correction=0)):.3f}"]
    return Prepared(candidates, None, notes)


def _layer0(
    x: torch.Tensor, weight: torch.Tensor, routing: flux.moe.Routing, context: Context
) -> list[Candidate]:
    comm, collect = "NCCL" if context.cuda else "gloo", torch_all_gather()
    gathered = x.new_empty(x.shape[0] * context.world_size, x.shape[1])
    rows = reference.tokens_of_rows(routing.rows, routing.incoming)
    permuted = gathered.index_select(0, rows)

    def gather() -> None:
        collect(gathered, x, group=context.group)

    def serial() -> None:
        gather()
        flux.grouped_gemm(gathered, weight, routing.offsets, rows=rows)

    return [
        Candidate("flux", "flux", lambda: flux.moe.ag_scatter_gemm(x, weight, routing)),
        Candidate("grouped_mm", "gemm", lambda: flux.grouped_gemm(permuted, weight, routing.offsets)),
        Candidate(comm, "comm", gather),
        Candidate(f"{comm}+grouped_mm", "serial", serial),
    ]


def _layer1(
    x: torch.Tensor, weight: torch.Tensor, routing: flux.moe.Routing, context: Context
) -> list[Candidate]:
    comm, scatter = "NCCL" if context.cuda else "gloo", reduce_scatter()
    partial = x.new_zeros(routing.max_tokens * context.world_size, weight.shape[1])
    total = x.new_empty(routing.max_tokens, weight.shape[1])

    def serial() -> None:
        product = flux.grouped_gemm(x, weight, routing.offsets)
        summed = weighted_sum(product, routing.positions, routing.weights)
        scatter(total, summed.to(x.dtype).view(partial.shape), group=context.group)

    return [
        Candidate("flux", "flux", lambda: flux.moe.gemm_gather_rs(x, weight, routing)),
        Candidate("grouped_mm", "gemm", lambda: flux.grouped_gemm(x, weight, routing.offsets)),
        Candidate(comm, "comm", lambda: scatter(total, partial, group=context.group)),
        Candidate(f"grouped_mm+{comm}", "serial", serial),
    ]
