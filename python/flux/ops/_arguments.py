"""Checks of arguments that a type checker would have caught, for functions and modules made of operators.

A wrong type is a TypeError, a wrong value a ValueError. Both name operator, argument, expected and got.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from flux.ops import _check


def wrong_type(op: str, argument: str, expected: str, got: object) -> NoReturn:
    value = f" {got!r}" if isinstance(got, (bool, int, float, str)) else ""
    raise TypeError(f"{op}: {argument}: expected {expected}, got {type(got).__name__}{value}")


def tensor(op: str, argument: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor", value)


def optional_tensor(op: str, argument: str, value: object) -> None:
    if value is not None and not isinstance(value, torch.Tensor):
        wrong_type(op, argument, "a tensor or None", value)


def sequence(op: str, argument: str, value: object, check: Callable[[str, str, object], None]) -> None:
    """Checks a list or tuple, and each entry by `check`."""
    if not isinstance(value, (list, tuple)):
        wrong_type(op, argument, "a list", value)
    for i, entry in enumerate(value):
        check(op, f"{argument}[{i}]", entry)


def flag(op: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        wrong_type(op, argument, "True or False", value)


def optional_function(op: str, argument: str, value: object) -> None:
    if value is not None and not callable(value):
        wrong_type(op, argument, "a function or None", value)


def size(op: str, argument: str, value: Any, least: int = 0) -> int:
    """The value as an int, if it is an integer of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        wrong_type(op, argument, "an integer", value)
    if isinstance(value, bool):
        wrong_type(op, argument, "an integer", value)
    if number < least:
        _check.fail(op, argument, f"an integer of at least {least}", number)
    return number


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
