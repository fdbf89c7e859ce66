"""Layer 0 of experts: tiles are computed while tokens are gathered (COMET, arXiv 2502.19811, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from flux import _native
from flux._memory import padded
from flux.calls import front
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.nodes.workspace import NodesWorkspace
from flux.comm.repeat import Recipe
from flux.fp8 import scales as fp8
from flux.fp8.scales import Records
from flux.moe import two_level
from flux.moe.layer import Layer, Operator, below, enter, known, launch, slot_of
from flux.moe.routing import Routing, layout_of, tokens_of_rows
from flux.ops import grouped_gemm
from flux.ops.all_gather import all_gather
from flux.ops.ways import all_gather as gather
from flux.plan.moe import BLOCK_M, BLOCK_N, MoePlan

Tensor = torch.Tensor
_OP = "moe.ag_scatter_gemm"


def ag_scatter_gemm(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    activation: str | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Literal["promoted", "fast"] = "promoted",
) -> Tensor:
    """activation(tokens of all ranks, sorted by expert, · weight[e]ᵀ), for the experts of this rank. A
    collective of the routing's group.

    Accumulated in fp32 and rounded once; results are bitwise repeatable.

    Args:
        x: [tokens, H], this rank's, as many as topk_ids had; bfloat16, float16, float32 or float64; with
            scales float8_e4m3fn or float8_e5m2.
        weight: [E / ep_size, N, H], the experts of this rank's slice, of each its part of the rows; dtype and
            device of x, with scales float8_e4m3fn.
        routing: of flux.moe.route.
        activation: "silu", "gelu", "swiglu" (silu of the first N/2 columns times the last N/2), or None.
        scale_x: of x: one entry, [tokens, 1] or [tokens, H / 128]; they travel with tokens.
        scale_w: of the weights: one entry, [E / ep_size], [E / ep_size, N], or with block scales
            [E / ep_size, N / 128, H / 128].
        out_dtype: of the result with scales: bfloat16 (None), float16 or float32; the same on all ranks.
        accumulate: with scales: sums in fp32 ("promoted") or tensor cores' 13 bits ("fast"), on all ranks.

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
    scaling = front.scaling_of(scale_x, scale_w, out_dtype, accumulate, x)
    if (done := known(_layer.number, x, weight, routing, activation, scaling)) is not None:
        return done
    return enter(_layer, Layer(x, weight, routing, activation), scaling)


