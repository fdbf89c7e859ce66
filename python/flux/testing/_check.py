"""Argument checks of `flux.testing.spawn`, made before any process is started."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist

from flux.calls.checks import fail
from flux.testing import rank_process

_MAX_SECONDS = 1e6  # as of FLUX_TIMEOUT_S


def refuse_type(argument: str, expected: str, got: object) -> None:
    raise TypeError(f"spawn: {argument}: expected {expected}, got {type(got).__name__} {got!r:.80}")


def work(fn: object, args: tuple[Any, ...]) -> bytes:
    """Pickles (fn, args); checks that ranks can import fn."""
    if not callable(fn):
        refuse_type("fn", "a function", fn)
    try:
        rank_process.dumps(fn)
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            "spawn: fn: expected a function that other processes can import, defined at the top level of a "
            f"module, got {name}: {error}"
        ) from error
    if _origin(fn) == "__main__" and not main_can_be_imported():
        fail(
            "spawn",
            "fn",
            "a function of a file that ranks can import",
            f"{getattr(fn, '__qualname__', repr(fn))} of an interactive session, -c or standard input",
        )
    for number, value in enumerate(args):
        try:
            rank_process.dumps(value)
        except Exception as error:
            raise TypeError(
                f"spawn: args[{number}]: expected what pickle can send, got {type(value).__name__}: {error}"
            ) from error
    return rank_process.dumps((fn, args))


def _origin(fn: object) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__module__", "") or "")


def main_can_be_imported() -> bool:
    """Whether the program has a file or is a module, unlike interactive sessions, -c and standard input."""
    main = sys.modules["__main__"]
    # A program on standard input says that its file is <stdin>.
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", ""))


def world_size(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        refuse_type("world_size", "an int", value)
    elif value < 1:
        fail("spawn", "world_size", "at least 1", value)


def timeout_s(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse_type("timeout_s", "a number", value)
    elif not 0.0 < value < _MAX_SECONDS:
        fail("spawn", "timeout_s", "a positive number of seconds below 1e6", value)


def backend(value: object) -> None:
    """Names as init_process_group takes them: "gloo", or by device "cpu:gloo,cuda:nccl"."""
    if value is None:
        return
    if not isinstance(value, str):
        refuse_type("backend", "a name or None", value)
        return
    for part in value.lower().split(","):
        device, colon, name = part.strip().rpartition(":")
        if not name or (colon and not device) or not dist.is_backend_available(name):
            known = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
            fail("spawn", "backend", f"backends of this torch ({', '.join(known)})", repr(value))


def env(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        refuse_type("env", "a mapping of str to str", value)
        return
    for name, text in value.items():
        if not isinstance(name, str):
            refuse_type("env", "names that are str", name)
        elif not isinstance(text, str):
            refuse_type(f"env[{name!r}]", "a str", text)
        elif not name or "=" in name or "\0" in name + text:
            fail("spawn", "env", "names without '=', no null characters", f"{name!r}: {text!r}")


def ranks_per_node(value: object, ranks: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        refuse_type("ranks_per_node", "an int or None", value)
    elif not 1 <= value <= ranks:
        fail("spawn", "ranks_per_node", f"1 to {ranks}, the number of ranks", value)


def may_die(value: object, ranks: int) -> None:
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        refuse_type("may_die", "a collection of ranks", value)
        return
    for rank in value:
        if not isinstance(rank, int) or isinstance(rank, bool):
            refuse_type("may_die", "ranks that are int", rank)
        elif not 0 <= rank < ranks:
            fail("spawn", "may_die", f"ranks from 0 to {ranks - 1}", rank)
