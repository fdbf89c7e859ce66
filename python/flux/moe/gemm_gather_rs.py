"""Layer 1 of experts: a chunk's sums travel while the next is computed (arXiv 2502.19811, section 3)."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from flux import _native
from flux._memory import wide_type
from flux.calls import front
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import reduce_scatter
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.repeat import Recipe
from flux.comm.workspace import Workspace
from flux.moe import reference, two_level
from flux.moe.layer import Layer, Operator, below, enter, known, launch, slot_of
from flux.moe.routing import Routing, layout_of
from flux.moe.rows import weighted_sum
from flux.ops import grouped_gemm
from flux.ops.ways import int8_sum
from flux.plan.moe import BLOCK_M, BLOCK_N, MoePlan

Tensor = torch.Tensor
_OP = "moe.gemm_gather_rs"


def gemm_gather_rs(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
    wire: Literal["int8"] | None = None,
) -> Tensor:
    """Each token's rows · weight[e]ᵀ, times its routing weights, summed over its experts and over ranks; each
    rank gets its own tokens. A collective of the routing's group.

    Products are accumulated in fp32 and rounded to the result's dtype, the rows of a token summed in fp32.
    What ranks send each other is rounded; the sum over ranks is taken in fp32, in rank order, and rounded
    once. Results are bitwise repeatable.

    Args:
        x: [rows, I], as flux.moe.ag_scatter_gemm returns it; bfloat16, float16, float32 or float64; with
            scales float8_e4m3fn or float8_e5m2.
        weight: [E / ep_size, N, I], the experts of this rank's slice, of each its part of the columns; dtype
            and device of x, with scales float8_e4m3fn.
        routing: of flux.moe.route, the one that x was made with.
        scale_x: of x: one entry, [rows, 1] or [rows, I / 128].
        scale_w: of the weights: one entry, [E / ep_size], [E / ep_size, N], or with block scales
            [E / ep_size, N / 128, I / 128].
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32; the same on all ranks.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast"), on all ranks.
        wire: "int8": contributions travel as int8 with one scale for each 128 elements, half the bytes; does
            not run fused. Gradients travel in the result's dtype.

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
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if wire is None and (done := known(_layer.number, x, weight, routing, None, scaling)) is not None:
        return done
    return enter(_layer, Layer(x, weight, routing, wire=wire), scaling)


