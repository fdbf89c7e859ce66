"""Docstrings of all public functions and classes: arguments, result, errors and an example, which runs in
test_doc_examples.py; and the pages of the reference, which show all of them.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

from names import Definition, example, public, tree  # noqa: E402

# What raises nothing of its own, or only what the class that it stands in for raises.
NO_ERRORS = {
    "flux.CommTimeoutError",
    "flux.Plan",
    "flux.integrations.async_tp.install",
    "flux.integrations.async_tp.uninstall",
    "flux.integrations.dtensor.FluxColwiseParallel",
    "flux.integrations.dtensor.FluxRowwiseParallel",
    "flux.integrations.dtensor.FluxSharedColwiseParallel",
    "flux.integrations.megatron.FluxMoELayer",
    "flux.integrations.megatron.accumulate_into_main_grad",
    "flux.integrations.megatron.coverage",
    "flux.integrations.megatron.get_flux_layer_spec",
    "flux.integrations.transformers.FluxRowwiseParallel",
    "flux.integrations.transformers.install",
    "flux.integrations.transformers.register",
    "flux.integrations.transformers.uninstall",
    "flux.moe.Routing",
    "flux.moe.reference.moe_mlp",
    "flux.testing.RankFailure",
    "flux.testing.SpawnError",
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$\n((?:^(?: .*)?$\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*\n(?:^     .*\n)*)", re.MULTILINE)


def sections(node: Definition) -> dict[str, str]:
    return dict(_SECTION.findall(ast.get_docstring(node) or ""))


def documented(node: Definition) -> dict[str, str]:
    """Arguments, or attributes, that a docstring describes, and what it says of them."""
    found = sections(node)
    entries = _ENTRY.findall(found.get("Args", "") + "\n" + found.get("Attributes", "") + "\n")
    return {name: text for names, text in entries for name in names.split(", ")}


def tensors(node: ast.FunctionDef) -> set[str]:
    """Arguments of a function that are tensors, or sequences of them."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {a.arg for a in named if a.annotation and "Tensor" in ast.unparse(a.annotation)}


def arguments(node: Definition, module: ast.Module) -> set[str]:
    """What a function, or a class's __init__, takes; of a dataclass or NamedTuple its fields."""
    if isinstance(node, ast.ClassDef):
        fields = {
            a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
        }
        inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if inits:
            return arguments(inits[0], module)
        bases = {ast.unparse(base) for base in node.bases}
        if fields and (node.decorator_list or "NamedTuple" in bases):
            return fields
        above = [c for c in module.body if isinstance(c, ast.ClassDef) and c.name in bases]
        return arguments(above[0], module) if above else set()
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    return {a.arg for a in (*named, spec.vararg, spec.kwarg) if a is not None} - {"self"}


def lacks(name: str, node: Definition, module: ast.Module) -> list[str]:
    """What a docstring leaves out, or has too much."""
    text, found = ast.get_docstring(node) or "", sections(node)
    missing = [] if example(node) else ["Example::"]
    # Those of another library's class are documented there.
    if not re.search(r"^Arguments\b[^.]* are those\s+of ", text, re.MULTILINE):
        taken, described = arguments(node, module), documented(node)
        missing += sorted(taken - described.keys())
        if isinstance(node, ast.FunctionDef):
            missing += [f"no argument {other}" for other in sorted(described.keys() - taken)]
            missing += [
                f"shape of {name}"
                for name in sorted(tensors(node) & described.keys())
                if "[" not in described[name] and "shape" not in described[name]
            ]
            if tensors(node) and not re.search(r"dtype|float", "".join(described.values())):
                missing.append("dtype")
    if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)) != "None":
        missing += [] if "Returns" in found else ["Returns"]
    if ("Raises" in found) == (name in NO_ERRORS):
        missing.append("Raises")
    return missing


@pytest.mark.parametrize("name", public())
def test_docstring_is_complete(name: str) -> None:
    place, node = public()[name]
    module = tree(place)
    assert module is not None
    assert lacks(name, node, module) == []


def test_exceptions_are_public_names() -> None:
    assert set(public()) >= NO_ERRORS


COMPLETE = '''
def f(x: int) -> int:
    """Adds one.

    Args:
        x: a number.

    Returns:
        The next one.

    Raises:
        TypeError: it is none.

    Example::

        assert f(1) == 2
    """
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("Example::", "Such as::", ["Example::"]),
        ("x: a number", "y: a number", ["x", "no argument y"]),
        ("(x: int)", "(x: int, *, z: int)", ["z"]),
        ("Returns:", "Gives:", ["Returns"]),
        ("Raises:", "Errors:", ["Raises"]),
        ("(x: int)", "(x: torch.Tensor)", ["shape of x", "dtype"]),
    ],
)
def test_incomplete_docstrings_are_found(old: str, new: str, expected: list[str]) -> None:
    module = ast.parse(COMPLETE.replace(old, new) if old else COMPLETE)
    node = module.body[0]
    assert isinstance(node, ast.FunctionDef)
    assert lacks("f", node, module) == expected


def test_reference_shows_every_public_name_once() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(public())
