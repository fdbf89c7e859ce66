"""Whether a call goes through torch's dispatcher, and how it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flux.comm import registry, repeat
from flux.comm.group import process_group

PLAIN_TENSORS = frozenset(repeat.plain_types)  # before needs_no_python adds to them
# The __torch_function__ of a class of tensors that torch passes by.
PASSED_BY: Any = torch._C._disabled_torch_function_impl


def needs_no_python(tensor: torch.Tensor) -> bool:
    """Whether torch calls no Python for operators on tensors of this class: then flux repeats calls."""
    of = type(tensor)
    if of in repeat.plain_types:
        return True
    if of.__torch_function__ is not PASSED_BY or of.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    repeat.plain_types.append(of)
    return True


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
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
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
    return registry.in_turn(process_group(group_name), device, op, *arguments, holds=True)
