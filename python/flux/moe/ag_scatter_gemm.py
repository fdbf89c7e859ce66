"""Layer 0 of a mixture of experts: tokens are gathered from all ranks, while tiles whose tokens have arrived
are computed, own tokens first (COMET, arXiv 2502.19811, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux.comm import registry
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import process_group
from flux.comm.nodes.workspace import NodesWorkspace
from flux.moe import two_level
from flux.moe.plan import BLOCK_M, BLOCK_N, MoePlan
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
from flux.ops import _check, _gate, grouped_gemm
from flux.ops import all_gather as gather
from flux.ops._library import dispatch, library
from flux.ops._tensors import readable, wide_type

_OP = "moe.ag_scatter_gemm"


def ag_scatter_gemm(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, *, activation: str | None = None
) -> torch.Tensor:
    """activation(tokens of all ranks, sorted by expert, · weight[e]ᵀ), for the experts of this rank. A
    collective of the routing's group.

    Accumulated in fp32 and rounded once; results are bitwise repeatable.

    Args:
        x: [tokens, H], this rank's, as many as topk_ids had; bfloat16, float16, float32 or float64.
        weight: [E / ep_size, N, H], the experts of this rank's slice, of each its part of the rows; dtype and
            device of x.
        routing: of flux.moe.route.
        activation: "silu", "gelu", "swiglu" (silu of the first N/2 columns times the last N/2), or None.

    Returns:
        [rows, N] (for "swiglu" N/2 columns), a fresh tensor with the largest number of rows that there could
        be. What the rows from routing.offsets[-1] on hold is not specified.

    Raises:
        ValueError: an argument does not fit; or, where the ranks notice, they made different calls.
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
    direct = may_skip_layer_dispatch(x, weight, routing)
    if not direct:
        _gate.check(_OP, x=x, weight=weight, activation=activation)
        check_routing(_OP, routing, x.device)
    check_experts(_OP, routing, weight)
    if x.dim() == 2 and x.shape[0] != routing.num_tokens:
        _check.fail(_OP, "x", f"{routing.num_tokens} tokens, as topk_ids had", f"shape {list(x.shape)}")
    sizes = (routing.num_experts, routing.ep_size, routing.max_tokens)
    fn = _eager if direct else _op
    arguments = (x, weight, routing[:11], *sizes, activation, routing.group_name)
    return cast(torch.Tensor, dispatch(routing.group_name, x.device, fn, None, arguments))


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    activation: str | None,
    group_name: str,
) -> torch.Tensor:
    columns = grouped_gemm.expert_weight(_OP, x, weight, activation)
    return x.new_empty(routing[2].shape[0], columns)


def _eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Sequence[torch.Tensor],
    num_experts: int,
    ep_size: int,
    max_tokens: int,
    activation: str | None,
    group_name: str,
) -> torch.Tensor:
    columns = grouped_gemm.expert_weight(_OP, x, weight, activation)
    told = Routing._make([*routing, num_experts, ep_size, max_tokens, x.shape[0], group_name])
    group = process_group(group_name)
    if group.size() > 1:
        arguments = (x, weight, told, activation, columns, group)
        return registry.in_turn(group, x.device, _among_ranks, *arguments)
    layout = layout_of(routing, num_experts, ep_size, max_tokens, group)
    if not x.is_cuda:
        out = x.new_zeros(layout.max_rows, columns)
        _Tiles(layout, told, weight, activation, out).compute(lambda expert, step: None, {0: x})
        return out
    return in_parts(x, weight, told, activation)


def _among_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    columns: int,
    group: ProcessGroup,
) -> torch.Tensor:
    workspace = registry.get(group, x.device, _OP)
    if isinstance(workspace, NodesWorkspace):
        return _on_nodes(x, weight, routing, activation, workspace)
    layout = layout_of(routing[:11], routing.num_experts, routing.ep_size, routing.max_tokens, group)
    plan = plan_of(workspace, _OP, weight, routing)
    with workspace.calling(plan, {"activation": activation, **same_routing(routing)}) as epoch:
        if not plan.fused:
            return in_parts(x, weight, routing, activation)
        if isinstance(workspace, CudaWorkspace):
            out = x.new_empty(layout.max_rows, columns)
            _launch(x, weight, routing, layout, activation, out, plan, workspace)
            return out
        out = x.new_zeros(layout.max_rows, columns)
        arrivals = _Arrivals(cast(CpuWorkspace, workspace), plan, layout, routing, epoch, x)
        _Tiles(layout, routing, weight, activation, out).compute(arrivals.wait, arrivals.sources)
        return out


