"""Old spellings: each works for one release, and warns once in a process."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_said: set[str] = set()


def warn(old: str, new: str) -> None:
    """Says, where flux was called, that a name will go. Not while torch.compile traces."""
    if torch.compiler.is_compiling() or old in _said:
        return
    _said.add(old)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "flux":
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is deprecated and goes with flux 0.4: {new}", DeprecationWarning, stacklevel=level)


def word(op: str, argument: str, given: Any, words: dict[str, str]) -> Any:
    """What a value is called now. words: by old ones."""
    if not isinstance(given, str) or given not in words:
        return given
    warn(f"{op}({argument}={given!r})", f"use {words[given]!r}")
    return words[given]


def attribute(old: str, new: str) -> Any:
    """A property with the value of another attribute."""

    def get(self: Any) -> Any:
        warn(f"{type(self).__name__}.{old}", f"use {new}")
        return getattr(self, new)

    return property(get)


def arguments(*positional: str, **renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of functions.

    Args:
        positional: keyword arguments that may be positional as before, behind all others.
        renamed: new names of keyword arguments, by old ones; "" of one that is gone, and could only be 1.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        op = function.__qualname__.removesuffix(".__init__")
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if most < len(args) <= most + len(positional):
                for name, value in zip(positional, args[most:], strict=False):
                    warn(f"{op}({name}) by position", f"write {name}=")
                    _give(op, kwargs, name, value)
                args = args[:most]
            for old in renamed.keys() & kwargs.keys():
                warn(f"{op}({old}=)", f"use {renamed[old]}=" if renamed[old] else "leave it out")
                value = kwargs.pop(old)
                if renamed[old]:
                    _give(op, kwargs, renamed[old], value)
                elif value != 1:
                    raise ValueError(f"{op}: {old}: expected 1, or nothing, got {value!r}")
            return function(*args, **kwargs)

        return call

    return decorate


def _give(op: str, kwargs: dict[str, Any], name: str, value: object) -> None:
    if name in kwargs:
        raise TypeError(f"{op}: {name}: expected one value, got two")
    kwargs[name] = value
