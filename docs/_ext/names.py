"""flux's public names, their docstrings and examples, read from the source: no framework is imported."""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2] / "python"
MODULES = (
    "flux",
    "flux.layers",
    "flux.moe",
    "flux.moe.reference",
    "flux.testing",
    "flux.integrations.async_tp",
    "flux.integrations.dtensor",
    "flux.integrations.megatron",
    "flux.integrations.transformers",
)
Definition = ast.FunctionDef | ast.ClassDef


@cache
def tree(module: str) -> ast.Module | None:
    """The source of a module, or None for a name that is not one."""
    path = PACKAGES / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()) if file.exists() else None


def find(module: str, name: str) -> tuple[str, Definition] | None:
    """The module that defines a name of `module`, and the definition; None if it is no function or class."""
    source = tree(module)
    if source is None:
        return None
    for node in reversed(source.body):  # of overloads the last one is the function
        if isinstance(node, Definition) and node.name == name:
            return module, node
    for node in source.body:
        origin = node.module if isinstance(node, ast.ImportFrom) else None
        # `from flux import moe` in flux itself imports a module.
        if origin not in (None, module) and any(alias.name == name for alias in node.names):
            return find(origin, name)
    return None


def exported(module: str) -> list[str]:
    """`__all__` of a module."""
    source = tree(module)
    for node in source.body if source else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


@cache
def public() -> dict[str, tuple[str, Definition]]:
    """Every public function and class, by its full name, with the module that defines it."""
    found = {f"{module}.{name}": find(module, name) for module in MODULES for name in exported(module)}
    return {name: definition for name, definition in found.items() if definition is not None}


def example(node: Definition) -> str:
    """The code after `Example::` in a docstring; empty if there is none."""
    _, _, code = (ast.get_docstring(node) or "").partition("\nExample::\n")
    return textwrap.dedent(code).strip("\n")