def _on_nodes(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    activation: str | None,
    workspace: NodesWorkspace,
) -> torch.Tensor:
    """The layer on several nodes: tokens cross first, then it runs inside each."""
    plan = plan_of(workspace, _OP, weight, routing)
    with workspace.calling(plan, {"activation": activation, **same_routing(routing)}):
        if not two_level.serves(workspace, routing.ep_size):
            return in_parts(x, weight, routing, activation)
        sizes = (routing.num_experts, routing.ep_size, routing.max_tokens)
        of = two_level.OfGroup(workspace, routing[:11], sizes)
        if not two_level.runs_fused(workspace, _OP, weight, of):
            return in_parts(x, weight, routing, activation)
        tokens = two_level.bring_tokens(workspace, of, x)
        workspace.inside("the layer inside the node")
        return _eager(tokens, weight, *of.arguments, activation, of.name)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    layout: Any,
    activation: str | None,
    out: torch.Tensor,
    plan: MoePlan,
    workspace: CudaWorkspace,
) -> None:
    x, weight = readable(x), readable(weight)  # before the launch: copies may run out of memory
    sizes = (routing.ep_size, routing.num_experts, layout.top_k, routing.max_tokens)
    activation_id = 0 if activation is None else grouped_gemm.ACTIVATIONS.index(activation) + 1
    with workspace.enter(plan) as (symm_buffer, _):
        _kernel(x, weight, routing[:10], *sizes, activation_id, out, symm_buffer, -1, 0)


def in_parts(x: torch.Tensor, weight: torch.Tensor, routing: Routing, activation: str | None) -> torch.Tensor:
    """All-gather, then a grouped GEMM; without synchronising with the GPU."""
    group = process_group(routing.group_name)
    limit = routing.max_tokens
    gathered = x.new_empty(group.size() * limit, x.shape[1])
    if gathered.shape[0]:
        padded = x
        if x.shape[0] < limit:
            padded = torch.nn.functional.pad(x, (0, 0, 0, limit - x.shape[0]))
        if group.size() == 1:
            gathered = padded
        elif x.is_cuda:
            gathered = gather.all_gather(padded, group=group)
        else:
            gather.unfused(padded, group, gathered)
    tokens = tokens_of_rows(routing) if limit else routing.rows
    return grouped_gemm.grouped_gemm(gathered, weight, routing.offsets, rows=tokens, activation=activation)


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
        """The slot of a source on an owner [max_tokens, k]."""
        limit, k, dtype = self._layout.max_tokens, self._plan.k, self._plan.dtype
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
    ) -> None:
        self._layout = layout
        self._offsets = routing.offsets.tolist()
        self._rows = routing.rows.long()
        self._schedule = (routing.tiles.data_ptr(), int(routing.num_tiles))
        self._routing = routing  # keeps the schedule alive
        self._activation = activation
        self._out = out
        self._weight = weight.to(wide_type(weight.dtype))

    def compute(self, wait: Callable[[int, int], None], sources: dict[int, torch.Tensor]) -> None:
        """Computes all tiles. Calls wait(expert, step) before it reads an expert's rows up to that step."""
        limit, columns = self._layout.max_tokens, self._out.shape[1]
        n_tiles = -(-columns // BLOCK_N)
        for expert, m_tile, n_tile in _native.core.moe_tiles(*self._schedule, n_tiles):
            first = self._offsets[expert] + m_tile * BLOCK_M
            rows = slice(first, min(first + BLOCK_M, self._offsets[expert + 1]))
            slot_rows = self._rows[rows]
            last = int(slot_rows[-1])
            wait(expert, self._layout.step_of(last // limit))
            tokens = torch.empty(len(slot_rows), self._weight.shape[2], dtype=self._weight.dtype)
            for source, area in sources.items():
                mine = slot_rows // limit == source
                tokens[mine] = area[slot_rows[mine] % limit].to(tokens.dtype)
            here = slice(n_tile * BLOCK_N, min((n_tile + 1) * BLOCK_N, columns))
            self._out[rows, here] = grouped_gemm.activate(
                tokens @ self._columns(expert, here).t(), self._activation
            )

    def _columns(self, expert: int, columns: slice) -> torch.Tensor:
        """The rows of the weight for some columns of the result; for swiglu twice as many."""
        weight = self._weight[expert]
        if self._activation != "swiglu":
            return weight[columns]
        up = slice(self._out.shape[1] + columns.start, self._out.shape[1] + columns.stop)
        return torch.cat([weight[columns], weight[up]])


for _device in ("CPU", "CUDA"):
    library.impl("moe_ag_scatter_gemm", _eager, _device)
torch.library.register_fake("flux::moe_ag_scatter_gemm", _fake, lib=library)

_op: Any = torch.ops.flux.moe_ag_scatter_gemm.default
_kernel: Any = torch.ops.flux._moe_ag_scatter_gemm.default
