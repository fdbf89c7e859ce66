"""Layer 0 of a mixture of experts: tokens are gathered from all ranks, while tiles whose tokens have arrived
are computed, own tokens first (COMET, arXiv 2502.19811, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux._memory import padded, readable
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch
from flux.calls.schemas import library
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import process_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.fp8 import packed_rows
from flux.fp8 import scales as fp8
from flux.fp8.packed_rows import Records
from flux.fp8.scales import Scales
from flux.fp8.wide_product import wide_expert
from flux.moe import two_level
from flux.moe.known_layers import ARRAYS, known_layer, layer_recipe
from flux.moe.routing import (
    Routing,
    check_experts,
    check_routing,
    layout_of,
    may_skip_layer_dispatch,
    plan_of,
    same_routing,
    tokens_of_rows,
)
from flux.ops import grouped_gemm
from flux.ops.all_gather import all_gather
from flux.ops.ways import all_gather as gather
from flux.plan.moe import BLOCK_M, BLOCK_N, MoePlan

_KNOWN = repeat.operator()
_OP = "moe.ag_scatter_gemm"


def ag_scatter_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    activation: str | None = None,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> torch.Tensor:
    """activation(tokens of all ranks, sorted by expert, · weight[e]ᵀ), for the experts of this rank. A
    collective of the routing's group.

    Accumulated in fp32 and rounded once; results are bitwise repeatable.

    Args:
        x: [tokens, H], this rank's, as many as topk_ids had; bfloat16, float16, float32 or float64; with
            scales fp8, as in flux.gemm.
        weight: [E / ep_size, N, H], the experts of this rank's slice, of each its part of the rows; dtype and
            device of x, with scales float8_e4m3fn.
        routing: of flux.moe.route.
        activation: "silu", "gelu", "swiglu" (silu of the first N/2 columns times the last N/2), or None.
        scale_x: of x: one entry, [tokens, 1] or [tokens, H / 128], as in flux.gemm; they travel with tokens.
        scale_w: of the weights, as in flux.grouped_gemm: one entry, [E / ep_size], [E / ep_size, N], or with
            block scales [E / ep_size, N / 128, H / 128].
        out_dtype, accumulate: as in flux.gemm, the same on all ranks.

    Returns:
        [rows, N] (for "swiglu" N/2 columns), a fresh tensor with the largest number of rows that there could
        be. What the rows from routing.offsets[-1] on hold is not specified.

    Raises:
        ValueError: an argument does not fit, or needs a gradient in a call with scales; or, where the ranks
            notice, they made different calls.
        CommTimeoutError, RuntimeError: as flux.ag_gemm.

    Example::

        from flux.moe import ag_scatter_gemm, route

        topk_ids = torch.tensor([[0, 3], [1, 2], [2, 0]])  # 3 tokens choose 2 of 4 experts
        topk_weights = torch.full((3, 2), 0.5)
        routing = route(topk_ids, topk_weights, num_experts=4)
        x, w1 = torch.randn(3, 64), torch.randn(4, 32, 64)  # w1: each expert's 32 columns on this rank
        rows = ag_scatter_gemm(x, w1, routing, activation="swiglu")
        assert rows.shape == (6 * p, 16)
    """
    scaling = fp8.arguments(scale_x, scale_w, out_dtype, accumulate, x)
    if (done := known_layer(_KNOWN, x, weight, routing, activation, scaling)) is not None:
        return done
    direct = may_skip_layer_dispatch(x, weight, routing, *scaling[:2])
    if not direct or scaling:
        of_scales = fp8.named(scale_x, scale_w, out_dtype, accumulate)
        argument_types.check(_OP, x=x, weight=weight, activation=activation, **of_scales)
        check_routing(_OP, routing, x.device)
    if scaling:
        fp8.no_backward(_OP, x=x, weight=weight, scale_x=scale_x, scale_w=scale_w)
    check_experts(_OP, routing, weight)
    if x.dim() == 2 and x.shape[0] != routing.num_tokens:
        checks.fail(_OP, "x", f"{routing.num_tokens} tokens, as topk_ids had", f"shape {list(x.shape)}")
    sizes = (routing.num_experts, routing.ep_size, routing.max_tokens)
    fn = _eager if direct else _op
    arguments = (x, weight, routing[:11], *sizes, activation, routing.group_name)
    return cast(torch.Tensor, dispatch(routing.group_name, x.device, fn, None, arguments, None, scaling))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    activation: str | None,
    group_name: str,
    *scaling: Any,
) -> torch.Tensor:
    scales = fp8.given(_OP, *scaling)
    columns = grouped_gemm.expert_weight(_OP, x, weight, activation, scales)
    return x.new_empty(routing[2].shape[0], columns, dtype=fp8.result_dtype(x, scales))


def _eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    activation: str | None,
    group_name: str,
    *scaling: Any,
) -> torch.Tensor:
    tokens = x.shape[0] if x.dim() > 0 else 0  # is checked below
    told = Routing._make([*routing, num_experts, ep_size, max_tokens, tokens, group_name])
    scales = fp8.given(_OP, *scaling)
    done = known_layer(_KNOWN, x, weight, told, activation, scales or (), below=True)
    if done is not None:
        return done
    columns = grouped_gemm.expert_weight(_OP, x, weight, activation, scales)
    recipe = layer_recipe(_KNOWN, x, weight, told, activation, scales)
    if scales is not None:
        scales = scales.canonical_experts(*weight.shape)
    group = process_group(group_name)
    if group.size() > 1:
        arguments = (x, weight, told, activation, columns, group, scales, recipe)
        return registry.in_turn(group, x.device, _among_ranks, *arguments)
    layout = layout_of(routing, num_experts, ep_size, max_tokens, group)
    if not x.is_cuda:
        out = x.new_zeros(layout.max_rows, columns, dtype=fp8.result_dtype(x, scales))
        tiles = _Tiles(layout, told, weight, activation, out, scales, records_of(x, scales))
        tiles.compute(lambda expert, step: None, {0: packed(x, scales)})
        return out
    return in_parts(x, weight, told, activation, scales)


def _among_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    columns: int,
    group: ProcessGroup,
    scales: Scales | None,
    recipe: repeat.Recipe,
) -> torch.Tensor:
    workspace = registry.get(group, x.device, _OP)
    if isinstance(workspace, NodesWorkspace):
        return _on_nodes(x, weight, routing, activation, workspace, scales)
    layout = layout_of(routing[:11], routing.num_experts, routing.ep_size, routing.max_tokens, group)
    plan = plan_of(workspace, _OP, weight, routing, x.dtype, scales)
    dtype = plan.result_dtype
    with workspace.calling(plan, {"activation": activation, **same_routing(routing)}) as epoch:
        if not plan.by_flux:
            return in_parts(x, weight, routing, activation, scales)
        if isinstance(workspace, CudaWorkspace):
            out = x.new_empty(layout.max_rows, columns, dtype=dtype)
            _launch(x, weight, routing, layout, activation, out, plan, workspace, scales, recipe)
            return out
        out = x.new_zeros(layout.max_rows, columns, dtype=dtype)
        arrivals = _Arrivals(cast(CpuWorkspace, workspace), plan, layout, routing, epoch, packed(x, scales))
        tiles = _Tiles(layout, routing, weight, activation, out, scales, records_of(x, scales))
        tiles.compute(arrivals.wait, arrivals.sources)
        return out


def _on_nodes(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    workspace: NodesWorkspace,
    scales: Scales | None,
) -> torch.Tensor:
    """The layer on several nodes: tokens cross first, then it runs inside each."""
    plan = plan_of(workspace, _OP, weight, routing, x.dtype, scales)
    with workspace.calling(plan, {"activation": activation, **same_routing(routing)}):
        if not two_level.serves(workspace, routing.ep_size):
            return in_parts(x, weight, routing, activation, scales)
        sizes = (routing.num_experts, routing.ep_size, routing.max_tokens)
        of = two_level.OfGroup(workspace, routing[:11], sizes)
        if not two_level.runs_fused(workspace, _OP, weight, of, plan):
            return in_parts(x, weight, routing, activation, scales)
        tokens, form = two_level.bring_tokens(workspace, of, packed(x, scales)), records_of(x, scales)
        if form is not None and scales is not None:
            tokens, scales = form.rows(tokens), scales._replace(x=form.scales(tokens))
        workspace.inside("the layer inside the node")
        return _eager(tokens, weight, *of.arguments, activation, of.name, *(scales or ()))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    layout: Any,
    activation: str | None,
    out: torch.Tensor,
    plan: MoePlan,
    workspace: CudaWorkspace,
    scales: Scales | None,
    recipe: repeat.Recipe,
) -> None:
    # Before the launch: copies may run out of memory.
    operands = (readable(x), grouped_gemm.readable_weight(weight, activation, scales))
    sizes = (routing.ep_size, routing.num_experts, layout.top_k, routing.max_tokens)
    activation_id = 0 if activation is None else grouped_gemm.ACTIVATIONS.index(activation) + 1
    with workspace.enter(plan) as (symm_buffer, _):
        options = (*sizes, activation_id, out, symm_buffer, -1, 0)
        scaled = fp8.for_kernel(x, scales)
        enqueue = functools.partial(_kernel, *operands, routing[:10], *options, **scaled)
        enqueue()
    if recipe.in_place(x=operands[0], weight=operands[1], **scaled):
        used = [*recipe.numbers("x", "weight", *ARRAYS), recipe.returns(out)]
        workspace.remember(recipe, enqueue, [used + recipe.numbers("scale_x", "scale_w")])


def in_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """All-gather, then a grouped GEMM; without synchronising with the GPU."""
    group = process_group(routing.group_name)
    limit = routing.max_tokens
    tokens = tokens_of_rows(routing) if limit else routing.rows
    how: dict[str, Any] = {"rows": tokens, "activation": activation}
    if scales is not None:
        of_rows = _gathered(fp8.of_elements(scales.x, x.shape[0]), limit, group)
        how |= fp8.named(*scales._replace(x=of_rows))
    return grouped_gemm.grouped_gemm(_gathered(x, limit, group), weight, routing.offsets, **how)


def _gathered(x: torch.Tensor, limit: int, group: ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, of each padded to `limit` rows."""
    mine = padded(x, limit)
    if group.size() == 1 or limit == 0:
        return mine
    if x.is_cuda:
        return all_gather(mine, group=group)
    gathered = x.new_empty(group.size() * limit, x.shape[1])
    gather.unfused(mine, group, gathered)
    return gathered


