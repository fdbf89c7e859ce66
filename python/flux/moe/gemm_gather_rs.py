"""Layer 1 of a mixture of experts: a grouped GEMM in chunks of columns. While the next chunk is computed, the
rows of the finished chunk are weighted, summed over the experts of a token, and sent to the token's owner
(COMET, arXiv 2502.19811, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux._memory import readable, wide_type
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch
from flux.calls.schemas import library
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import process_group, reduce_scatter
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.workspace import Workspace
from flux.fp8 import scales as fp8
from flux.fp8.scales import Scales
from flux.fp8.wide_product import wide_expert
from flux.moe import reference, two_level
from flux.moe.combine import weighted_sum
from flux.moe.known_layers import ARRAYS, known_layer, layer_recipe
from flux.moe.routing import (
    Routing,
    check_experts,
    check_routing,
    layout_of,
    may_skip_layer_dispatch,
    plan_of,
    same_routing,
)
from flux.ops import grouped_gemm
from flux.ops.ways import int8_sum
from flux.plan.moe import BLOCK_M, BLOCK_N, MoePlan

_KNOWN = repeat.operator()
_OP = "moe.gemm_gather_rs"


def gemm_gather_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
    wire: Literal["int8"] | None = None,
) -> torch.Tensor:
    """Each token's rows · weight[e]ᵀ, times its routing weights, summed over its experts and over ranks; each
    rank gets its own tokens. A collective of the routing's group.

    Products are accumulated in fp32 and rounded to the result's dtype, the rows of a token summed in fp32.
    What ranks send each other is rounded; the sum over ranks is taken in fp32, in rank order, and rounded
    once. Results are bitwise repeatable.

    Args:
        x: [rows, I], as flux.moe.ag_scatter_gemm returns it; bfloat16, float16, float32 or float64; with
            scales fp8, as in flux.gemm.
        weight: [E / ep_size, N, I], the experts of this rank's slice, of each its part of the columns; dtype
            and device of x, with scales float8_e4m3fn.
        routing: of flux.moe.route, the one that x was made with.
        scale_x: of x: one entry, [rows, 1] or [rows, I / 128], as in flux.gemm.
        scale_w: of the weights, as in flux.grouped_gemm: one entry, [E / ep_size], [E / ep_size, N], or with
            block scales [E / ep_size, N / 128, I / 128].
        out_dtype, accumulate: as in flux.gemm, the same on all ranks.
        wire: "int8": what ranks send each other is rounded as in flux.reduce_scatter; does not run fused.
            Gradients travel in the result's dtype.

    Returns:
        [tokens, N] in x's dtype, with scales in `out_dtype`, a fresh tensor.

    Raises:
        ValueError, CommTimeoutError, RuntimeError: as flux.moe.ag_scatter_gemm.

    Example::

        from flux.moe import ag_scatter_gemm, gemm_gather_rs, route

        topk_ids = torch.tensor([[0, 3], [1, 2], [2, 0]])  # 3 tokens choose 2 of 4 experts
        topk_weights = torch.full((3, 2), 0.5)
        routing = route(topk_ids, topk_weights, num_experts=4)
        x, w1, w2 = torch.randn(3, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 16)
        rows = ag_scatter_gemm(x, w1, routing, activation="swiglu")
        assert gemm_gather_rs(rows, w2, routing).shape == (3, 64)
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if wire is None and (done := known_layer(_KNOWN, x, weight, routing, None, scaling)) is not None:
        return done
    direct = may_skip_layer_dispatch(x, weight, routing, *scaling[:2])
    if not direct or scaling or wire is not None:
        of_scales = fp8.named(scale_x, scale_w, out_dtype, accumulate)
        argument_types.check(_OP, x=x, weight=weight, wire=wire, **of_scales)
        check_routing(_OP, routing, x.device)
    if scaling:
        tensors = {"x": x, "weight": weight, "routing": routing.weights}
        fp8.no_backward(_OP, **tensors, scale_x=scale_x, scale_w=scale_w)
    check_experts(_OP, routing, weight)
    if x.dim() == 2 and x.shape[0] != routing.rows.shape[0]:
        what = f"{routing.rows.shape[0]} rows, as ag_scatter_gemm returns them"
        checks.fail(_OP, "x", what, f"shape {list(x.shape)}")
    sizes = (routing.num_experts, routing.ep_size, routing.max_tokens, routing.num_tokens)
    fn = _eager if direct else _op
    arguments = (x, weight, routing[:11], *sizes, routing.group_name)
    if wire is not None:  # after the scales, of which all are given then
        scaling = (*(scaling or (None, None, None, "promoted")), wire)
    return cast(torch.Tensor, dispatch(routing.group_name, x.device, fn, None, arguments, None, scaling))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    num_tokens: int,
    group_name: str,
    *rest: Any,
) -> torch.Tensor:
    scales, wire = fp8.given(_OP, *rest[:4]), rest[4] if len(rest) > 4 else None
    columns = grouped_gemm.expert_weight(_OP, x, weight, None, scales)
    int8_sum.check(_OP, wire, fp8.result_dtype(x, scales))
    return x.new_empty(num_tokens, columns, dtype=fp8.result_dtype(x, scales))


