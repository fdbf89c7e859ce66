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
    scaling = front.scaling(scale_x, scale_w, out_dtype, accumulate, x)
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


class _Exchange:
    """The kernel's work on the CPU: computes, sends and sums one chunk of columns after the other."""

    def __init__(self, workspace: CpuWorkspace, plan: MoePlan, call: Layer) -> None:
        self._workspace, self._layout = workspace, layout_of(call.routing)
        self._slot = partial(slot_of, workspace, self._layout, plan.n, plan.result_dtype)
        self._plan, self._call, self._routing = plan, call, call.routing
        self._weights, self._wide = call.wide_weights(), wide_type(call.weight.dtype)
        self._out = call.x.new_empty(call.routing.num_tokens, plan.n, dtype=plan.result_dtype)
        self._products = call.x.new_zeros(self._layout.max_rows, plan.n, dtype=plan.result_dtype)
        self._received = call.routing.received.tolist()
        self._block_rows: int = self._layout.block_rows(self._layout.max_tokens)
        self._blocks: int = self._layout.blocks_of(self._layout.max_tokens, self._block_rows)

    def run(self) -> Tensor:
        computed, rank = 0, self._layout.rank
        for chunk, peer, block in _native.core.moe_comm_units(
            self._layout.world_size, rank, self._blocks, len(self._plan.columns)
        ):
            if chunk == computed:
                self._compute(chunk)
                computed += 1
            if peer == rank:
                self._sum(chunk, block)
            else:
                self._send(chunk, peer, block)
        return self._out

    def _columns(self, chunk: int) -> slice:
        first, size = self._plan.columns[chunk]
        return slice(first * BLOCK_N, min((first + size) * BLOCK_N, self._plan.n))

    def _compute(self, chunk: int) -> None:
        first, size = self._plan.columns[chunk]
        x, scales, offsets = self._call.x, self._call.scales, self._routing.offsets.tolist()
        schedule = (self._routing.tiles.data_ptr(), int(self._routing.num_tiles))
        for expert, m_tile, n_tile in _native.core.moe_tiles(*schedule, size):
            begin = offsets[expert] + m_tile * BLOCK_M
            rows = slice(begin, min(begin + BLOCK_M, offsets[expert + 1]))
            columns = slice((first + n_tile) * BLOCK_N, (first + n_tile + 1) * BLOCK_N)
            scale = None if scales is None else scales.x_of(rows)
            tile = self._weights[expert].times(x[rows], columns, scale)
            self._products[rows, columns] = tile.to(self._products.dtype)

    def _partial(self, source: int, tokens: Tensor, columns: slice) -> Tensor:
        """This rank's contribution to the results of some tokens of a source."""
        positions, weights = self._routing.positions[source, tokens], self._routing.weights[source, tokens]
        return reference.weighted_sum(self._products[:, columns], positions, weights)

    def _send(self, chunk: int, peer: int, block: int) -> None:
        """Sums a block of a peer's tokens, writes the sums to the peer's slot, and signals."""
        received = self._received[peer]
        if block >= self._layout.blocks_of(received, self._block_rows):
            return
        rows = slice(block * self._block_rows, min((block + 1) * self._block_rows, received))
        if rows.start < rows.stop:
            # Without expert parallelism, a slot row may belong to a token that no rank needs.
            tokens = self._routing.incoming[peer, rows].long().clamp(min=0)
            columns, slot = self._columns(chunk), self._slot(peer, self._layout.rank)
            slot[rows, columns] = self._partial(peer, tokens, columns).to(slot.dtype)
        self._workspace.signal(peer, chunk * self._blocks + block)

    def _sum(self, chunk: int, block: int) -> None:
        """Sums the contributions of all ranks to a block of own tokens, in rank order."""
        rank, columns = self._layout.rank, self._columns(chunk)
        tokens = torch.arange(len(self._out))[block * self._block_rows : (block + 1) * self._block_rows]
        if block > 0 and len(tokens) == 0:
            return
        total = torch.zeros(len(tokens), columns.stop - columns.start, dtype=self._wide)
        for source in range(self._layout.world_size):
            if source == rank:
                total += self._partial(rank, tokens, columns)
                continue
            slot_rows = self._routing.sent[self._layout.slice_of(source), tokens].long()
            there = slot_rows >= 0
            # Always wait for the first block: a call must not end before every peer has begun it.
            blocks = {0} if block == 0 else set()
            for needed in sorted(blocks | set((slot_rows[there] // self._block_rows).tolist())):
                self._workspace.wait(source, chunk * self._blocks + needed, needed)
            total[there] += self._slot(rank, source)[slot_rows[there], columns].to(total.dtype)
        self._out[tokens, columns] = total.to(self._out.dtype)


_layer = Operator(
    _OP,
    False,
    {
        "alone": lambda workspace, plan, call, recipe: in_parts(call, recipe=recipe),
        "torch": lambda workspace, plan, call, *_: in_parts(call, (workspace, plan) if call.wire else None),
        "kernel": _by_kernel,
        "protocol": lambda workspace, plan, call, _: _Exchange(workspace, plan, call).run(),
        "nodes": _on_nodes,
    },
)
_kernel: Any = torch.ops.flux._moe_gemm_gather_rs.default
