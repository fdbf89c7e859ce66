"""Routing by the kernel: ranks exchange their choices and sort all tokens in one launch."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from flux.comm import cuda, repeat
from flux.comm.cuda import CudaWorkspace
from flux.comm.workspace import NOTHING, round_up
from flux.plan.choose import Plan
from flux.plan.moe import BLOCK_M

KNOWN = repeat.operator()
OP = "moe.route"
_POSITIONS = 3  # index of Routing.positions


def plan(layout: Any, device: torch.device, workspace: CudaWorkspace | None) -> Plan:
    """Whether the kernel routes. Must be equal on all ranks, as the kernel also exchanges the choices."""
    if workspace is None:
        return _make_plan(layout, cuda.why_not(device), _num_sms(device), "")
    key = (OP, layout)
    found = workspace.plans.get(key)
    if found is None:
        found = _make_plan(layout, workspace.why_not, workspace.num_sms, workspace.transport)
        workspace.plans[key] = found
    return cast(Plan, found)


@functools.lru_cache(maxsize=1024)
def _make_plan(layout: Any, why_not: str | None, num_sms: int, transport: str) -> Plan:
    if why_not is None and layout.local_experts > layout.max_route_experts:
        why_not = f"{layout.local_experts} experts on a rank, more than the kernel can count"
    if why_not is None and not layout.route_fits(num_sms):
        why_not = f"{layout.max_tokens} tokens on each rank, more than the GPU can count beside other kernels"
    m = layout.world_size * layout.max_tokens
    common = (OP, m, layout.num_experts, layout.top_k, torch.float32, layout.world_size, False)
    if why_not is not None:
        return Plan(*common, False, "torch", why_not)
    room = round_up(layout.route_exchange_bytes)
    reason = "supported by the kernel"
    return Plan(*common, True, transport, reason, config=layout.ep_size, exchange_bytes=room)


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run(
    workspace: CudaWorkspace | None,
    plan: Plan,
    layout: Any,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shapes: tuple[tuple[int, ...], ...],
    alone: Any = None,
) -> list[torch.Tensor]:
    """Routes in the kernel. alone: the known calls of a group of one rank, which has no workspace."""
    ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    told = {"num_experts": layout.num_experts, "ep_size": layout.ep_size, "max_tokens": layout.max_tokens}
    recipe = repeat.Recipe(KNOWN, {"topk_ids": topk_ids, "topk_weights": topk_weights, **told})
    int32 = torch.int32
    # Separate sizes are faster to parse than a list.
    arrays = [ids.new_empty(*shape, dtype=int32) for shape in shapes]
    all_weights = weights.new_empty(*shapes[_POSITIONS])
    scratch = ids.new_empty(layout.route_scratch_words, dtype=int32)
    sizes = (layout.rank, layout.ep_size, layout.num_experts, BLOCK_M)
    given = (ids, weights, arrays, all_weights, scratch)
    if workspace is None:
        enqueue = functools.partial(_kernel, *given, 0, *sizes)
        enqueue()
    else:
        with workspace.calling(plan, NOTHING), workspace.enter(plan) as (symm_buffer, _):
            enqueue = functools.partial(_kernel, *given, symm_buffer, *sizes)
            enqueue()
    if recipe.in_place(topk_ids=ids, topk_weights=weights):
        *used, of_scratch = recipe.allocates_together([*arrays, scratch])
        recipe.results += used
        used.append(recipe.returns(all_weights))
        operands = [[*recipe.numbers("topk_ids", "topk_weights"), *used, of_scratch]]
        if workspace is not None:
            workspace.remember(recipe, enqueue, operands)
        elif alone is not None:
            repeat.remember(alone, recipe, enqueue, operands)
    return [*arrays, all_weights]


_kernel: Any = torch.ops.flux._moe_route.default
