"""An operator's way from its public function, or torch's dispatcher, to what runs a call, a named tuple."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from flux import _invariance
from flux.calls import argument_types, checks, transforms
from flux.calls.checks import Sizes as Sizes
from flux.calls.schemas import PUBLIC_NAMES, implement
from flux.comm import registry, repeat
from flux.comm.group import GroupLike, group_name, process_group, resolve_group
from flux.comm.repeat import Recipe
from flux.comm.workspace import NOTHING, Same, Workspace, find, in_turn
from flux.fp8 import scales as fp8
from flux.plan.choose import Plan, Planned, require, workspace_plan

Tensor = torch.Tensor
# Of each torch operator, the names of its arguments; and of each collective, those of tensors that it reads.
_ARGUMENTS: dict[str, list[str]] = {}
_INPUTS: dict[str, list[str]] = {}
# Arguments whose types nothing checks behind the dispatcher.
_UNCHECKED = {"scale_x", "quant", "wire", "activation"}

# Of a workspace, plan and call, whose operands are matrices, and how it is repeated. Returns what
# `Collective.answer` needs; ways that are made of other calls, which ranks compare instead, the answer.
Way = Callable[..., Any]
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
        call: a named tuple of the arguments, and `out`, by their public names; fp8.NAMES are its `scales`.
        end: a named tuple of those arguments that are the call's `end`, or None.
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
    sizes: Callable[[Any, int], Sizes]
    end: Any = None
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

    def call_of(self, given: dict[str, Any]) -> Any:
        """The call of arguments by name, which are no longer needed."""
        if "scale_x" in given:
            scaling = {name: given.pop(name) for name in fp8.NAMES if name in given}
            if (scales := fp8.given(self.name, **scaling)) is not None:
                given["scales"] = scales
        if self.end is not None:
            given["end"] = self.end(**{name: given.pop(name) for name in self.end._fields if name in given})
        return self.call(**given)


def scaling_of(scale_x: Any, scale_w: Any, out_dtype: Any, accumulate: Any, x: Any) -> tuple[Any, ...]:
    """The last arguments of a torch operator (fp8.NAMES): none for a call without fp8 operands."""
    if scale_x is not None or scale_w is not None:
        return scale_x, scale_w, fp8.DEFAULT_OUT if out_dtype is None else out_dtype, accumulate
    if out_dtype is not None and isinstance(x, Tensor) and out_dtype == x.dtype:
        out_dtype = None
    return () if out_dtype is None and accumulate == "promoted" else (None, None, out_dtype, accumulate)


def known(call: Any) -> dict[str, Any]:
    """All that a call's sizes and plan depend on, by name, in the order that KnownCalls.call gets."""
    found: dict[str, Any] = {"batch_invariant": _invariance.active()}
    for name, value in zip(call._fields, call, strict=True):
        if name == "scales":
            found |= fp8.by_name(value) if value else {}
        elif name == "end":
            found |= value.by_name()
        elif isinstance(value, (list, tuple)):
            found.setdefault("count", len(value))
            found |= {f"{name}[{i}]": each for i, each in enumerate(value)}
        else:
            found[name] = value
    return found


def plan(op: str, workspace: Workspace, call: Any, sizes: Sizes) -> Plan:
    """The plan of an operator for a call of matrices."""
    _, m, n, k = sizes
    scales = getattr(call, "scales", None)
    how = getattr(call, "transpose_weight", False), None if scales is None else scales.scaling(k)
    return workspace_plan(workspace, op, m, n, k, call.x.dtype, *how)