def records_of(x: torch.Tensor, scales: Scales | None) -> Records | None:
    """The form of rows with scales, if there are some."""
    return None if scales is None else packed_rows.records_of(x.shape[1], x.dtype, scales.scaling(x.shape[1]))


def packed(x: torch.Tensor, scales: Scales | None) -> torch.Tensor:
    """The rows that are sent: x, or with scales both as bytes."""
    form = records_of(x, scales)
    return x if form is None or scales is None else form.pack(x, scales.x)


class _Arrivals:
    """The gather of the CPU path: sends each rank the tokens that it needs, in the kernel's order, and waits
    for the peers' tokens when they are needed.
    """

    def __init__(
        self,
        workspace: CpuWorkspace,
        plan: MoePlan,
        layout: Any,
        routing: Routing,
        epoch: int,
        x: torch.Tensor,
    ) -> None:
        self._workspace = workspace
        self._plan = plan
        self._layout = layout
        self._epoch = epoch
        self._columns, self._dtype = x.shape[1], x.dtype
        self._order = _native.core.MoeSendOrder(layout)
        self._ends: list[int] = self._order.ends
        self._arrived = 0  # signals of each peer that have arrived
        rank, p = layout.rank, layout.world_size
        for share, part, owner in self._order.units:
            to = layout.slice_of(owner)
            begin = self._ends[share - 1] if share else 0
            start = part * self._order.part_tokens
            tokens = torch.arange(start, min(start + self._order.part_tokens, layout.max_tokens))
            first = routing.firsts[to, tokens]
            tokens = tokens[(first >= begin) & (first < self._ends[share])]
            if len(tokens):
                self._slot(owner, rank)[routing.sent[to, tokens].long()] = x[tokens]
            workspace.signal(owner, layout.slot_index(rank, owner), self._order.signal(share, part), epoch)
        self.sources = {s: x if s == rank else self._slot(rank, s) for s in range(p)}

    def wait(self, expert: int, step: int) -> None:
        """Waits for the tokens of an expert's rows, from step 0 up to `step`."""
        if step > 0:
            share = next(i for i, end in enumerate(self._ends) if expert < end)
            self._wait((share + 1) * self._order.parts)

    def _wait(self, signals: int) -> None:
        rank = self._layout.rank
        for signal in range(self._arrived, signals):
            for source in range(self._layout.world_size):
                if source != rank:
                    slot = self._layout.slot_index(source, rank)
                    self._workspace.wait(_OP, source, slot, signal, signal)
            self._arrived = signal + 1

    def _slot(self, owner: int, source: int) -> torch.Tensor:
        """The slot of a source on an owner [max_tokens, columns of x]."""
        limit, k, dtype = self._layout.max_tokens, self._columns, self._dtype
        offset = self._layout.slot_index(source, owner) * limit * k * dtype.itemsize
        return self._workspace.slot(owner, self._epoch, offset, limit * k, dtype).view(limit, k)


