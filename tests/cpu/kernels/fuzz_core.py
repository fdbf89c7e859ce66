"""Calls everything in flux._core with arguments that are sensible but for some that are not.

    python fuzz_core.py <the extension module> <seed> <calls> <file for the last call>

A program of its own, run by test_core_bindings.py: a crash must not take the tests with it, and the file then
holds the last call. Prints for each function how often it returned and how often it raised. Functions trust
addresses, so they are right here, except where the function can tell. They do not trust sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import random
import re
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0  # under sanitizers; without them a fraction of a second is enough
LIMIT_MIB = 1024
EXPECTED = (ValueError, TypeError, OverflowError)
POWERS = (15, 16, 20, 28, 30, 31, 32, 40, 48, 62, 63, 64, 100)
EXTREME = (
    *(0, -1, 1, 2, 7, 8, 9, 127, 128, 129, 255, 10**6),
    *(sign * (1 << power) + off for power in POWERS for sign in (1, -1) for off in (-1, 0, 1)),
)
WRONG: tuple[Any, ...] = (None, "8", 2.5, float("nan"), [], [1, 2], {}, b"8", object(), 1j, int)
# By the name of a parameter, where small numbers will not do.
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 3, 4, 4, 8, 8),
    "ep_size": (1, 1, 2, 4),
    "m": (8, 24, 128, 840, 4096, 65536),
    "n": (8, 64, 136, 1000, 8192, 28672),
    "k": (8, 64, 200, 4096),
    "num_sms": (2, 7, 100),
    "cta": (0, 1, 1),
    "config": (-1, 0, 3, 9, 0x0105, 0x100203, 64, 0x240, 0x10141),
    "cluster": (1, 2, 3),
    "group_m": (1, 2, 8, 16),
    "num_experts": (8, 64, 256),
    "block_m": (1, 64, 128),
    "block_rows": (8, 32),
    "timeout_s": (0.0, 1e-4),
    "slot": (0, 0, 1),
    "m_tile": (0, 0, 1),
    "n_tile": (0, 0, 1),
    "table": (None,),  # a capsule of the kernels
    "given": ((), (1, 2.5, None)),
    "fresh": ([],),
    "launches": ([],),
    "results": ([0],),
    "block": (None,),
    "follows": (None,),
    "group_name": ("", "a group"),
}
BAD_FLOATS = (-1.0, float("nan"), float("-inf"), "x", None)
ENTRIES = 512  # of moe_tiles
Parameter = tuple[str, str]  # name and type, as pybind11 writes them


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("flux._core", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature(function: Any) -> list[Parameter] | None:
    first_line = (function.__doc__ or "").split("\n")[0]
    found = re.match(r"\w+\((.*?)\) -> ", first_line)
    return None if found is None else re.findall(r"(\w+): ([^,=]+)", found[1])


def is_fuzzed(name: str) -> bool:
    return not name.startswith("_")


def functions(core: Any) -> dict[str, tuple[Any, list[Parameter]]]:
    """Everything that can be called, with its parameters: functions, constructors, methods."""
    found = {}
    for name, value in vars(core).items():
        if not is_fuzzed(name):
            continue
        if not inspect.isclass(value):
            if callable(value) and (parameters := signature(value)) is not None:
                found[name] = (value, parameters)
            continue
        if (parameters := signature(value.__init__)) is not None:
            found[name] = (value, parameters[1:])
        for method in filter(is_fuzzed, dir(value)):
            attribute = getattr(value, method)
            if (parameters := signature(attribute)) is not None and callable(attribute):
                found[f"{name}.{method}"] = (attribute, parameters)
    found.pop("planted_defect", None)  # of sanitized builds: a crash is its purpose
    found.pop("Torch", None)  # takes a capsule of torch
    return found


class Fuzzer:
    def __init__(self, core: Any, seed: int, calls_file: str) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.functions = functions(core)
        self.objects: dict[str, list[Any]] = {}
        self.returned: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self._last_call = os.open(calls_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self._word = (ctypes.c_uint32 * 16)()
        # A schedule in groups of 16 tile rows, and what is none.
        groups = [(i % 3, 0, i // 16 * 16, 16) for i in range(ENTRIES)]
        noise = [self.rng.choice((0, 1, 2, 5, -1, 1 << 30, -(1 << 31))) for _ in range(4 * ENTRIES)]
        words = ctypes.c_int32 * (4 * ENTRIES)
        self._entries = [words(*(word for entry in groups for word in entry)), words(*noise)]
        for mode in ("ONE_SHOT", "TWO_SHOT", "SCATTER"):
            self._keep(getattr(core.ExchangeMode, mode))

    def run(self, calls: int) -> None:
        names = sorted(self.functions)
        for number in range(calls):
            name = names[number % len(names)] if number < 40 * len(names) else self.rng.choice(names)
            function, parameters = self.functions[name]
            arguments = self._moe_route() if name == "moe_route" else self._arguments(parameters)
            if arguments is not None:
                self._call(name, function, arguments)

    def _call(self, name: str, function: Callable[..., Any], arguments: list[Any]) -> None:
        text = f"{name}({', '.join(f'{argument!r:.60}' for argument in arguments)})"
        os.pwrite(self._last_call, text.ljust(900).encode(), 0)
        start, before = time.monotonic(), peak_mib()
        try:
            result = function(*arguments)
        except EXPECTED as error:
            assert str(error), f"{text}: an error without words"
            self.raised[name] += 1
        except BaseException as error:
            raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error
        else:
            self.returned[name] += 1
            self._keep(result)
        taken = time.monotonic() - start
        assert taken < LIMIT_S, f"{text}: took {taken:.1f} s"
        assert peak_mib() < before + LIMIT_MIB, f"{text}: took {peak_mib() - before} MiB"

    def _keep(self, result: Any) -> None:
        """Reads what an object says of itself, and keeps some for other calls."""
        kind = type(result).__name__
        if kind not in vars(self.core):
            return
        for name in filter(is_fuzzed, dir(type(result))):
            if isinstance(getattr(type(result), name), property):
                with contextlib.suppress(EXPECTED):
                    getattr(result, name)
        kept = self.objects.setdefault(kind, [])
        if len(kept) < 50:
            kept.append(result)
        else:
            kept[self.rng.randrange(50)] = result

    def _arguments(self, parameters: list[Parameter]) -> list[Any] | None:
        arguments = [self._sensible(*parameter) for parameter in parameters]
        names = [name for name, _ in parameters]
        if "world_size" in names and self.rng.random() < 0.9:
            world_size = arguments[names.index("world_size")]
            if "rank" in names:
                arguments[names.index("rank")] %= world_size
            if "peers" in names:
                arguments[names.index("peers")] = [self.rng.getrandbits(40) for _ in range(world_size)]
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, len(arguments))) if arguments else 0):
            i = self.rng.randrange(len(arguments))
            name, kind = parameters[i]
            if "flux._core." in kind and self.rng.random() < 0.9:
                continue
            arguments[i] = self._senseless(name, kind)
        return arguments

    def _sensible(self, name: str, kind: str) -> Any:
        if "flux._core." in kind:
            kept = self.objects.get(kind.rpartition(".")[2])
            return self.rng.choice(kept) if kept else None
        if name == "addr":
            self._word[0] = self.rng.choice((0, 5, 1 << 31, (1 << 32) - 1))
            return ctypes.addressof(self._word)
        if name == "entries":
            return ctypes.addressof(self.rng.choice(self._entries))
        if name == "num_entries":
            return self.rng.randint(0, ENTRIES)
        if name in SENSIBLE:
            return self.rng.choice(SENSIBLE[name])
        if "Sequence" in kind:
            return [1, 2, 3]
        if "bool" in kind:
            return self.rng.random() < 0.5
        return self.rng.choice((0, 0, 1, 1, 2, 3, 5, 8, 16, 64, 1000))

    def _senseless(self, name: str, kind: str) -> Any:
        if self.rng.random() < 0.2:
            return self.rng.choice(WRONG)
        if name in ("addr", "entries"):
            return self.rng.choice((0, -1, 3, (1 << 40) + 2, 1 << 64))
        if name == "num_entries":
            return self.rng.choice([value for value in EXTREME if value <= ENTRIES or value >= 1 << 30])
        if name == "timeout_s":
            return self.rng.choice(BAD_FLOATS)
        if "Sequence" in kind:
            return [self.rng.choice(EXTREME) for _ in range(self.rng.choice((0, 1, 8, 9, 1000)))]
        if self.rng.random() < 0.3:
            bits = self.rng.randrange(34)
            return self.rng.choice((1, -1)) * self.rng.getrandbits(bits)
        return self.rng.choice(EXTREME)

    def _moe_route(self) -> list[Any] | None:
        """Arrays of the sizes that the layout says, so that a sanitizer sees what reaches behind them."""
        small = [layout for layout in self.objects.get("MoeLayout", ()) if layout.max_rows <= 10_000]
        if not small:
            return None
        layout = self.rng.choice(small)
        block_m = self.rng.choice((1, 2, 64, 128, 1 << 20, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 0, -1))
        p, k, tokens = layout.world_size, layout.top_k, layout.max_tokens
        local = layout.local_experts
        if local > 10_000:
            return None
        tiles = layout.max_tiles(block_m) if 1 <= block_m < 1 << 30 else 1
        sizes = (local + 1, local * p, layout.max_rows, p * tokens * k, p * tokens, p)
        sizes = (*sizes, layout.ep_size * tokens, layout.ep_size * tokens, 4 * tiles, 1)
        values = (-1, -(1 << 31), (1 << 31) - 1, *range(min(layout.num_experts, 20)), layout.num_experts)
        ids = [self.rng.choice(values) for _ in range(p * tokens * k)]
        # Not ctypes arrays: small ones lie within an object, where a sanitizer does not see their end.
        self._alive = [bytearray(struct.pack(f"{len(ids)}i", *ids)), *(bytearray(4 * size) for size in sizes)]
        ids_address, *addresses = (
            ctypes.addressof(ctypes.c_char.from_buffer(of)) if of else 0 for of in self._alive
        )
        bad = self.rng.random()
        if bad < 0.1:
            addresses = addresses[: self.rng.randrange(10)]
        elif bad < 0.2:
            addresses[self.rng.randrange(10)] += self.rng.choice((1, 2, 3))
        return [layout, block_m, ids_address, addresses]


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(path: str, seed: str, calls: str, calls_file: str) -> None:
    fuzzer = Fuzzer(load(path), int(seed), calls_file)
    fuzzer.run(int(calls))
    print(json.dumps({name: [fuzzer.returned[name], fuzzer.raised[name]] for name in fuzzer.functions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
