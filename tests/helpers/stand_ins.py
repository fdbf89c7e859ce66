"""Modules in place of packages that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def modules(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules with these names in them, and the packages that these are in, by their full names."""
    made: dict[str, ModuleType] = {}
    for path, names in contents.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name, package = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
            if name not in made:
                made[name] = ModuleType(name)
                made[name].__spec__, made[name].__path__ = ModuleSpec(name, None), []
                if package:
                    setattr(made[package], parts[depth - 1], made[name])
        vars(made[path]).update(names)
    return made
