"""What both layers of experts share: a call, and its way from the public function to what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup

from flux import _invariance
from flux._memory import readable
from flux.calls import argument_types, checks, transforms
from flux.calls.front import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import implement
from flux.comm import registry, repeat
from flux.comm.cpu import CpuWorkspace
from flux.comm.cuda import CudaWorkspace
from flux.comm.group import process_group
from flux.comm.workspace import Workspace
from flux.fp8 import scales as fp8
from flux.fp8.products import WideWeight, wide_expert
from flux.fp8.scales import Scales
from flux.moe.routing import ARRAYS, TENSORS, Routing, check_routing, same_routing
from flux.ops import grouped_gemm
from flux.ops.ways import int8_sum
from flux.plan.moe import LayerProblem, MoePlan, plan_layer

Tensor = torch.Tensor


class Layer(NamedTuple):
    """A call of layer 0 or 1. scales: as given; for the ways, canonical. columns, dtype: of the result."""

    x: Tensor
    weight: Tensor
    routing: Routing
    activation: str | None = None
    scales: Scales | None = None
    wire: str | None = None

    @property
    def group(self) -> ProcessGroup:
        return process_group(self.routing.group_name)

    @property
    def columns(self) -> int:
        return self.weight.shape[1] // (2 if self.activation == "swiglu" else 1)

    @property
    def dtype(self) -> torch.dtype:
        return fp8.result_dtype(self.x, self.scales)

    def wide_weights(self) -> list[WideWeight]:
        return [wide_expert(self.weight, expert, self.scales) for expert in range(self.weight.shape[0])]


# Of a workspace, the plan, a call, and how it is repeated. Alone, a call has no workspace.
Way = Callable[[Any, Any, Layer, repeat.Recipe], Tensor]


@dataclass(frozen=True, eq=False)
class Operator:
    """One of the layers. of_tokens: x has a row for each token, the result for each row; else conversely."""

    name: str
    of_tokens: bool
    ways: Mapping[str, Way]  # "alone" (in a group of one rank), "torch", "kernel", "protocol" and "nodes"
    number: int = field(default_factory=repeat.operator)  # of its known calls

    def __post_init__(self) -> None:
        """Registers what torch's dispatcher calls: on tensors, and on tensors without data."""
        name = self.name.replace(".", "_")
        implement(name, lambda *given: below(self, _of_arguments(self, *given)), partial(_fake, self))
        transforms.casts(name)

    def rows(self, routing: Routing) -> tuple[int, int]:
        """Of x and of the result."""
        tokens, rows = routing.num_tokens, routing.rows.shape[0]
        return (tokens, rows) if self.of_tokens else (rows, tokens)


def known(
    op: int, x: Tensor, weight: Tensor, routing: Routing, activation: str | None, scaling: tuple[Any, ...]
) -> Tensor | None:
    """The result of a known call, or None. scaling: of front.scaling_of."""
    if torch.compiler.is_compiling() or type(routing) is not Routing:
        return None
    calls = repeat.of(routing.group_name)
    if calls is None:
        return None
    options = (activation, _invariance.active(), *scaling)
    return cast("Tensor | None", calls.call(op, x, weight, *routing[:15], *options))


def enter(op: Operator, call: Layer, scaling: tuple[Any, ...]) -> Tensor:
    """A call of a public function, without its scales, that C++ does not know."""
    x, weight, routing, activation, _, wire = call
    direct = (
        isinstance(routing, Routing)
        and may_skip_dispatch(x, weight, routing.rows, routing.weights, *scaling[:2])
        and not needs_grad(x, weight, routing.weights)
    )
    of_scales = dict(zip(fp8.NAMES, scaling, strict=False))
    if not direct or scaling or wire is not None:
        argument_types.check(op.name, x=x, weight=weight, activation=activation, wire=wire, **of_scales)
        check_routing(op.name, routing, x.device)
    if scaling:
        tensors = {"x": x, "weight": weight, "routing": routing.weights}
        checks.no_backward(op.name, checks.WITH_SCALES, **tensors, scale_x=scaling[0], scale_w=scaling[1])
    local = routing.num_experts // routing.ep_size
    if weight.dim() == 3 and weight.shape[0] != local:
        what = f"{local} experts, those of a rank with {routing.num_experts} in {routing.ep_size} slices"
        checks.fail(op.name, "weight", what, f"shape {list(weight.shape)}")
    rows, _ = op.rows(routing)
    if x.dim() == 2 and x.shape[0] != rows:
        what = "tokens, as topk_ids had" if op.of_tokens else "rows, as ag_scatter_gemm returns them"
        checks.fail(op.name, "x", f"{rows} {what}", f"shape {list(x.shape)}")
    if direct:
        return run(op, call._replace(scales=fp8.given(op.name, *scaling)))
    name, fn = routing.group_name, getattr(torch.ops.flux, op.name.replace(".", "_")).default
    arguments = (x, weight, routing[:TENSORS], *routing[TENSORS:-1], activation, name)
    if wire is not None:  # after the scales, of which all are given then
        scaling = (*(scaling or (None, None, None, "promoted")), wire)
    return cast(Tensor, dispatch(name, x.device, fn, *arguments, *scaling))


