"""Looks up in wheels of vLLM what flux uses of it (required_names.py), without installing them.

    python tools/vllm_uses.py vllm-0.33.0-….whl …

Prints a table for docs/design/vllm.md: names by part, and in which wheels they are. Exit status 1 if the
newest one lacks any that is not optional.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from flux.integrations.vllm.required_names import NAMES, Name

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Wheel:
    """The Python sources of a wheel."""

    def __init__(self, path: Path) -> None:
        self.version = path.name.split("-")[1].partition("+")[0]
        self._archive = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module | None] = {}
        self._open: set[tuple[str, str]] = set()  # searches that wait for an import

    @cached_property
    def _names(self) -> set[str]:
        return set(self._archive.namelist())

    def lacks(self, use: Name) -> str | None:
        """What of a use the wheel does not have, or None."""
        first, *rest = use.name.split(".")
        found = self._find(use.module, first)
        for name in rest:
            found = None if found is None else self._member(*found, name)
        if found is None:
            return use.name
        node = found[1]
        if use.parameters and isinstance(node, Function):
            names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            if not names >= set(use.parameters):
                return f"{use.name}({', '.join(sorted(set(use.parameters) - names))})"
        owner = self._find(use.module, first)
        lost = [name for name in use.sets if owner is None or self._member(*owner, name) is None]
        return f"{first}.{lost[0]}" if lost else None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in self._names), None)
            self._trees[module] = None if file is None else ast.parse(self._archive.read(file))
        return self._trees[module]

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module and node that define a name of a module, which may import it from elsewhere."""
        if (module, name) in self._open:
            return None
        self._open.add((module, name))
        try:
            return self._search(module, name)
        finally:
            self._open.remove((module, name))

    def _search(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        tree = self._tree(module)
        statements = [] if tree is None else list(_statements(tree.body))
        for node in statements:
            if _defines(node, name):
                return module, node
        for node in statements:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self._find(self._absolute(module, node), wanted)
                        if found is not None:
                            return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = f"{module.replace('.', '/')}/__init__.py" in self._names
        base = module.split(".")[: len(module.split(".")) - node.level + package]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _member(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        """What a class or one of its bases defines, or sets on instances."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in owner.body:
            if _defines(node, name):
                return module, node
        for node in ast.walk(owner):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(ast.unparse(target) == f"self.{name}" for target in targets if target is not None):
                return module, node
        for base in owner.bases:
            found = self._find(module, re.split(r"[.\[]", ast.unparse(base))[0])
            member = None if found is None else self._member(*found, name)
            if member is not None:
                return member
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those under a condition."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | Function):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def table(wheels: list[Wheel]) -> str:
    """The Markdown table: names by part, and the versions that have them."""
    versions = [wheel.version for wheel in wheels]
    found: dict[tuple[str, str], list[str]] = {}
    for use in NAMES:
        have = [wheel.version for wheel in wheels if wheel.lacks(use) is None]
        where = "all" if have == versions else ", ".join(have) or "none"
        found.setdefault((use.part, where), []).append(f"`{use.path}`")
    rows = [f"| {part} | {', '.join(names)} | {where} |" for (part, where), names in found.items()]
    rows = ["| part | names | in |", "|---|---|---|", *rows]
    return "\n".join([f"Looked up in {', '.join(versions)}.", "", *rows])


def main(paths: list[str]) -> int:
    wheels = sorted(
        map(Wheel, map(Path, paths)), key=lambda wheel: [int(n) for n in wheel.version.split(".")]
    )
    print(table(wheels))
    needed = [use for use in NAMES if use.part != "optional"]
    lost = [f"{use.path}: no {what}" for use in needed if (what := wheels[-1].lacks(use)) is not None]
    for line in lost:
        print(f"{wheels[-1].version} lacks {line}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