class _Tiles:
    """The kernel's work tile by tile, in the order of the schedule."""

    def __init__(
        self,
        layout: Any,
        routing: Routing,
        weight: torch.Tensor,
        activation: str | None,
        out: torch.Tensor,
        scales: Scales | None,
        records: Records | None,
    ) -> None:
        self._layout = layout
        self._offsets = routing.offsets.tolist()
        self._rows = routing.rows.long()
        self._schedule = (routing.tiles.data_ptr(), int(routing.num_tiles))
        self._routing = routing  # keeps the schedule alive
        self._activation = activation
        self._out = out
        self._records = records
        self._weights = [wide_expert(weight, expert, scales) for expert in range(weight.shape[0])]

    def compute(self, wait: Callable[[int, int], None], sources: dict[int, torch.Tensor]) -> None:
        """Computes all tiles. Calls wait(expert, step) before it reads an expert's rows up to that step."""
        limit, columns = self._layout.max_tokens, self._out.shape[1]
        n_tiles = -(-columns // BLOCK_N)
        for expert, m_tile, n_tile in _native.core.moe_tiles(*self._schedule, n_tiles) if n_tiles else ():
            first = self._offsets[expert] + m_tile * BLOCK_M
            rows = slice(first, min(first + BLOCK_M, self._offsets[expert + 1]))
            slot_rows = self._rows[rows]
            last = int(slot_rows[-1])
            wait(expert, self._layout.step_of(last // limit))
            tokens = sources[self._layout.rank].new_empty(len(slot_rows), sources[self._layout.rank].shape[1])
            for source, area in sources.items():
                mine = slot_rows // limit == source
                tokens[mine] = area[slot_rows[mine] % limit]
            here = slice(n_tile * BLOCK_N, min((n_tile + 1) * BLOCK_N, columns))
            self._out[rows, here] = grouped_gemm.activate(
                self._product(tokens, expert, here), self._activation
            )

    def _product(self, tokens: torch.Tensor, expert: int, columns: slice) -> torch.Tensor:
        """The products for some columns of the result; for swiglu twice as many."""
        scale = None
        if self._records is not None:
            tokens, scale = self._records.rows(tokens), self._records.scales(tokens)
        weight = self._weights[expert]
        products = weight.times(tokens, columns, scale)
        if self._activation != "swiglu":
            return products
        up = slice(self._out.shape[1] + columns.start, self._out.shape[1] + columns.stop)
        return torch.cat([products, weight.times(tokens, up, scale)], 1)


for _device in ("CPU", "CUDA"):
    library.impl("moe_ag_scatter_gemm", _eager, _device)
torch.library.register_fake("flux::moe_ag_scatter_gemm", _fake, lib=library)

_op: Any = torch.ops.flux.moe_ag_scatter_gemm.default
_kernel: Any = torch.ops.flux._moe_ag_scatter_gemm.default
