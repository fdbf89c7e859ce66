"""Argument checks of `flux.testing.spawn`, made before any process is started."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist

from flux.calls import argument_types as types
from flux.calls.checks import fail
from flux.testing import rank_process

_MAX_SECONDS = 1e6  # as of FLUX_TIMEOUT_S


def work(fn: object, args: tuple[Any, ...]) -> bytes:
    """Pickles (fn, args); checks that ranks can import fn."""
    if not callable(fn):
        types.wrong_type("spawn", "fn", "a function", fn)
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


def numbers(world_size: object, timeout_s: object, ranks_per_node: object, may_die: object) -> None:
    ranks = types.size("spawn", "world_size", world_size, 1)
    types.number("spawn", "timeout_s", timeout_s)
    if not 0.0 < timeout_s < _MAX_SECONDS:  # type: ignore[operator]
        fail("spawn", "timeout_s", "a positive number of seconds below 1e6", timeout_s)
    if ranks_per_node is not None and types.size("spawn", "ranks_per_node", ranks_per_node, 1) > ranks:
        fail("spawn", "ranks_per_node", f"1 to {ranks}, the number of ranks", ranks_per_node)
    if not isinstance(may_die, Collection) or isinstance(may_die, str | bytes):
        types.wrong_type("spawn", "may_die", "a collection of ranks", may_die)
    for rank in may_die:
        if types.size("spawn", "may_die", rank) >= ranks:
            fail("spawn", "may_die", f"ranks from 0 to {ranks - 1}", rank)


def backend(value: object) -> None:
    """Names as init_process_group takes them: "gloo", or by device "cpu:gloo,cuda:nccl"."""
    if value is None:
        return
    if not isinstance(value, str):
        types.wrong_type("spawn", "backend", "a name or None", value)
    for part in value.lower().split(","):
        device, colon, name = part.strip().rpartition(":")
        if not name or (colon and not device) or not dist.is_backend_available(name):
            known = [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
            fail("spawn", "backend", f"backends of this torch ({', '.join(known)})", repr(value))


def env(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        types.wrong_type("spawn", "env", "a mapping of str to str", value)
    for name, text in value.items():
        types.string("spawn", "env", name)
        types.string("spawn", f"env[{name!r}]", text)
        if not name or "=" in name or "\0" in name + text:
            fail("spawn", "env", "names without '=', no null characters", f"{name!r}: {text!r}")
