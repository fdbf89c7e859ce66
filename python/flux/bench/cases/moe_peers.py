"""The baselines of mixtures of experts: NCCL, torch's grouped GEMM, a one-pass top-k sum, in sequence.

The peers know how many rows there are: in a model they would have to ask the GPU, or compute on padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import flux
from flux import peers as packages
from flux.bench.cases.common import Candidate, Context, collectives, compare, first_wrong, installed
from flux.comm.group import reduce_scatter
from flux.moe import reference
from flux.moe.combine import weighted_sum
from flux.ops.all_gather import torch_all_gather

grouped_mm: Any = torch._grouped_mm
Tensor = torch.Tensor


def route(ids: Tensor, weights: Tensor, experts: int, context: Context) -> Candidate:
    """The minimum that an unfused pipeline needs: all choices, sorted by expert, and the row of each."""
    group, collect = context.group, torch_all_gather()
    p = context.world_size
    choices, factors = (
        ids.new_empty(p * ids.shape[0], ids.shape[1]),
        weights.new_empty(p * ids.shape[0], ids.shape[1]),
    )

    def sort() -> None:
        collect(choices, ids, group=group)
        collect(factors, weights, group=group)
        flat = choices.view(-1).long()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.long, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(order.numel(), device=ids.device)

    return Candidate(f"{collectives(context)}+sort", "serial", sort)


def check_routing(routing: flux.moe.Routing, ids: Tensor, context: Context) -> str:
    """Whether each choice of one of this rank's experts has a row of that expert, with its token in it."""
    everybody = [torch.empty_like(ids) for _ in range(context.world_size)]
    dist.all_gather(everybody, ids, group=context.group)
    chosen = torch.stack(everybody).long()
    experts = routing.num_experts // routing.ep_size
    slice_of = context.rank // (context.world_size // routing.ep_size)
    local = chosen - slice_of * experts
    here = (local >= 0) & (local < experts)
    offsets, positions = routing.offsets.long(), routing.positions.long()
    if not torch.equal(positions >= 0, here):
        return "the choices with a row are not those of this rank's experts"
    row, expert = positions[here], local[here]
    counts = torch.bincount(expert, minlength=experts)
    if not torch.equal(offsets.diff(), counts):
        return f"rows of the experts: {offsets.diff().tolist()}, expected {counts.tolist()}"
    if not bool(((row >= offsets[expert]) & (row < offsets[expert + 1])).all()):
        return "a choice has a row of another expert"
    if int(torch.bincount(row, minlength=1).max()) > 1:
        return "two choices share a row"
    token = torch.arange(chosen.shape[0] * chosen.shape[1], device=ids.device).view(*chosen.shape[:2], 1)
    there = reference.tokens_of_rows(routing.rows, routing.incoming)[row]
    return "exact" if torch.equal(there, token.expand_as(chosen)[here]) else "a row holds another token"


def layer0(
    x: Tensor, weight: Tensor, routing: flux.moe.Routing, context: Context
) -> tuple[list[Candidate], list[str]]:
    """The peers of layer 0, and notes on those that cannot run."""
    comm, collect = collectives(context), torch_all_gather()
    gathered = x.new_empty(x.shape[0] * context.world_size, x.shape[1])
    rows = used_rows(routing)
    permuted = gathered.index_select(0, rows)
    ends, transposed = routing.offsets[1:], weight.transpose(1, 2)
    candidates = [
        Candidate("torch grouped_mm", "gemm", lambda: grouped_mm(permuted, transposed, offs=ends)),
        Candidate("flux.grouped_gemm", "gemm", lambda: flux.grouped_gemm(permuted, weight, routing.offsets)),
        Candidate(comm, "comm", lambda: collect(gathered, x, group=context.group)),
    ]

    def serial() -> Tensor:
        collect(gathered, x, group=context.group)
        result: Tensor = grouped_mm(gathered.index_select(0, rows), transposed, offs=ends)
        return result

    candidates.append(Candidate(f"{comm}+grouped_mm", "serial", serial))
    if routing.ep_size == context.world_size:
        parts = Parts.of(routing, context)

        def dispatched(name: str, dispatch: Callable[[Tensor], Tensor]) -> Candidate:
            def call() -> Tensor:
                rows = dispatch(x).index_select(0, parts.rows)
                result: Tensor = grouped_mm(rows, transposed, offs=ends)
                return result

            return Candidate(f"{name}+grouped_mm", "peer", call)

        candidates.append(dispatched("all-to-all", parts.dispatch))
        return _with_packages(
            candidates, lambda name: dispatched(name, parts.opened(name, x, context)[0]), context
        )
    return candidates, []