def _of_arguments(op: Operator, x: Tensor, weight: Tensor, tensors: list[Tensor], *rest: Any) -> Layer:
    sizes, (activation, name), of_scales, wire = rest[:4], rest[4:6], rest[6:10], rest[10:]
    scales = fp8.given(op.name, *of_scales)
    return Layer(x, weight, Routing._make([*tensors, *sizes, name]), activation, scales, *wire)


def _fake(op: Operator, *arguments: Any) -> Tensor:
    call = _of_arguments(op, *arguments)
    _check(op, call)
    return call.x.new_empty(op.rows(call.routing)[1], call.columns, dtype=call.dtype)


def _check(op: Operator, call: Layer) -> None:
    grouped_gemm.expert_weight(op.name, call.x, call.weight, call.activation, call.scales)
    int8_sum.check(op.name, call.wire, call.dtype)


def below(op: Operator, call: Layer) -> Tensor:
    """A call without gradients and without torch's dispatcher."""
    calls = None if call.wire is not None else repeat.of_groups.get(call.group)
    if calls is not None:
        options = (call.activation, _invariance.active(), *(call.scales or ()))
        done = calls.call_below(op.number, call.x, call.weight, *call.routing[:15], *options)
        if done is not None:
            return cast(Tensor, done)
    return run(op, call)


def run(op: Operator, call: Layer) -> Tensor:
    """As below, of a call that C++ does not know."""
    _check(op, call)
    group, of_routing = call.group, dict(zip(Routing._fields, call.routing[:15], strict=False))
    given = {"x": call.x, "weight": call.weight, **of_routing, "activation": call.activation}
    given |= {"batch_invariant": _invariance.active(), **fp8.by_name(call.scales)}
    recipe = repeat.Recipe(op.number, given)
    if call.scales is not None:
        call = call._replace(scales=call.scales.canonical_experts(*call.weight.shape))
    if group.size() == 1:
        return op.ways["alone"](None, None, call, recipe)
    return registry.in_turn(group, call.x.device, _among_ranks, op, call, group, recipe)


def _among_ranks(op: Operator, call: Layer, group: ProcessGroup, recipe: repeat.Recipe) -> Tensor:
    workspace = registry.get(group, call.x.device, op.name)
    plan = plan_of(workspace, op.name, call)
    way = workspace.carrier if plan.by_flux or workspace.topology is not None else "torch"
    if call.wire is not None:
        plan, way = int8_sum.planned(plan, workspace, call.routing.max_tokens, call.columns), "torch"
    same = {"activation": call.activation, **same_routing(call.routing), **int8_sum.same(call.wire)}
    with workspace.calling(plan, same):
        return op.ways[way](workspace, plan, call, recipe)


def plan_of(workspace: Workspace, op: str, call: Layer) -> MoePlan:
    routing, (experts, n, k) = call.routing, call.weight.shape
    sizes = (routing.max_tokens, n, k, call.x.dtype, routing.positions.shape[2], routing.ep_size, experts)
    scaling = None if call.scales is None else call.scales.scaling(k)
    return plan_layer(workspace, LayerProblem(op, *sizes, scaling))


def launch(
    kernel: Callable[..., object],
    workspace: CudaWorkspace,
    plan: MoePlan,
    call: Layer,
    recipe: repeat.Recipe,
    given: Sequence[Any],
    *how: int,
) -> Tensor:
    """Launches the kernel of a layer, and lets C++ repeat that. given, how: its arguments after the routing,
    up to the result, which is returned, and after the workspace.
    """
    # Copies may run out of memory, so they come before the call is opened.
    x, weight = readable(call.x), grouped_gemm.readable_weight(call.weight, call.activation, call.scales)
    scaled = {} if call.scales is None else call.scales.for_kernel(call.x)
    with workspace.enter(plan) as (symm_buffer, _):
        arguments = (x, weight, call.routing[: len(ARRAYS)], *given, symm_buffer, *how)
        enqueue = partial(kernel, *arguments, **scaled)
        enqueue()
    *others, out = [each for each in given if isinstance(each, Tensor)]
    if recipe.in_place(x=x, weight=weight, **scaled):
        weights = call.routing.weights
        used = recipe.numbers("x", "weight", *ARRAYS)
        used += [recipe.number("weights") if each is weights else recipe.allocates(each) for each in others]
        used += [recipe.returns(out), *recipe.numbers("scale_x", "scale_w")]
        workspace.remember(recipe, enqueue, [used])
    return out


def slot_of(
    workspace: CpuWorkspace, layout: Any, columns: int, dtype: torch.dtype, owner: int, source: int
) -> Tensor:
    """The slot of a source on an owner, on CPUs: [max_tokens, columns]."""
    offset = 2 * layout.slot_index(source, owner) * layout.max_tokens * columns
    return workspace.slot(owner, offset, (layout.max_tokens, columns), dtype)