def enter(
    op: Collective,
    given: dict[str, Any],
    group: GroupLike = None,
    complete: Callable[[dict[str, Any], GroupLike], None] | None = None,
    finish: Callable[[Any], Any] | None = None,
    scaling: Sequence[Any] = (),
) -> Any:
    """A call of a public function that C++ does not know. given: by the torch operator's public names, and
    `out`. complete: adds what that needs besides. finish: makes what is returned. Nothing may follow the call
    there or here: an exception behind it would make this rank alone call again.
    """
    given |= zip(fp8.NAMES, scaling, strict=False)
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
        checks.no_backward(op.name, checks.WITH_SCALES, **inputs)
    if out is not None:
        outs = out if isinstance(out, list) else [out]
        written = {argument_types.entry("out", outs, i): each for i, each in enumerate(outs)}
        checks.no_backward(op.name, checks.THROUGH_OUT, **inputs, **written)
    if complete is not None:
        complete(given, group)
    grouped = op.plan is not None
    if direct and not needs_grad(*inputs.values()):
        to = resolve_group(group, op.name) if grouped else None
        call = op.call_of(given)
        if finish is None or to is None:
            return run(op, call, to)
        return in_turn(to, call.x.device, lambda: finish(run(op, call, to)), holds=True)
    variant = "" if given.get("norm_weight") is None else "_quant" if "quant" in given else "_norm"
    name = op.name + (variant if out is None else "_out")
    torch_op = getattr(torch.ops.flux, name).default
    if grouped:
        given["group_name"] = group_name(group, op.name)
    arguments = [given[each] for each in _ARGUMENTS[name] if each in given]

    def through(*arguments: Any) -> Any:
        made = torch_op(*arguments)
        answer = out if out is not None else tuple(made) if variant == "_quant" else made
        return answer if finish is None else finish(answer)

    if not grouped:
        return through(*arguments)
    return dispatch(given["group_name"], given["x"].device, through, *arguments)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether one of the tensors needs a gradient: then the call must go through torch's dispatcher."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110  (a generator takes more host time than the rest)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def may_skip_dispatch(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a call on CUDA tensors may bypass torch's dispatcher, which saves 5 us: not while torch traces
    or transforms, under a dispatch mode or autocast, or for tensors that are not plain and dense.
    """
    if torch.compiler.is_compiling():
        return False
    for tensor in (x, *others):
        if tensor is None:
            continue
        if type(tensor) not in repeat.PLAIN_TENSORS or tensor.layout is not torch.strided:
            return False
        if tensor.is_nested or tensor.is_neg():
            return False
    return (
        x is not None
        and x.is_cuda
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
    )


def dispatch(group_name: str, device: torch.device, op: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a collective through torch's dispatcher; no thread comes between it and autograd's work."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    return in_turn(process_group(group_name), device, op, *arguments, holds=True)


def below(
    op: Collective, call: Any, group: ProcessGroup | None, also: Same = NOTHING, within: Recipe | None = None
) -> Any:
    """A call without gradients and dispatcher. also, within: facts and recipe of the operator around."""
    calls = repeat.without_group() if group is None else repeat.of_groups.get(group)
    if within is None and calls is not None:
        done = calls.call_below(op.number, *known(call).values())
        if done is not None:
            return done
    return run(op, call, group, also, within)


def run(
    op: Collective, call: Any, group: ProcessGroup | None, also: Same = NOTHING, within: Recipe | None = None
) -> Any:
    """As below, of a call that C++ does not know."""
    if group is None or group.size() == 1:
        sizes, given = op.sizes(call, 1), known(call)
        call = _writing(op, call, sizes, given)
        matrices = op.matrices(call, sizes)
        if group is not None:
            return op.answer(call, op.alone(matrices))
        recipe = Recipe(op.number, given, within)
        recipe.out = call.out
        return op.answer(call, op.alone(matrices, recipe))
    return in_turn(group, call.x.device, _among_ranks, op, call, group, also, within)


def _among_ranks(op: Collective, call: Any, group: ProcessGroup, also: Same, within: Recipe | None) -> Any:
    given = known(call)
    facts = _facts(op, given)
    workspace = find(group, call.x.device)
    plans = {} if workspace is None else workspace.plans
    found: Planned | None = plans.get(facts)
    sizes = op.sizes(call, group.size()) if found is None else found.sizes
    recipe = Recipe(op.number, given, within)
    call = _writing(op, call, sizes, given)
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
        return op.ways[plan.way](workspace, plan, matrices, recipe)
    with workspace.calling(plan, recipe.same):
        way = op.ways[workspace.carrier if plan.by_flux else "torch"]
        made = way(workspace, plan, matrices, recipe)
    return op.answer(call, made)


def _facts(op: Collective, given: dict[str, Any]) -> tuple[Any, ...]:
    """A cache key: all that the sizes and the plan of a call depend on, except the group."""
    facts: list[Any] = [op.number]
    for name, value in given.items():
        if isinstance(value, Tensor):
            if not name.startswith("out"):
                facts += (value.shape, value.stride(), value.dtype, value.device)
        else:
            facts.append(value)
    return tuple(facts)


def _writing(op: Collective, call: Any, sizes: Sizes, given: dict[str, Any]) -> Any:
    """A call with all tensors that it writes. A given `out` must share no memory."""
    made = op.results(call, sizes, op.name)
    if call.out is not None:
        others = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        read = [each for name, each in others.items() if not name.startswith("out")]
        may_be = [others.get(name) for name in op.may_be]
        outs = [made] if isinstance(made, Tensor) else made
        for i, out in enumerate(outs):
            name = argument_types.entry("out", outs, i)
            checks.separate(op.name, name, out, *read, *outs[:i], may_be=may_be)
    return call._replace(out=made)


def remember(
    kernel: str,
    recipe: Recipe | None,
    launch: functools.partial[Any],
    workspace: Any = None,
    results: Mapping[str, Tensor] | None = None,
    by_copy_engine: bool = False,
) -> None:
    """Lets C++ repeat a launch, if it uses the tensors of its caller, and no copies. kernel: its torch
    operator; what has names of neither the call nor `results` is scratch memory. results: new ones; None: the
    call's `out`.
    """
    if recipe is None:
        return
    numbers, args = {}, launch.args
    written = {"out": recipe.out} if results is None else results
    names, places = _tensors(kernel)
    for name, i, number in zip(names, places, recipe.numbers(*names), strict=True):
        numbers[name] = number
        operand = args[i] if i < len(args) else launch.keywords.get(name)
        if operand is None:
            continue
        given = (
            written[name] if name in written else None if number == repeat.ABSENT else recipe.given[number]
        )
        if given is None:
            numbers[name] = recipe.allocates(operand)
        elif operand.data_ptr() != given.data_ptr():
            return
    for name, tensor in written.items():
        numbers[name] = recipe.returns(tensor, name if results is None else "")
    used = list(numbers.values())
    if workspace is None:
        repeat.remember(repeat.without_group(), recipe, launch, [used])
    else:
        workspace.remember(recipe, launch, [used], by_copy_engine)


@functools.cache
def _tensors(kernel: str) -> tuple[list[str], list[int]]:
    """The names and places of a kernel's tensors among the arguments of its operator."""
    arguments = getattr(torch.ops.flux, kernel).default._schema.arguments
    places = [i for i, each in enumerate(arguments) if "Tensor" in str(each.type)]
    return [arguments[i].name for i in places], places