def layer1(
    x: Tensor, weight: Tensor, routing: flux.moe.Routing, context: Context
) -> tuple[list[Candidate], list[str]]:
    """The peers of layer 1, and notes on those that cannot run."""
    comm, scatter = collectives(context), reduce_scatter()
    partial = x.new_zeros(routing.max_tokens * context.world_size, weight.shape[1])
    total = x.new_empty(routing.max_tokens, weight.shape[1])
    used = x[: used_rows(routing).numel()]
    ends, transposed = routing.offsets[1:], weight.transpose(1, 2)

    def product() -> Tensor:
        result: Tensor = grouped_mm(used, transposed, offs=ends)
        return result

    def serial() -> Tensor:
        summed = weighted_sum(product(), routing.positions, routing.weights)
        scatter(total, summed.to(x.dtype).view(partial.shape), group=context.group)
        return total

    candidates = [
        Candidate("torch grouped_mm", "gemm", product),
        Candidate("flux.grouped_gemm", "gemm", lambda: flux.grouped_gemm(used, weight, routing.offsets)),
        Candidate(comm, "comm", lambda: scatter(total, partial, group=context.group)),
        Candidate(f"grouped_mm+{comm}", "serial", serial),
    ]
    if routing.ep_size == context.world_size:
        parts = Parts.of(routing, context)

        def combined(name: str, combine: Callable[[Tensor], Tensor]) -> Candidate:
            def call() -> Tensor:
                summed = weighted_sum(product(), parts.positions, parts.weights)
                return combine(summed[0].to(x.dtype))

            return Candidate(f"grouped_mm+{name}", "peer", call)

        candidates.append(combined("all-to-all", parts.combine))
        return _with_packages(
            candidates, lambda name: combined(name, parts.opened(name, total, context)[1]), context
        )
    return candidates, []


def _with_packages(
    candidates: list[Candidate], make: Callable[[str], Candidate], context: Context
) -> tuple[list[Candidate], list[str]]:
    more, notes = installed(packages.EXCHANGES, make, context)
    return candidates + more, notes


@dataclass(frozen=True)
class Parts:
    """Expert parallelism by all-to-all: each token goes once to every rank that holds an expert of it.

    sent: own tokens in the order in which they leave. rows: of what arrives, the row of the grouped GEMM's
    input. positions, weights [1, arriving, k]: of the grouped GEMM's rows, for each token that arrived.
    returned [1, tokens, p]: where the partial sums of an own token come back to, -1 for none. ones: as large.
    """

    group: Any
    sent: Tensor
    sizes: tuple[list[int], list[int]]
    rows: Tensor
    positions: Tensor
    weights: Tensor
    returned: Tensor
    ones: Tensor

    @classmethod
    def of(cls, routing: flux.moe.Routing, context: Context) -> Parts:
        group, p, limit = context.group, context.world_size, routing.max_tokens
        tokens, rows = torch.unique(used_rows(routing), return_inverse=True)
        arriving = torch.bincount(tokens // limit, minlength=p)
        leaving = torch.empty_like(arriving)
        dist.all_to_all_single(leaving, arriving, group=group)
        sizes = (leaving.tolist(), arriving.tolist())
        sent = tokens.new_empty(sum(sizes[0]))
        dist.all_to_all_single(sent, tokens % limit, *sizes, group=group)
        returned = torch.full((1, limit, p), -1, dtype=torch.int32, device=sent.device)
        rank_of = torch.repeat_interleave(torch.arange(p, device=sent.device), leaving)
        returned[0, sent, rank_of] = torch.arange(len(sent), dtype=torch.int32, device=sent.device)
        k = routing.positions.shape[-1]
        positions = routing.positions.reshape(-1, k)[tokens][None].contiguous()
        weights = routing.weights.reshape(-1, k)[tokens][None].contiguous()
        return cls(
            group,
            sent,
            sizes,
            rows,
            positions,
            weights,
            returned,
            torch.ones_like(returned, dtype=torch.float32),
        )

    def opened(self, name: str, x: Tensor, context: Context) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Dispatch and combine of a package, for rows like those of x, which have given the right results."""
        goes = self.returned[0, : x.shape[0]] >= 0
        dispatch, combine = (packages.EXCHANGES | packages.PAIRED)[name][1](context, goes, x.shape[1])
        marks = torch.arange(x.numel(), device=x.device).view(x.shape) % 31 - 15
        mine = (marks + context.rank).to(x.dtype)
        arrived = dispatch(mine)
        home = self.combine(self.dispatch(mine))[: x.shape[0]]
        said = first_wrong([compare(arrived, self.dispatch(mine)), compare(combine(arrived), home)])
        if said != "exact":
            raise RuntimeError(f"wrong: {said}")
        return dispatch, combine

    def dispatch(self, x: Tensor) -> Tensor:
        """x [tokens, K] of this rank -> [arriving, K]"""
        arrived = x.new_empty(len(self.positions[0]), x.shape[1])
        leaving, arriving = self.sizes
        dist.all_to_all_single(arrived, x.index_select(0, self.sent), arriving, leaving, group=self.group)
        return arrived

    def combine(self, summed: Tensor) -> Tensor:
        """[arriving, N], the partial sums -> [tokens, N], their sums at home."""
        home = summed.new_empty(len(self.sent), summed.shape[1])
        leaving, arriving = self.sizes
        dist.all_to_all_single(home, summed, leaving, arriving, group=self.group)
        return weighted_sum(home, self.returned, self.ones)[0].to(home.dtype)


def used_rows(routing: flux.moe.Routing) -> Tensor:
    """source * max_tokens + token of each valid row."""
    return reference.tokens_of_rows(routing.rows, routing.incoming)[: int(routing.offsets[-1])]