def _by_kernel(workspace: CudaWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    routing, n, dtype = call.routing, call.columns, plan.result_dtype
    products = call.x.new_empty(call.x.shape[0], n, dtype=dtype)
    out = call.x.new_empty(routing.num_tokens, n, dtype=dtype)
    given = (routing.weights, routing.ep_size, routing.num_experts, products, out)
    how = (plan.tile, plan.columns[0][1], plan.communication_ctas, 0)
    return launch(_kernel, workspace, plan, call, recipe, given, *how)


def in_parts(
    call: Layer, wire: tuple[Workspace, MoePlan] | None = None, recipe: Recipe | None = None
) -> Tensor:
    """Without synchronising with the GPU. wire: of int8 sums. recipe: of a group of one rank."""
    x, routing, group, dtype, n = call.x, call.routing, call.group, call.dtype, call.columns
    limit, own = routing.max_tokens, slice(routing.num_tokens)
    if limit == 0 or n == 0:
        return x.new_zeros(routing.num_tokens, n, dtype=dtype)
    grouped = grouped_gemm.Grouped(x, call.weight, routing.offsets, scales=call.scales)
    product = grouped_gemm.below(grouped, recipe)
    if group.size() == 1:
        total = weighted_sum(product, routing.positions[0, own], routing.weights[0, own], recipe)
        if recipe is not None and x.is_cuda and call.wire is None:
            recipe.returns(total)
            repeat.remember_parts(registry.known_of_one_rank(group), recipe, 2)
        return total.to(dtype)
    partial = weighted_sum(product, routing.positions, routing.weights)
    # On CPU, gloo is slow in any dtype, so summing in fp32 costs nothing.
    partial = partial.to(dtype) if x.is_cuda and wire is None else partial
    total = partial.new_empty(limit, n)
    if wire is not None:
        int8_sum.sum_into(total, partial, *wire)
    else:
        reduce_scatter(total, partial.view(-1, n), group=group)
    return total[own].to(dtype, copy=True)


def _on_nodes(workspace: NodesWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    """The layer runs inside each node, then sums of nodes cross to the tokens' owners."""
    if not two_level.serves(workspace, call.routing.ep_size):
        return in_parts(call)
    of = two_level.OfGroup(workspace, plan, call.routing)
    if not of.by_flux:
        return two_level.mark_lost(of, in_parts(call))
    workspace.inside("the layer inside the node")
    made = below(_layer, call._replace(routing=of.routing))
    return two_level.bring_sums(workspace, of, made, call.routing.num_tokens)


def _by_protocol(workspace: CpuWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    """The kernel's work on the CPU: computes, sends and sums one chunk of columns after the other."""
    core, x, scales, routing = _native.core, call.x, call.scales, call.routing
    layout, n, dtype, wide = layout_of(routing), plan.n, plan.result_dtype, wide_type(x.dtype)
    rank = layout.rank
    weights, offsets, received = call.wide_weights(), routing.offsets.tolist(), routing.received.tolist()
    out = x.new_empty(routing.num_tokens, n, dtype=dtype)
    products = x.new_zeros(layout.max_rows, n, dtype=dtype)
    slot = partial(slot_of, workspace, layout, n, dtype)
    block_rows = layout.block_rows(layout.max_tokens)
    blocks = layout.blocks_of(layout.max_tokens, block_rows)

    def compute(first: int, size: int) -> None:
        schedule = (routing.tiles.data_ptr(), int(routing.num_tiles))
        for expert, m_tile, n_tile in core.moe_tiles(*schedule, size):
            begin = offsets[expert] + m_tile * BLOCK_M
            rows = slice(begin, min(begin + BLOCK_M, offsets[expert + 1]))
            columns = slice((first + n_tile) * BLOCK_N, (first + n_tile + 1) * BLOCK_N)
            scale = None if scales is None else scales.x_of(rows)
            products[rows, columns] = weights[expert].times(x[rows], columns, scale).to(dtype)

    def contribution(source: int, tokens: Tensor, columns: slice) -> Tensor:
        """This rank's, to the results of some tokens of a source."""
        positions, scores = routing.positions[source, tokens], routing.weights[source, tokens]
        return reference.weighted_sum(products[:, columns], positions, scores)

    def send(chunk: int, columns: slice, peer: int, block: int) -> None:
        """Sums a block of a peer's tokens, writes the sums to the peer's slot, and signals."""
        if block >= layout.blocks_of(received[peer], block_rows):
            return
        rows = slice(block * block_rows, min((block + 1) * block_rows, received[peer]))
        if rows.start < rows.stop:
            # Without expert parallelism, a slot row may belong to a token that no rank needs.
            tokens = routing.incoming[peer, rows].long().clamp(min=0)
            slot(peer, rank)[rows, columns] = contribution(peer, tokens, columns).to(dtype)
        workspace.signal(peer, chunk * blocks + block)

    def add_up(chunk: int, columns: slice, block: int) -> None:
        """Sums the contributions of all ranks to a block of own tokens, in rank order."""
        tokens = torch.arange(len(out))[block * block_rows : (block + 1) * block_rows]
        if block > 0 and len(tokens) == 0:
            return
        total = torch.zeros(len(tokens), columns.stop - columns.start, dtype=wide)
        for source in range(layout.world_size):
            if source == rank:
                total += contribution(rank, tokens, columns)
                continue
            slot_rows = routing.sent[layout.slice_of(source), tokens].long()
            there = slot_rows >= 0
            # Always wait for the first block: a call must not end before every peer has begun it.
            first = {0} if block == 0 else set()
            for needed in sorted(first | set((slot_rows[there] // block_rows).tolist())):
                workspace.wait(source, chunk * blocks + needed, needed)
            total[there] += slot(rank, source)[slot_rows[there], columns].to(wide)
        out[tokens, columns] = total.to(dtype)

    computed = 0
    for chunk, peer, block in core.moe_comm_units(layout.world_size, rank, blocks, len(plan.columns)):
        first, size = plan.columns[chunk]
        columns = slice(first * BLOCK_N, min((first + size) * BLOCK_N, n))
        if chunk == computed:
            compute(first, size)
            computed += 1
        if peer == rank:
            add_up(chunk, columns, block)
        else:
            send(chunk, columns, peer, block)
    return out


_layer = Operator(
    _OP,
    False,
    {
        "alone": lambda workspace, plan, call, recipe: in_parts(call, recipe=recipe),
        "torch": lambda workspace, plan, call, *_: in_parts(call, (workspace, plan) if call.wire else None),
        "kernel": _by_kernel,
        "protocol": _by_protocol,
        "nodes": _on_nodes,
    },
)
_kernel: Any = torch.ops.flux._moe_gemm_gather_rs.default