def _eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    num_tokens: int,
    group_name: str,
    *rest: Any,
) -> torch.Tensor:
    told = Routing._make([*routing, num_experts, ep_size, max_tokens, num_tokens, group_name])
    scales, wire = fp8.given(_OP, *rest[:4]), rest[4] if len(rest) > 4 else None
    if wire is not None:
        return _over_wire(x, weight, told, scales, wire)
    if (done := known_layer(_KNOWN, x, weight, told, None, scales or (), below=True)) is not None:
        return done
    grouped_gemm.expert_weight(_OP, x, weight, None, scales)
    recipe = layer_recipe(_KNOWN, x, weight, told, None, scales)
    if scales is not None:
        scales = scales.canonical_experts(*weight.shape)
    group = process_group(group_name)
    if group.size() == 1:
        return in_parts(x, weight, told, scales, recipe=recipe)
    return registry.in_turn(group, x.device, _among_ranks, x, weight, told, group, scales, recipe)


def _among_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    group: ProcessGroup,
    scales: Scales | None,
    recipe: repeat.Recipe,
) -> torch.Tensor:
    n = weight.shape[1]
    workspace = registry.get(group, x.device, _OP)
    if isinstance(workspace, NodesWorkspace):
        return _on_nodes(x, weight, routing, workspace, scales)
    layout = layout_of(routing[:11], routing.num_experts, routing.ep_size, routing.max_tokens, group)
    plan = plan_of(workspace, _OP, weight, routing, x.dtype, scales)
    with workspace.calling(plan, same_routing(routing)) as epoch:
        if not plan.by_flux:
            return in_parts(x, weight, routing, scales)
        if isinstance(workspace, CudaWorkspace):
            return launch(x, weight, routing, plan, workspace, scales, recipe)
        out = x.new_empty(routing.num_tokens, n, dtype=plan.result_dtype)
        shared = cast(CpuWorkspace, workspace)
        _Exchange(shared, plan, layout, routing, epoch, x, weight, out, scales).run()
        return out


def _over_wire(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, scales: Scales | None, wire: str
) -> torch.Tensor:
    grouped_gemm.expert_weight(_OP, x, weight, None, scales)
    int8_sum.check(_OP, wire, fp8.result_dtype(x, scales))
    if scales is not None:
        scales = scales.canonical_experts(*weight.shape)
    group = process_group(routing.group_name)
    if group.size() == 1:
        return in_parts(x, weight, routing, scales)

    def among_ranks() -> torch.Tensor:
        workspace = registry.get(group, x.device, _OP)
        plan = plan_of(workspace, _OP, weight, routing, x.dtype, scales)
        plan = int8_sum.planned(plan, workspace, routing.max_tokens, weight.shape[1])
        with workspace.calling(plan, {**same_routing(routing), **int8_sum.same(wire)}):
            return in_parts(x, weight, routing, scales, (workspace, plan))

    return registry.in_turn(group, x.device, among_ranks)


