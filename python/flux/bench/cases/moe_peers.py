"""The baselines of mixtures of experts: NCCL, grouped GEMMs, a one-pass top-k sum, in sequence.

The peers know how many rows there are: in a model they would have to ask the GPU, or compute on padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import flux
from flux.bench.cases.common import Candidate, Context, Lineup, collectives, tried
from flux.bench.cases.operands import Operand, Scaled, gathering, moved, values
from flux.comm.group import reduce_scatter
from flux.moe import reference
from flux.moe.rows import weighted_sum
from flux.testing.compare import agree, require

grouped_mm: Any = torch._grouped_mm
Tensor = torch.Tensor
Move = Callable[[Tensor], Tensor]


def route(lineup: Lineup, ids: Tensor, weights: Tensor, experts: int) -> None:
    """The minimum that an unfused pipeline needs: all choices, sorted by expert, and the row of each."""
    all_ids, all_weights = (gathering(own, lineup.context) for own in (ids, weights))

    def sort() -> None:
        flat = values(all_ids()).view(-1).long()
        all_weights()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.long, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(order.numel(), device=ids.device)

    lineup.add_call(f"{collectives(lineup.context)}+sort", "serial", sort)


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
    there = reference.tokens_of_rows(routing.rows, routing.incoming)[row].long()
    return "exact" if torch.equal(there, token.expand_as(chosen)[here]) else "a row holds another token"


class Grouped(NamedTuple):
    """A grouped GEMM with a layer's weights. in_pipelines: its name where others go before or behind it, ""
    where it has no such part.
    """

    name: str
    in_pipelines: str
    product: Callable[[Operand], Tensor]


def grouped_products(lineup: Lineup, x: Operand, weight: Operand, offsets: Tensor) -> list[Grouped]:
    """flux's and torch's; of fp8 operands torch's if it gives the same product of these rows, or a note on
    why it does not.
    """
    ends = offsets[1:]
    if isinstance(x, Tensor) or isinstance(weight, Tensor):
        assert isinstance(weight, Tensor)
        wide, transposed = weight, weight.transpose(1, 2)
        return [
            Grouped("torch grouped_mm", "grouped_mm", lambda rows: grouped_mm(rows, transposed, offs=ends)),
            Grouped("flux.grouped_gemm", "", lambda rows: flux.grouped_gemm(values(rows), wide, offsets)),
        ]
    weights, of_experts = weight.q, weight.scale
    experts, columns, _ = weights.shape

    def by_flux(rows: Operand) -> Tensor:
        assert isinstance(rows, Scaled)
        return flux.grouped_gemm(rows.q, weights, offsets, scale_x=rows.scale, scale_w=of_experts)

    found = [Grouped("flux.grouped_gemm", "flux.grouped_gemm", by_flux)]
    if of_experts.dim() == 3 and of_experts.shape[1] != columns:
        lineup.notes.append("torch._scaled_grouped_mm takes no block scales: it is no peer")
        return found
    of_columns = of_experts.reshape(-1, columns if of_experts.dim() == 3 else 1)
    of_columns = of_columns.expand(experts, columns).contiguous()
    transposed = weights.transpose(1, 2)

    def by_torch(rows: Operand) -> Tensor:
        assert isinstance(rows, Scaled)
        of_rows = rows.scale.reshape(-1)
        if of_rows.numel() == 1:
            of_rows = of_rows.expand(rows.q.shape[0]).contiguous()
        result: Tensor = torch._scaled_grouped_mm(
            rows.q, transposed, of_rows, of_columns, offs=ends, out_dtype=lineup.context.dtype
        )
        return result

    def right() -> bool:
        require(agree({"product": by_torch(x)}, {"product": by_flux(x)}))
        return True

    is_right, error = tried(right, lineup.context)
    if is_right:
        found.append(Grouped("_scaled_grouped_mm", "_scaled_grouped_mm", by_torch))
    else:
        lineup.notes.append(f"torch._scaled_grouped_mm could not run: {error}")
    return found


class Transport(NamedTuple):
    """How tokens reach their experts, and what these make of them comes home.

    before: rows of the first grouped GEMM. behind: given those of the last one, sums of this rank's tokens.
    """

    name: str
    role: str
    before: Callable[[], Operand]
    behind: Move


def collective(
    gather: Callable[[], Operand], total: Tensor, routing: flux.moe.Routing, context: Context
) -> Transport:
    """All-gather and reduce-scatter. gather: returns the tokens of all ranks. total: memory of the sums."""
    scatter, rows = reduce_scatter, used_rows(routing)

    def behind(made: Tensor) -> Tensor:
        summed = weighted_sum(made, routing.positions, routing.weights)
        scatter(total, summed.to(total.dtype).view(-1, total.shape[1]), group=context.group)
        return total

    return Transport(collectives(context), "serial", lambda: _selected(gather(), rows), behind)


def exchange(
    lineup: Lineup, own: Operand, routing: flux.moe.Routing, make: Callable[[Transport], Candidate]
) -> None:
    """The candidate with expert parallelism by all-to-alls."""
    if routing.ep_size < lineup.context.world_size:
        return
    lineup.candidates.append(make(Parts.of(routing, lineup.context).transport(own)))


def layer(lineup: Lineup, first: bool, x: Operand, weight: Operand, routing: flux.moe.Routing) -> None:
    """The peers of a layer: each grouped GEMM alone, with the collective, and with all-to-alls.

    first: tokens travel, and are multiplied; else what is multiplied is summed, and travels.
    """
    context, scatter, limit = lineup.context, reduce_scatter, routing.max_tokens
    total = values(x).new_empty(limit, values(weight).shape[1], dtype=context.dtype)
    own = x if first else total
    if first and isinstance(x, Scaled):
        # NCCL gathers what is contiguous. The scale of a tensor is each rank's own: it goes with every row.
        scale = x.scale.expand(len(x.q), 1) if x.of_all else x.scale
        own = Scaled(x.q, scale.contiguous())
    gather: Callable[[], Operand] = gathering(own, context) if first else lambda: x
    usual = collective(gather, total, routing, context)
    if first:
        lineup.add_call(usual.name, "comm", gather)
        rows = usual.before()
    else:
        sums = total.new_zeros(limit * context.world_size, total.shape[1])
        lineup.add_call(usual.name, "comm", lambda: scatter(total, sums, group=context.group))
        rows = moved(x, lambda every: every[: used_rows(routing).numel()])

    def pipeline(each: Grouped, by: Transport) -> Candidate:
        if first:
            return Candidate(f"{by.name}+{each.in_pipelines}", by.role, lambda: each.product(by.before()))
        return Candidate(f"{each.in_pipelines}+{by.name}", by.role, lambda: by.behind(each.product(rows)))

    for each in grouped_products(lineup, rows, weight, routing.offsets):
        lineup.add_call(each.name, "gemm", partial(each.product, rows))
        if each.in_pipelines:
            lineup.candidates.append(pipeline(each, usual))
            exchange(lineup, own, routing, partial(pipeline, each))


def _selected(x: Operand, rows: Tensor) -> Operand:
    return moved(x, lambda every: every.index_select(0, rows))


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
        ones = torch.ones_like(returned, dtype=torch.float32)
        return cls(group, sent, sizes, rows, positions, weights, returned, ones)

    def transport(self, own: Operand) -> Transport:
        """Of own tokens, whose sums have the type of the rows of the last grouped GEMM."""

        def behind(made: Tensor) -> Tensor:
            return self.combine(weighted_sum(made, self.positions, self.weights)[0].to(made.dtype))

        return Transport(
            "all-to-all", "peer", lambda: _selected(moved(own, self.dispatch), self.rows), behind
        )

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
    return reference.tokens_of_rows(routing.rows, routing.incoming)[: int(routing.offsets[-1])].long()