def _fake(op: Collective, call: Any, group: ProcessGroup | None) -> Any:
    """Tensors like the results; none for a call with `out`, which is checked."""
    sizes = op.sizes(call, 1 if group is None else group.size())
    made = op.results(call, sizes, op.name)
    if call.out is not None:
        return None
    end = getattr(call, "end", None)
    return made if end is None or end.norm_weight is None else end.fake(made)


def register(op: Collective, *variants: str, casts: bool = False, maps: bool = True) -> None:
    """Registers an operator, and variants, such as "_out". casts, maps: as in flux.calls.transforms."""
    inputs: dict[str, None] = {}
    for name in (op.name, *[op.name + variant for variant in variants]):
        arguments = getattr(torch.ops.flux, name).default._schema.arguments
        kinds = {PUBLIC_NAMES.get(each.name, each.name): str(each.type) for each in arguments}
        inputs |= {each: None for each, kind in kinds.items() if "Tensor" in kind and each != "out"}
        _ARGUMENTS[name] = list(kinds)
        implement(name, *(_registered(op, name, function) for function in (below, _fake)))
        if casts and not name.endswith("_out"):
            transforms.casts(name)
        if maps and not name.endswith("_out"):
            transforms.maps(name)
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
        result = function(op, op.call_of(given), group)
        if name.endswith("_out"):
            return None
        if not returns_list:
            return result
        return [result] if isinstance(result, Tensor) else list(result)

    return called
