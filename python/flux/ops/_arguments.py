"""Checks of arguments that a type checker would have caught, for functions and modules made of operators.

A wrong type is a TypeError, a wrong value a ValueError. Both name operator, argument, expected and got.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from flux.ops import _check

_unpack_dual: Any = forward_ad.unpack_dual  # not typed


def wrong_type(op: str, argument: str, expected: str, got: object) -> NoReturn:
    value = f" {got!r}" if isinstance(got, (bool, int, float, str)) else ""
    raise TypeError(f"{op}: {argument}: expected {expected}, got {type(got).__name__}{value}")


def tensor(op: str, argument: str, value: object) -> None:
    """Checks that an argument is a tensor that operators can read in place."""
    if not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor", value)
    if torch.compiler.is_compiling():
        return
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "to_local"):
        wrong_type(op, argument, "this rank's part, such as a DTensor's to_local()", value)
    if value.is_nested:
        _check.fail(op, argument, "a dense tensor", "a nested one")
    if value.layout != torch.strided:
        _check.fail(op, argument, "a dense tensor", f"layout {value.layout}")
    if value.is_quantized or value.is_complex():
        _check.fail(op, argument, "a tensor of real numbers, not quantised", f"dtype {value.dtype}")
    if value.device.type not in ("cpu", "cuda", "meta"):
        _check.fail(op, argument, "a tensor on the CPU or a CUDA device", f"device {value.device}")
    if forward_ad._current_level >= 0 and _unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{op}: {argument}: expected a tensor without a tangent, got a dual tensor: flux has no "
            "derivatives in forward mode; torch.autograd.grad works"
        )


def optional_tensor(op: str, argument: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor or None", value)
    tensor(op, argument, value)


def sequence(op: str, argument: str, value: object, check: Callable[[str, str, object], None]) -> None:
    """Checks a list or tuple, and each entry by `check`."""
    if not isinstance(value, (list, tuple)):
        wrong_type(op, argument, "a list", value)
    for i, entry in enumerate(value):
        check(op, f"{argument}[{i}]", entry)


def flag(op: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        wrong_type(op, argument, "True or False", value)


def flag_or_auto(op: str, argument: str, value: object) -> None:
    if isinstance(value, str):
        if value != "auto":
            _check.fail(op, argument, "True, False or 'auto'", repr(value))
    elif not isinstance(value, bool):
        wrong_type(op, argument, "True, False or 'auto'", value)


def string(op: str, argument: str, value: object) -> None:
    if not isinstance(value, str):
        wrong_type(op, argument, "a string", value)


def number(op: str, argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat)):
        wrong_type(op, argument, "a number", value)


def integer(op: str, argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        wrong_type(op, argument, "an integer", value)


def dtype(op: str, argument: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        wrong_type(op, argument, "a torch.dtype", value)


def optional_function(op: str, argument: str, value: object) -> None:
    if value is not None and not callable(value):
        wrong_type(op, argument, "a function or None", value)


def size(op: str, argument: str, value: Any, least: int = 0) -> int:
    """The value as an int, if it is an integer of at least `least`."""
    integer(op, argument, value)
    if value < least:
        _check.fail(op, argument, f"an integer of at least {least}", value)
    return int(value)


def floating_dtype(op: str, argument: str, value: object) -> None:
    """Checks a dtype that parameters may have. None stands for torch's default."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        wrong_type(op, argument, "a torch.dtype or None", value)
    if value not in _check.FLOATING:
        _check.fail(op, argument, "bfloat16, float16, float32 or float64", value)


def device(op: str, argument: str, value: Any) -> None:
    """Checks a device, its name or its index. None stands for torch's default."""
    if value is None or isinstance(value, torch.device):
        return
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        wrong_type(op, argument, "a torch.device, its name or None", value)
    try:
        torch.device(value)
    except RuntimeError:
        _check.fail(op, argument, "a torch.device, its name or None", repr(value))