def _by_kernel(workspace: CudaWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    routing, layout = call.routing, layout_of(call.routing)
    out = call.x.new_empty(layout.max_rows, call.columns, dtype=plan.result_dtype)
    sizes = (routing.ep_size, routing.num_experts, layout.top_k, routing.max_tokens)
    given = (*sizes, grouped_gemm.NUMBERS[call.activation], out)
    return launch(_kernel, workspace, plan, call, recipe, given, -1, 0)


def in_parts(call: Layer) -> Tensor:
    """All-gather, then a grouped GEMM; without synchronising with the GPU."""
    routing, group, scales = call.routing, call.group, call.scales
    limit = routing.max_tokens
    tokens = tokens_of_rows(routing) if limit else routing.rows
    how: dict[str, Any] = {"rows": tokens, "activation": call.activation}
    if scales is not None:
        of_rows = _gathered(fp8.of_elements(scales.x, call.x.shape[0]), limit, group)
        how |= fp8.by_name(scales._replace(x=of_rows))
    return grouped_gemm.grouped_gemm(_gathered(call.x, limit, group), call.weight, routing.offsets, **how)


def _gathered(x: Tensor, limit: int, group: ProcessGroup) -> Tensor:
    mine = padded(x, limit)
    if group.size() == 1 or limit == 0:
        return mine
    if x.is_cuda:
        return all_gather(mine, group=group)
    gathered = x.new_empty(group.size() * limit, x.shape[1])
    gather.unfused(mine, group, gathered)
    return gathered


def _on_nodes(workspace: NodesWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    """Tokens cross first, then the layer runs inside each node."""
    if not two_level.serves(workspace, call.routing.ep_size):
        return in_parts(call)
    of, form = two_level.OfGroup(workspace, plan, call.routing), _records_of(call)
    if not of.by_flux:
        return in_parts(call)
    tokens, scales = two_level.bring_tokens(workspace, of, _packed(call)), call.scales
    if form is not None and scales is not None:
        tokens, scales = form.rows(tokens), scales._replace(x=form.scales(tokens))
    workspace.inside("the layer inside the node")
    return below(_layer, call._replace(x=tokens, routing=of.routing, scales=scales))


def _alone(workspace: None, plan: None, call: Layer, recipe: Recipe) -> Tensor:
    if call.x.is_cuda:
        return in_parts(call)
    return _computed(call, lambda expert, step: None, {0: _packed(call)})


def _records_of(call: Layer) -> Records | None:
    k = call.x.shape[1]
    return call.scales and call.scales.scaling(k).records(k, call.x.dtype)


def _packed(call: Layer) -> Tensor:
    """The rows that are sent: x, or with scales both as bytes."""
    form = _records_of(call)
    return call.x if form is None or call.scales is None else form.pack(call.x, call.scales.x)


def _by_protocol(workspace: CpuWorkspace, plan: MoePlan, call: Layer, recipe: Recipe) -> Tensor:
    """Sends tokens in the kernel's order, and waits for those of peers when they are needed."""
    routing, layout, x = call.routing, layout_of(call.routing), _packed(call)
    order, rank, p = _native.core.MoeSendOrder(layout), layout.rank, layout.world_size
    ends, arrived = order.ends, 0  # signals of each peer that have arrived
    slot = partial(slot_of, workspace, layout, x.shape[1], x.dtype)
    for share, part, owner in order.units:
        to, begin, start = layout.slice_of(owner), ends[share - 1] if share else 0, part * order.part_tokens
        tokens = torch.arange(start, min(start + order.part_tokens, layout.max_tokens))
        first = routing.firsts[to, tokens]
        tokens = tokens[(first >= begin) & (first < ends[share])]
        if len(tokens):
            slot(owner, rank)[routing.sent[to, tokens].long()] = x[tokens]
        workspace.signal(owner, order.signal(share, part))

    def wait_for(expert: int, step: int) -> None:
        """Waits for the tokens of an expert's rows, from step 0 up to `step`."""
        nonlocal arrived
        if step == 0:
            return
        share = next(i for i, end in enumerate(ends) if expert < end)
        for signal in range(arrived, (share + 1) * order.parts):
            for source in range(p):
                workspace.wait(source, signal, signal)
            arrived = signal + 1

    return _computed(call, wait_for, {s: x if s == rank else slot(rank, s) for s in range(p)})


def _computed(call: Layer, wait: Callable[[int, int], None], sources: dict[int, Tensor]) -> Tensor:
    """The kernel's work in its order. wait: called before an expert's rows up to a step are read."""
    layout = layout_of(call.routing)
    routing, records, weights = call.routing, _records_of(call), call.wide_weights()
    offsets, row_numbers = routing.offsets.tolist(), routing.rows.long()
    limit, n = layout.max_tokens, call.columns
    out = call.x.new_zeros(layout.max_rows, n, dtype=call.dtype)
    schedule = (routing.tiles.data_ptr(), int(routing.num_tiles), -(-n // BLOCK_N))
    for expert, m_tile, n_tile in _native.core.moe_tiles(*schedule) if n else ():
        first = offsets[expert] + m_tile * BLOCK_M
        rows = slice(first, min(first + BLOCK_M, offsets[expert + 1]))
        slot_rows = row_numbers[rows]
        wait(expert, layout.step_of(int(slot_rows[-1]) // limit))
        own = sources[layout.rank]
        tokens, scale = own.new_empty(len(slot_rows), own.shape[1]), None
        for source, area in sources.items():
            mine = slot_rows // limit == source
            tokens[mine] = area[slot_rows[mine] % limit]
        if records is not None:
            tokens, scale = records.rows(tokens), records.scales(tokens)
        here = slice(n_tile * BLOCK_N, min((n_tile + 1) * BLOCK_N, n))
        parts = [here, slice(n + here.start, n + here.stop)] if call.activation == "swiglu" else [here]
        product = torch.cat([weights[expert].times(tokens, part, scale) for part in parts], 1)
        out[rows, here] = grouped_gemm.activate(product, call.activation)
    return out


_layer = Operator(
    _OP,
    True,
    {
        "alone": _alone,
        "torch": lambda workspace, plan, call, *_: in_parts(call),
        "kernel": _by_kernel,
        "protocol": _by_protocol,
        "nodes": _on_nodes,
    },
)
_kernel: Any = torch.ops.flux._moe_ag_scatter_gemm.default
