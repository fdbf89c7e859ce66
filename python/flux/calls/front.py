"""The way of a collective from its public function, or from torch's dispatcher, to what runs it.

A call is a named tuple; a way of running it is a function of it and its plan (flux.ops.ways).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import library
from flux.comm import registry, repeat
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.workspace import NOTHING, Same, Workspace
from flux.fp8 import scales as fp8
from flux.plan.choose import Plan, require

Tensor = torch.Tensor
# Of each torch operator, the names of its arguments before and after the group's.
_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {}


# The shape of the result; m, n and k of the problem.
Sizes = tuple[list[int], int, int, int]


class Planned(NamedTuple):
    """What holds for all calls of a group with equal facts."""

    plan: Plan
    sizes: Sizes


# Of a workspace and a call whose operands are matrices, with what ranks compare of it, or the epoch.
Way = Callable[[Any, Plan, Any, Any, repeat.Recipe], object]


class Collective(NamedTuple):
    """An operator among the ranks of a group.

    Attributes:
        name: of the torch operator, and in messages.
        number: of its known calls (flux.comm.repeat.operator).
        call: makes a call of the torch operator's arguments.
        known: the arguments of its known calls, of a call.
        sizes: checks a call in a group of p ranks.
        facts: a cache key, of a call's arguments: all that `sizes` and the plan depend on, except the group
            and x's device.
        matrices: a call whose operands are matrices, for the ways; of one with `out`.
        plan: of a workspace and such a call.
        inputs: names of the tensors that are read, x first.
        ways: "torch", "kernel" (GPUs), "protocol" (CPUs) and "nodes".
        parts: ways that are made of other calls, by Plan.way.
        same: what ranks compare of a call, besides its plan.
        alone: such a call in a group of one rank.
        runs: a call in any group, instead of all that stands from `facts` on, which is then not needed.
    """

    name: str
    number: int
    call: Callable[..., Any]
    known: Callable[[Any], dict[str, Any]]
    sizes: Callable[[Any, int], Sizes]
    inputs: tuple[str, ...] = ("x",)
    facts: Callable[..., tuple[Any, ...]] = lambda *call: ()
    matrices: Callable[[Any, Sizes], Any] = lambda call, sizes: call
    plan: Callable[[Workspace, Any, Sizes], Plan] | None = None
    ways: Mapping[str, Way] = {}  # noqa: RUF012
    parts: Mapping[str, Way] = {}  # noqa: RUF012
    same: Callable[[Any], Same] = lambda call: NOTHING
    alone: Callable[[Any], object] = lambda call: call.out.copy_(call.x.view(call.out.shape))
    runs: Callable[[Any, ProcessGroup], Any] | None = None


def enter(op: Collective, given: dict[str, Any], group: GroupLike, unchecked: bool) -> Any:
    """A call of a public function that C++ does not know.

    Args:
        given: arguments of the torch operator by name, and `out`.
        unchecked: there are arguments whose types nothing checks behind the dispatcher.
    """
    inputs: dict[str, Any] = dict(zip(op.inputs, map(given.get, op.inputs), strict=True))
    out = given["out"]
    direct = may_skip_dispatch(*inputs.values())
    if not direct or out is not None or unchecked:
        argument_types.check(op.name, **given)
    if "scale_x" in given:
        fp8.no_backward(op.name, **inputs)
    if out is not None:
        checks.no_backward_through_out(op.name, **inputs, out=out)
    if direct and not needs_grad(*inputs.values()):
        return run(op, op.call(**given), resolve_group(group, op.name))
    name = group_name(group, op.name)
    before, after = _ARGUMENTS[op.name]
    arguments = [given[each] for each in before]
    options = tuple([given[each] for each in after]) if unchecked else ()
    functional, writing = (getattr(torch.ops.flux, op.name + suffix).default for suffix in ("", "_out"))
    return dispatch(name, given["x"].device, functional, writing, (*arguments, name), out, options)


def below(
    op: Collective,
    call: Any,
    group: ProcessGroup,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
) -> Any:
    """A call without gradients and without torch's dispatcher.

    Args:
        also: further facts that ranks compare, if the call is a part of another operator.
        within: of that operator's call, if it is to be known (flux.comm.repeat).
    """
    if within is None and (calls := repeat.of_groups.get(group)) is not None:
        done = calls.call_below(op.number, *op.known(call).values())
        if done is not None:
            return done
    return run(op, call, group, also, within)


def run(
    op: Collective,
    call: Any,
    group: ProcessGroup,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
) -> Any:
    """As below, of a call that C++ does not know."""
    if op.runs is not None:
        return op.runs(call, group)
    if group.size() == 1:
        sizes = op.sizes(call, 1)
        out = _output(op, call, sizes)
        op.alone(op.matrices(call._replace(out=out), sizes))
        return out
    return registry.in_turn(group, call.x.device, _among_ranks, op, call, group, also, within)


def _among_ranks(
    op: Collective, call: Any, group: ProcessGroup, also: Same, within: repeat.Recipe | None
) -> Any:
    workspace = registry.find(group, call.x.device)
    facts = op.facts(*call)
    plans = {} if workspace is None else workspace.plans
    found: Planned | None = plans.get(facts)
    sizes = op.sizes(call, group.size()) if found is None else found.sizes
    out = _output(op, call, sizes)
    recipe = repeat.Recipe(op.number, op.known(call), within)
    recipe.out = out
    if workspace is None:
        workspace = registry.get(group, call.x.device, op.name)
        plans = workspace.plans
    call = op.matrices(call._replace(out=out), sizes)
    if found is None:
        assert op.plan is not None
        plan = op.plan(workspace, call, sizes)
        require(plan)
        plans[facts] = Planned(plan, sizes)
    else:
        plan = found.plan
    same = {**op.same(call), **also}
    if plan.way in op.parts:
        op.parts[plan.way](workspace, plan, call, same, recipe)
        return out
    with workspace.calling(plan, same) as epoch:
        op.ways[workspace.carrier if plan.by_flux else "torch"](workspace, plan, call, epoch, recipe)
    return out


def _output(op: Collective, call: Any, sizes: Sizes) -> Tensor:
    read = () if call.out is None else [getattr(call, name, None) for name in op.inputs[1:]]
    return checks.output(op.name, call.out, sizes[0], call.x, *read, scales=getattr(call, "scales", None))


def _fake(op: Collective, call: Any, group: ProcessGroup) -> Any:
    """Tensors like the results; none for a call with `out`, which is checked."""
    shape, *_ = op.sizes(call, group.size())
    scales, end = getattr(call, "scales", None), getattr(call, "end", None)
    if call.out is None:
        made = call.x.new_empty(shape, dtype=fp8.result_dtype(call.x, scales))
        if end is None or end.norm_weight is None:
            return made
        return end.checked(op.name, shape[-1], call.x, scales).fake(made)
    checks.out_arg(op.name, call.out, shape, call.x, scales=scales)
    return None


def register(op: Collective, *variants: str) -> None:
    """Registers what torch's dispatcher calls: on tensors, and on tensors without data.

    Args:
        variants: ends of names of torch operators, besides _out.
    """
    for name in (op.name, *[op.name + variant for variant in ("_out", *variants)]):
        schema = getattr(torch.ops.flux, name).default._schema
        names = [argument.name for argument in schema.arguments]
        place = names.index("group_name")
        _ARGUMENTS[name] = names[:place], names[place + 1 :]
        eager, fake = (_registered(op, names, function) for function in (below, _fake))
        for device in ("CPU", "CUDA"):
            library.impl(name, eager, device)
        torch.library.register_fake(f"flux::{name}", fake, lib=library)


def _registered(
    op: Collective, names: Sequence[str], function: Callable[[Collective, Any, ProcessGroup], Any]
) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **named}
        group = process_group(given.pop("group_name"))
        result = function(op, op.call(**given), group)
        return None if "out" in names else list(result) if "quant" in names else result

    return called
