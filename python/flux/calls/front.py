"""The way of an operator from its public function, or from torch's dispatcher, to what runs it.

A call is a named tuple; a way of running it is a function of it and its plan (flux.ops.ways).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux import _invariance
from flux.calls import argument_types, checks
from flux.calls.dispatch import dispatch, may_skip_dispatch, needs_grad
from flux.calls.schemas import PUBLIC_NAMES, library
from flux.comm import registry, repeat
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.workspace import NOTHING, Same, Workspace
from flux.fp8 import scales as fp8
from flux.plan.choose import Plan, Planned, require

Tensor = torch.Tensor
# Of each torch operator, the names of its arguments; and of each collective, those of tensors that it reads.
_ARGUMENTS: dict[str, list[str]] = {}
_INPUTS: dict[str, list[str]] = {}
# Arguments whose types nothing checks behind the dispatcher.
_UNCHECKED = {"scale_x", "quant", "wire"}

# The shape of the result; m, n and k of the problem. Of several weights, shapes and a tuple of n.
Sizes = tuple[Any, int, Any, int]
# Of a workspace, plan and call, whose operands are matrices, the epoch, and how it is repeated. Returns what
# `Collective.answer` needs; ways that are made of other calls, which ranks compare instead, the answer.
Way = Callable[[Any, Plan, Any, int, repeat.Recipe], Any]
MADE_OF_CALLS = ("parts", "composed", "split", "beside")


def results(call: Any, sizes: Sizes, name: str) -> Any:
    """A new tensor for the result of a call of that operator, or its `out`, checked."""
    x, out, scales = call.x, call.out, getattr(call, "scales", None)
    if out is not None:
        checks.out_arg(name, out, sizes[0], x, scales=scales)
        return out
    shape = sizes[0] or [()]  # separate sizes are parsed 1 us faster than a list
    return x.new_empty(*shape) if scales is None else x.new_empty(*shape, dtype=scales.out_dtype)


@dataclass(frozen=True, eq=False)
class Collective:
    """An operator among the ranks of a group, or without a group: then it runs `alone`.

    Attributes:
        name: of the torch operator, and in messages.
        call: makes a call of the torch operator's arguments, by their public names.
        known: the arguments of its known calls, of a call: all that `sizes` and the plan depend on.
        sizes: checks a call in a group of p ranks.
        plan: of a workspace and a call whose operands are matrices.
        ways: "torch", "kernel" (GPUs), "protocol" (CPUs) and "nodes"; by Plan.way those of MADE_OF_CALLS.
        matrices: a call whose operands are matrices, for the ways; of one with `out`.
        results: the tensors that a call writes: new ones, or its `out`, checked.
        may_be: names of inputs that `out` may be.
        same: what ranks compare of a call, besides its plan.
        alone: runs such a call in a group of one rank. Without a group also of its recipe.
        answer: what a call returns, of it and of what its way returned.
        differentiable: whether there is a backward pass.
        number: of its known calls (flux.comm.repeat.operator).
    """

    name: str
    call: Callable[..., Any]
    known: Callable[[Any], dict[str, Any]]
    sizes: Callable[[Any, int], Sizes]
    plan: Callable[[Workspace, Any, Sizes], Plan] | None = None
    ways: Mapping[str, Way] = field(default_factory=dict)
    matrices: Callable[[Any, Sizes], Any] = lambda call, sizes: call
    results: Callable[[Any, Sizes, str], Any] = results
    may_be: tuple[str, ...] = ()
    same: Callable[[Any], Same] = lambda call: NOTHING
    alone: Callable[..., Any] = lambda call: call.out.copy_(call.x.view(call.out.shape))
    answer: Callable[[Any, Any], Any] = lambda call, made: call.out
    differentiable: bool = True
    number: int = field(default_factory=repeat.operator)


def enter(
    op: Collective,
    given: dict[str, Any],
    group: GroupLike = None,
    complete: Callable[[dict[str, Any], GroupLike], None] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """A call of a public function that C++ does not know.

    Args:
        given: arguments of the torch operator by their public names, and `out`; of several weights in lists.
            Those at the end may be left away.
        complete: adds to `given` what the torch operator needs besides, when types are checked.
        finish: makes what the public function returns. Nothing may follow the call there or here: an
            exception behind it would make this rank alone call again.
    """
    inputs: dict[str, Any] = {}
    for name in _INPUTS[op.name]:
        value = given.get(name)
        if isinstance(value, (list, tuple)):
            inputs |= {argument_types.entry(name, value, i): each for i, each in enumerate(value)}
        else:
            inputs[name] = value
    out = given.get("out")
    direct = may_skip_dispatch(*inputs.values())
    if not direct or out is not None or not _UNCHECKED.isdisjoint(given):
        argument_types.check(op.name, **given)
    if not op.differentiable:
        checks.no_backward(op.name, **inputs, out=out)
    elif "scale_x" in given:
        fp8.no_backward(op.name, **inputs)
    if out is not None:
        outs = out if isinstance(out, list) else [out]
        written = {argument_types.entry("out", outs, i): each for i, each in enumerate(outs)}
        checks.no_backward_through_out(op.name, **inputs, **written)
    if complete is not None:
        complete(given, group)
    grouped = "group_name" in _ARGUMENTS[op.name]
    if direct and not needs_grad(*inputs.values()):
        to = resolve_group(group, op.name) if grouped else None
        if finish is None or to is None:
            return run(op, op.call(**given), to)
        return registry.in_turn(
            to, given["x"].device, _finished, finish, op, op.call(**given), to, holds=True
        )
    variant = "" if given.get("norm_weight") is None else "_quant" if "quant" in given else "_norm"
    name = op.name + (variant if out is None else "_out")
    torch_op = getattr(torch.ops.flux, name).default
    if grouped:
        given["group_name"] = group_name(group, op.name)
    arguments = [given[each] for each in _ARGUMENTS[name] if each in given]
    through = functools.partial(_answered, torch_op, given.get("out"), variant == "_quant", finish)
    if not grouped:
        return through(*arguments)
    return dispatch(given["group_name"], given["x"].device, through, *arguments)


def _answered(
    torch_op: Callable[..., Any],
    out: Any,
    several: bool,
    finish: Callable[[Any], Any] | None,
    *arguments: Any,
) -> Any:
    """Calls an operator of torch. Returns what the public function does."""
    made = torch_op(*arguments)
    answer = out if out is not None else tuple(made) if several else made
    return answer if finish is None else finish(answer)


def _finished(finish: Callable[[Any], Any], op: Collective, call: Any, group: ProcessGroup) -> Any:
    return finish(run(op, call, group))


def below(
    op: Collective,
    call: Any,
    group: ProcessGroup | None,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
) -> Any:
    """A call without gradients and without torch's dispatcher.

    Args:
        also: further facts that ranks compare, if the call is a part of another operator.
        within: of that operator's call, if it is to be known (flux.comm.repeat).
    """
    calls = repeat.without_group() if group is None else repeat.of_groups.get(group)
    if within is None and calls is not None:
        known = {"batch_invariant": _invariance.active(), **op.known(call)}
        done = calls.call_below(op.number, *known.values())
        if done is not None:
            return done
    return run(op, call, group, also, within)


def run(
    op: Collective,
    call: Any,
    group: ProcessGroup | None,
    also: Same = NOTHING,
    within: repeat.Recipe | None = None,
) -> Any:
    """As below, of a call that C++ does not know."""
    if group is None or group.size() == 1:
        sizes, known = op.sizes(call, 1), {"batch_invariant": _invariance.active(), **op.known(call)}
        call = _writing(op, call, sizes, known)
        matrices = op.matrices(call, sizes)
        if group is not None:
            return op.answer(call, op.alone(matrices))
        recipe = repeat.Recipe(op.number, known, within)
        recipe.out = call.out
        return op.answer(call, op.alone(matrices, recipe))
    return registry.in_turn(group, call.x.device, _among_ranks, op, call, group, also, within)


def _among_ranks(
    op: Collective, call: Any, group: ProcessGroup, also: Same, within: repeat.Recipe | None
) -> Any:
    known = {"batch_invariant": _invariance.active(), **op.known(call)}
    facts = _facts(op, known)
    workspace = registry.find(group, call.x.device)
    plans = {} if workspace is None else workspace.plans
    found: Planned | None = plans.get(facts)
    sizes = op.sizes(call, group.size()) if found is None else found.sizes
    recipe = repeat.Recipe(op.number, known, within)
    call = _writing(op, call, sizes, known)
    recipe.out, recipe.same = call.out, {**op.same(call), **also}
    if workspace is None:
        workspace = registry.get(group, call.x.device, op.name)
        plans = workspace.plans
    matrices = op.matrices(call, sizes)
    if found is None:
        assert op.plan is not None
        found = Planned(op.plan(workspace, matrices, sizes), sizes)
        require(found.plan)
        plans[facts] = found
    plan = found.plan
    if plan.way in MADE_OF_CALLS:
        return op.ways[plan.way](workspace, plan, matrices, 0, recipe)
    with workspace.calling(plan, recipe.same) as epoch:
        way = op.ways[workspace.carrier if plan.by_flux else "torch"]
        made = way(workspace, plan, matrices, epoch, recipe)
    return op.answer(call, made)


def _facts(op: Collective, known: dict[str, Any]) -> tuple[Any, ...]:
    """A cache key: all that the sizes and the plan of a call depend on, except the group. Eager calls look
    them up, because checking and planning again takes the host longer.
    """
    facts: list[Any] = [op.number]
    for name, value in known.items():
        if isinstance(value, Tensor):
            if not name.startswith("out"):
                facts += (value.shape, value.stride(), value.dtype, value.device)
        else:
            facts.append(value)
    return tuple(facts)


def _writing(op: Collective, call: Any, sizes: Sizes, known: dict[str, Any]) -> Any:
    """A call with all tensors that it writes. A given `out` must share no memory."""
    made = op.results(call, sizes, op.name)
    if call.out is not None:
        others = {name: each for name, each in known.items() if isinstance(each, Tensor)}
        read = [each for name, each in others.items() if not name.startswith("out")]
        may_be = [others.get(name) for name in op.may_be]
        outs = [made] if isinstance(made, Tensor) else made
        for i, out in enumerate(outs):
            name = argument_types.entry("out", outs, i)
            checks.separate(op.name, name, out, *read, *outs[:i], may_be=may_be)
    return call._replace(out=made)


def _fake(op: Collective, call: Any, group: ProcessGroup | None) -> Any:
    """Tensors like the results; none for a call with `out`, which is checked."""
    sizes = op.sizes(call, 1 if group is None else group.size())
    made = op.results(call, sizes, op.name)
    if call.out is not None:
        return None
    end = getattr(call, "end", None)
    return made if end is None or end.norm_weight is None else end.fake(made)


def register(op: Collective, *variants: str) -> None:
    """Registers what torch's dispatcher calls: on tensors, and on tensors without data.

    Args:
        variants: ends of names of further torch operators, such as "_out".
    """
    inputs: dict[str, None] = {}
    for name in (op.name, *[op.name + variant for variant in variants]):
        arguments = getattr(torch.ops.flux, name).default._schema.arguments
        kinds = {PUBLIC_NAMES.get(each.name, each.name): str(each.type) for each in arguments}
        inputs |= {each: None for each, kind in kinds.items() if "Tensor" in kind and each != "out"}
        _ARGUMENTS[name] = list(kinds)
        eager, fake = (_registered(op, name, function) for function in (below, _fake))
        for device in ("CPU", "CUDA"):
            library.impl(name, eager, device)
        torch.library.register_fake(f"flux::{name}", fake, lib=library)
    _INPUTS[op.name] = list(inputs)


def _registered(
    op: Collective, name: str, function: Callable[[Collective, Any, Any], Any]
) -> Callable[..., Any]:
    names = _ARGUMENTS[name]
    schema = getattr(torch.ops.flux, name).default._schema
    returns_list = any("List" in str(each.type) for each in schema.returns)

    def called(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(names, arguments, strict=False))
        given |= {PUBLIC_NAMES.get(each, each): value for each, value in named.items()}
        group = process_group(given.pop("group_name")) if "group_name" in given else None
        result = function(op, op.call(**given), group)
        if name.endswith("_out"):
            return None
        if not returns_list:
            return result
        return [result] if isinstance(result, Tensor) else list(result)

    return called
