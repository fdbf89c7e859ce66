"""Calls on GPUs that are repeated: C++ enqueues them from the second time on (csrc/bindings/known_calls.cc),
as checks, plan and dispatch hold for all calls with the same shapes, strides, dtypes and options. An operator
asks `KnownCalls.call`; after None it makes the call itself, and tells `remember` how.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from flux import _native
from flux.comm.group import GroupLike, resolve_group

_c10d: Any = torch.distributed.distributed_c10d
_C: Any = torch._C
_ops: Any = torch.ops

# The operand for an optional tensor that is not given.
ABSENT: int = _native.core.ABSENT_OPERAND
_count = itertools.count()
_all: weakref.WeakSet[Any] = weakref.WeakSet()  # KnownCalls

Launch: TypeAlias = Callable[[], object]  # enqueues kernels

# Of tensors in one block, in bytes: what a cache line of the GPU holds, so that no two share one.
_BLOCK_ALIGNMENT = 128

# Of a tensor that a call allocates: shape, strides or None if it is contiguous, the argument it is like, its
# dtype or None if the argument has the same, and strides and offset in the call's block or None.
Fresh: TypeAlias = tuple[
    tuple[int, ...], tuple[int, ...] | None, int, "torch.dtype | None", tuple[tuple[int, ...], int] | None
]
# A launch of a call: all tensors that its operator takes, in the order of its arguments; the number, from 1,
# of the call by copy engines that it belongs to, or 0; and None, or what it is instead: a function of the
# operands that calls torch.
Kernel: TypeAlias = "tuple[Sequence[Any], int, Callable[..., object] | None]"


def operator() -> int:
    """A number for an operator, the first argument of its known calls."""
    return next(_count)


class Recipe:
    """How a call is repeated. An operand is the number of an argument, or below 0 of what it allocates."""

    def __init__(self, operator: int, given: Mapping[str, Any], within: Recipe | None = None) -> None:
        """given: by name, in the order of `KnownCalls.call`. within: of the call that this is a part of."""
        self.given = (operator, *given.values())
        self.within = within
        self.out: Any = None  # the tensors that the call writes, as its caller gets them
        self.same: Any = {}  # what ranks compare of it
        self._numbers = dict(zip(given, range(1, len(given) + 1), strict=True))
        self.fresh: list[Fresh | None] = []  # None: a step makes it
        self.block: Fresh | None = None
        self.results: list[int] = []
        self.follows: tuple[Callable[..., Any], list[int], list[int]] | None = None
        self._made: list[torch.Tensor] = []
        # Of calls within this one: their launches, with tensors as operands, and the tensors that they make.
        self.parts: list[Launch] = []
        self._kernels: list[Kernel] = []
        self._theirs: list[torch.Tensor] = []

    def number(self, name: str) -> int:
        return self._numbers.get(name, ABSENT)

    def numbers(self, *names: str) -> list[int]:
        return list(map(self._numbers.get, names, itertools.repeat(ABSENT)))

    def in_place(self, **operands: Any) -> bool:
        """Whether kernels read these arguments themselves, and no copies. operands: may be no tensors."""
        for name, operand in operands.items():
            is_tensor = isinstance(operand, torch.Tensor)
            if is_tensor and operand.data_ptr() != self.given[self._numbers[name]].data_ptr():
                return False
        return True

    def allocates(self, tensor: torch.Tensor) -> int:
        """The operand for a tensor that the call allocates, on the device of its arguments."""
        strides = None
        # Contiguous tensors may have any stride where their size is 0 or 1.
        if not tensor.is_contiguous() or not {0, 1}.isdisjoint(tensor.shape):
            usual = torch.empty(tensor.shape, device="meta").stride()
            strides = None if tensor.stride() == usual else tensor.stride()
        self.fresh.append((tuple(tensor.shape), strides, *self._like(tensor), None))
        self._made.append(tensor)
        return -len(self.fresh)

    def allocates_together(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Operands for tensors of one dtype, in one block, once: of small ones, allocations take longest."""
        like, dtype = self._like(tensors[0])
        end, step = 0, _BLOCK_ALIGNMENT // tensors[0].element_size()
        for tensor in tensors:
            self.fresh.append((tuple(tensor.shape), None, like, dtype, (tensor.stride(), end)))
            self._made.append(tensor)
            end += -(-tensor.numel() // step) * step
        self.block = ((end,), None, like, dtype, None)
        return list(range(len(tensors) - len(self.fresh) - 1, -len(self.fresh) - 1, -1))

    def _like(self, tensor: torch.Tensor) -> tuple[int, torch.dtype | None]:
        """The number of an argument on the same device; the dtype, unless that argument has the same."""
        first = 0
        for number, given in enumerate(self.given):
            if isinstance(given, torch.Tensor):
                if given.dtype == tensor.dtype:
                    return number, None
                first = first or number
        return first, tensor.dtype

    def returns(self, tensor: torch.Tensor, argument: str = "") -> int:
        """The operand for a result: that argument if it was given, else a fresh tensor."""
        number = self._numbers.get(argument, ABSENT)
        given = number != ABSENT and self.given[number] is not None
        self.results.append(number if given else self.allocates(tensor))
        return self.results[-1]

    def add(self, part: Recipe, launch: Launch, kernels: Sequence[Kernel]) -> None:
        def of(operand: int) -> Any:
            if operand == ABSENT:
                return None
            return part._made[-1 - operand] if operand < 0 else part.given[operand]

        before = max((copy_call for _, copy_call, _ in self._kernels), default=0)
        for operands, copy_call, step in kernels:
            self._kernels.append((list(map(of, operands)), copy_call and before + copy_call, step))
        self.parts.append(launch)
        self._theirs += part._made

    def add_step(self, step: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Adds work of torch on these tensors, in place: between the calls within this one, or after them."""
        self.parts.append(lambda: None)
        self._kernels.append((tensors, 0, step))

    def made_by(
        self, step: Callable[..., Any], operands: Sequence[int], made: Sequence[torch.Tensor]
    ) -> None:
        """Lets a step make results, `made` now, of these operands, behind all else: one, or several."""
        numbers = [next(i for i, each in enumerate(self._made) if each is one) for one in made]
        for number in numbers:
            self.fresh[number] = None
        self.follows = (step, list(operands), [-1 - number for number in numbers])

    def whole(self, count: int) -> list[Kernel] | None:
        """The launches of the `count` calls within this one, with operands of this one, if all are known."""
        given = {i: each for i, each in enumerate(self.given) if isinstance(each, torch.Tensor)}
        own = {each.data_ptr() for each in (*given.values(), *self._made)}
        for each in self._theirs:
            if each.data_ptr() not in own:
                own.add(each.data_ptr())
                self.allocates(each)
        given |= {-1 - i: each for i, each in enumerate(self._made)}
        numbers = {tensor.data_ptr(): number for number, tensor in given.items()}
        used = [each for operands, _, _ in self._kernels for each in operands if each is not None]
        known = all(tensor.data_ptr() in numbers for tensor in used)
        if len(self.parts) != count or len(numbers) != len(given) or not known:
            return None
        return [
            ([ABSENT if each is None else numbers[each.data_ptr()] for each in operands], copy_call, step)
            for operands, copy_call, step in self._kernels
        ]


# Of tensors with which calls are repeated. Torch calls no Python for them.
plain_types: list[Any] = [torch.Tensor, torch.nn.Parameter]
PLAIN_TENSORS = frozenset(plain_types)  # before needs_no_python adds to them
# The __torch_function__ of a class of tensors that torch passes by.
PASSED_BY: Any = torch._C._disabled_torch_function_impl


def needs_no_python(tensor: torch.Tensor) -> bool:
    """Whether torch calls no Python for operators on tensors of this class: then flux repeats calls."""
    of = type(tensor)
    if of in plain_types:
        return True
    if of.__torch_function__ is not PASSED_BY or of.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    plain_types.append(of)
    return True


@functools.cache
def _torch() -> Any:
    """What torch says about tensors, or None if this version does not tell C++."""
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange_api is None:
        return None
    functorch, dispatch_stack = _C._functorch.peek_interpreter_stack, _C._len_torch_dispatch_stack
    return _native.core.Torch(
        exchange_api,
        types=plain_types,
        dtype=torch.dtype,
        # What code that torch compiles makes its views with.
        view=getattr(_C._dynamo.guards, "_reinterpret_tensor", None),
        states=[dispatch_stack, functorch, _C._is_any_autocast_enabled],
        grad_enabled=torch.is_grad_enabled,
        profiler_enabled=_C._autograd._profiler_enabled,
        increment_version=_C._increment_version,
        forward_ad=vars(forward_ad),
    )


@functools.cache
def _launch_table() -> Any:
    """The capsule of the kernels' LaunchTable, or None if there are no kernels."""
    if not _native.available():
        return None
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(_ops.flux._launch_table(), _native.core.LAUNCH_TABLE, None)


def make(turn: Any = None, order: Any = None, error_address: int = 0, group_name: str = "") -> Any:
    """The known calls (flux._core.KnownCalls) of a workspace, or of operators without communication."""
    made = _native.core.KnownCalls(_torch(), _launch_table(), turn, order, error_address, group_name)
    _all.add(made)
    return made


def forget_all() -> None:
    for calls in _all:
        calls.clear()


@functools.cache
def without_group() -> Any:
    return make()


def keep(launch: Launch) -> list[int]:
    """The handles of launches, which are kept instead of enqueued."""
    _ops.flux._keep.default()
    try:
        launch()
    finally:
        handles: list[int] = _ops.flux._kept.default()
    return handles


def remember(
    calls: Any,
    recipe: Recipe,
    launch: Launch,
    operands: Sequence[Sequence[int]],
    by_copy_engine: bool = False,
    kernels: Sequence[Kernel] = (),
) -> None:
    """Makes a call known that was made. launch: enqueues its kernels once more. operands: of each kernel,
    which must use them in place. by_copy_engine: its calls the host counts. kernels: instead of these two.
    """
    copy_call = itertools.repeat(int(by_copy_engine))
    kernels = kernels or list(zip(operands, copy_call, itertools.repeat(None), strict=False))
    if recipe.within is not None:
        recipe.within.add(recipe, launch, kernels)
    elif _launch_table() is not None and not calls.knows(*recipe.given):
        handles = iter(keep(launch))
        launches = [(0 if kernel[2] else next(handles), *kernel) for kernel in kernels]
        assert next(handles, None) is None
        results, one = recipe.results, len(recipe.results) == 1
        calls.remember(recipe.given, recipe.fresh, launches, results, one, recipe.block, recipe.follows)


def remember_parts(calls: Any, recipe: Recipe, count: int) -> None:
    """Makes a call known that consists of `count` others and of nothing else, if all of them could be."""
    kernels = recipe.whole(count)
    if kernels is not None:
        remember(calls, recipe, lambda: [launch() for launch in recipe.parts], (), kernels=kernels)


# Of the first device of each group that has a workspace there; of all devices for a group of one rank.
of_groups: dict[ProcessGroup, Any] = {}


def of(group: GroupLike) -> Any:
    """The known calls of a group, or None if there are none."""
    if group is None:
        group = _c10d._world.default_pg
    else:
        try:
            by_name = isinstance(group, str)
            group = _c10d._resolve_process_group(group) if by_name else resolve_group(group, "")
        except (RuntimeError, TypeError, ValueError):
            return None
    return of_groups.get(group)  # type: ignore[arg-type]