def _on_nodes(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    workspace: NodesWorkspace,
    scales: Scales | None,
) -> torch.Tensor:
    """The layer on several nodes: inside each, then sums of nodes cross to the tokens' owners."""
    plan = plan_of(workspace, _OP, weight, routing, x.dtype, scales)
    with workspace.calling(plan, same_routing(routing)):
        if not two_level.serves(workspace, routing.ep_size):
            return in_parts(x, weight, routing, scales)
        sizes = (routing.num_experts, routing.ep_size, routing.max_tokens)
        of = two_level.OfGroup(workspace, routing[:11], sizes)
        if not two_level.runs_fused(workspace, _OP, weight, of, plan):
            return two_level.mark_lost(of, in_parts(x, weight, routing, scales))
        workspace.inside("the layer inside the node")
        made = _eager(x, weight, *of.arguments, of.on_node.size, of.name, *(scales or ()))
        return two_level.bring_sums(workspace, of, made, routing.num_tokens)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    plan: MoePlan,
    workspace: CudaWorkspace,
    scales: Scales | None = None,
    recipe: repeat.Recipe | None = None,
) -> torch.Tensor:
    """Launches the kernel. recipe: of the call, if it is to be known (flux.comm.repeat)."""
    rows, n, dtype = x.shape[0], weight.shape[1], plan.result_dtype
    # Allocations may run out of memory, so they come before the call is opened.
    operands = (readable(x), grouped_gemm.readable_weight(weight, None, scales))
    products, out = x.new_empty(rows, n, dtype=dtype), x.new_empty(routing.num_tokens, n, dtype=dtype)
    sizes = (routing.ep_size, routing.num_experts, products, out)
    with workspace.enter(plan) as (symm_buffer, _):
        options = (symm_buffer, plan.tile, plan.chunks[0][1], plan.communication_ctas, 0)
        arguments = (*operands, routing[:10], routing[10], *sizes, *options)
        scaled = fp8.for_kernel(x, scales)
        enqueue = functools.partial(_kernel, *arguments, **scaled)
        enqueue()
    read = {"x": operands[0], "weight": operands[1], **scaled}
    if recipe is not None and recipe.in_place(**read):
        written = [recipe.allocates(products), recipe.returns(out)]
        used = recipe.numbers("x", "weight", *ARRAYS, "weights") + written
        workspace.remember(recipe, enqueue, [used + recipe.numbers("scale_x", "scale_w")])
    return out


def in_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    scales: Scales | None = None,
    wire: tuple[Workspace, MoePlan] | None = None,
    recipe: repeat.Recipe | None = None,
) -> torch.Tensor:
    """Grouped GEMM, weighted sum, then reduce-scatter; without synchronising with the GPU.

    Args:
        wire: the workspace and the plan of sums that travel as int8.
        recipe: of the call in a group of one rank, if it is to be known (flux.comm.repeat).
    """
    group, dtype = process_group(routing.group_name), fp8.result_dtype(x, scales)
    limit, n = routing.max_tokens, weight.shape[1]
    if limit == 0 or n == 0:
        return x.new_zeros(routing.num_tokens, n, dtype=dtype)
    product = grouped_gemm.call(x, weight, routing.offsets, scales, recipe)
    if group.size() == 1:
        own = slice(routing.num_tokens)
        total = weighted_sum(product, routing.positions[0, own], routing.weights[0, own], recipe)
        if recipe is not None and x.is_cuda:
            recipe.returns(total)
            repeat.remember_parts(registry.known_of_one_rank(group), recipe, 2)
        return total.to(dtype)
    partial = weighted_sum(product, routing.positions, routing.weights)
    if wire is not None:
        total = partial.new_empty(limit, n)
        int8_sum.sum_into(total, partial, *wire)
        return total[: routing.num_tokens].to(dtype, copy=True)
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    partial = partial.to(dtype) if x.is_cuda else partial
    total = partial.new_empty(limit, n)
    reduce_scatter()(total, partial.view(-1, n), group=group)
    return total[: routing.num_tokens].to(dtype, copy=True)


class _Exchange:
    """The kernel's work on the CPU: computes, sends and sums one chunk of columns after the other."""

    def __init__(
        self,
        workspace: CpuWorkspace,
        plan: MoePlan,
        layout: Any,
        routing: Routing,
        epoch: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        scales: Scales | None,
    ) -> None:
        self._workspace = workspace
        self._plan = plan
        self._layout = layout
        self._routing = routing
        self._epoch = epoch
        self._x = x
        self._scales = scales
        self._weights = [wide_expert(weight, expert, scales) for expert in range(weight.shape[0])]
        self._wide = wide_type(weight.dtype)
        self._out = out
        self._products = x.new_zeros(layout.max_rows, plan.n, dtype=plan.result_dtype)
        self._received = routing.received.tolist()
        self._offsets = routing.offsets.tolist()
        self._block_rows: int = layout.block_rows(layout.max_tokens)
        self._blocks: int = layout.blocks_of(layout.max_tokens, self._block_rows)

    def run(self) -> None:
        layout, computed = self._layout, 0
        rank = layout.rank
        for chunk, peer, block in _native.core.moe_comm_units(
            layout.world_size, rank, self._blocks, len(self._plan.chunks)
        ):
            if chunk == computed:
                self._compute(chunk)
                computed += 1
            if peer == rank:
                self._sum(chunk, block)
            else:
                self._send(chunk, peer, block)

    def _columns(self, chunk: int) -> slice:
        first, size = self._plan.chunks[chunk]
        return slice(first * BLOCK_N, min((first + size) * BLOCK_N, self._plan.n))

    def _compute(self, chunk: int) -> None:
        """Computes all tiles of a chunk of columns, for all experts."""
        first, size = self._plan.chunks[chunk]
        schedule = (self._routing.tiles.data_ptr(), int(self._routing.num_tiles))
        for expert, m_tile, n_tile in _native.core.moe_tiles(*schedule, size):
            begin = self._offsets[expert] + m_tile * BLOCK_M
            rows = slice(begin, min(begin + BLOCK_M, self._offsets[expert + 1]))
            columns = slice((first + n_tile) * BLOCK_N, (first + n_tile + 1) * BLOCK_N)
            scale = None if self._scales is None else self._scales.x_of(rows)
            tile = self._weights[expert].times(self._x[rows], columns, scale)
            self._products[rows, columns] = tile.to(self._products.dtype)

    def _partial(self, source: int, tokens: torch.Tensor, columns: slice) -> torch.Tensor:
        """This rank's contribution to the results of some tokens of a source."""
        positions, weights = self._routing.positions, self._routing.weights
        return reference.weighted_sum(
            self._products[:, columns], positions[source, tokens], weights[source, tokens]
        )

    def _send(self, chunk: int, peer: int, block: int) -> None:
        """Sums a block of a peer's tokens, writes the sums to the peer's slot, and signals."""
        layout, received = self._layout, self._received[peer]
        if block >= layout.blocks_of(received, self._block_rows):
            return
        rows = slice(block * self._block_rows, min((block + 1) * self._block_rows, received))
        if rows.start < rows.stop:
            # Without expert parallelism, a slot row may belong to a token that no rank needs.
            tokens = self._routing.incoming[peer, rows].long().clamp(min=0)
            columns = self._columns(chunk)
            self._slot(peer, layout.rank)[rows, columns] = self._partial(peer, tokens, columns).to(
                self._plan.result_dtype
            )
        signal = chunk * self._blocks + block
        self._workspace.signal(peer, layout.slot_index(layout.rank, peer), signal, self._epoch)

    def _sum(self, chunk: int, block: int) -> None:
        """Sums the contributions of all ranks to a block of own tokens, in rank order."""
        layout = self._layout
        rank, columns = layout.rank, self._columns(chunk)
        tokens = torch.arange(len(self._out))[block * self._block_rows : (block + 1) * self._block_rows]
        if block > 0 and len(tokens) == 0:
            return
        total = torch.zeros(len(tokens), columns.stop - columns.start, dtype=self._wide)
        for source in range(layout.world_size):
            if source == rank:
                total += self._partial(rank, tokens, columns)
                continue
            slot_rows = self._routing.sent[layout.slice_of(source), tokens].long()
            there = slot_rows >= 0
            # Always wait for the first block: a call must not end before every peer has begun it.
            blocks = {0} if block == 0 else set()
            for needed in sorted(blocks | set((slot_rows[there] // self._block_rows).tolist())):
                self._wait(source, chunk * self._blocks + needed, needed)
            total[there] += self._slot(rank, source)[slot_rows[there], columns].to(total.dtype)
        self._out[tokens, columns] = total.to(self._out.dtype)

    def _wait(self, source: int, signal: int, block: int) -> None:
        slot = self._layout.slot_index(source, self._layout.rank)
        self._workspace.wait(_OP, source, slot, signal, block)

    def _slot(self, owner: int, source: int) -> torch.Tensor:
        """The slot of a source on an owner [max_tokens, n]."""
        limit, n, dtype = self._layout.max_tokens, self._plan.n, self._plan.result_dtype
        offset = self._layout.slot_index(source, owner) * limit * n * dtype.itemsize
        return self._workspace.slot(owner, self._epoch, offset, limit * n, dtype).view(limit, n)


for _device in ("CPU", "CUDA"):
    library.impl("moe_gemm_gather_rs", _eager, _device)
torch.library.register_fake("flux::moe_gemm_gather_rs", _fake, lib=library)

_op: Any = torch.ops.flux.moe_gemm_gather_rs.default
_kernel: Any = torch.ops.flux._moe_gemm_gather_rs.default
